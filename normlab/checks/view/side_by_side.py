"""Two checks side by side: one record for the card, the JSON and the page, verdict by verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from normlab.checks.judge import growth_laws
from normlab.checks.judge.verdict import LEVELS, Level, Verdict, mean
from normlab.checks.result import SCHEMA, Check
from normlab.checks.view.summary import is_open, sentence
from normlab.probes.profile import Number
from normlab.utils.records import StoredResult

Better = Literal["first", "second", "neither", "unknown"]
"""Which of two designs has the better verdict."""


@dataclass(frozen=True)
class VerdictChange:
    """One verdict on both designs; None if a check does not have it."""

    name: str
    first: Verdict | None
    second: Verdict | None

    @property
    def better(self) -> Better:
        found = [verdict for verdict in (self.first, self.second) if verdict is not None and not is_open(verdict)]
        if len(found) < 2:
            return "unknown"
        first, second = (LEVELS.index(verdict.level) for verdict in found)
        return "neither" if first == second else "first" if first < second else "second"

    @property
    def is_alike(self) -> bool:
        """Whether both checks found the same."""
        return len({verdict.finding for verdict in (self.first, self.second) if verdict is not None}) == 1

    @property
    def is_fine(self) -> bool:
        """Whether both checks found the same, and nothing wrong."""
        return self.is_alike and all(v is None or v.level == "ok" for v in (self.first, self.second))


@dataclass(frozen=True)
class Against(StoredResult):
    """Two finished checks: a design, and the one that it is compared with."""

    what = "pair of checks"
    made_by = "normlab check --against"

    first: Check
    second: Check
    schema: Literal[1] = SCHEMA

    @property
    def checks(self) -> tuple[Check, Check]:
        return self.first, self.second

    @property
    def level(self) -> Level:
        """Level of the first check."""
        return self.first.level

    @property
    def headline(self) -> str:
        """Both in one sentence."""
        first, second = map(sentence, self.checks)
        fate, other = (said.removeprefix(c.target.name) for said, c in zip((first, second), self.checks, strict=True))
        if fate != other or not fate.startswith((" is ", " will ")):
            return f"{first}; {second}"
        return "Both" + fate.replace(" is ", " are ", 1).replace(" its ", " their ")

    @property
    def differences(self) -> list[VerdictChange]:
        """Verdict by verdict, those that differ first."""
        names = dict.fromkeys(verdict.name for check in self.checks for verdict in check.verdicts)
        found = [[next((v for v in check.verdicts if v.name == name), None) for check in self.checks] for name in names]
        differences = [VerdictChange(name, *verdicts) for name, verdicts in zip(names, found, strict=True)]
        return sorted(differences, key=lambda difference: difference.is_alike)

    @property
    def figures(self) -> dict[str, tuple[Number, Number]]:
        """Key numbers of the judged stack at its last snapshot."""
        first, second = (figures(check) for check in self.checks)
        return {name: (first[name], second[name]) for name in first}

    def failed(self, fail_on: str | Iterable[str] = "any") -> list[Verdict]:
        """The verdicts on the first design that fired."""
        return self.first.failed(fail_on)

    def table(self) -> str:
        """Both checks as plain text, as the terminal shows them."""
        from normlab.checks.view.card import text

        return text(self)

    def to_html(self) -> str:
        """Both checks as a self-contained HTML page."""
        from normlab.checks.view.page import page_of_two

        return page_of_two(self)


def figures(check: Check) -> dict[str, Number]:
    """Size, gradient, likeness of the tokens and loss of the judged stack at its last snapshot, means over seeds."""
    profiles = check.ladder.at(check.depth, check.ladder.snapshots[-1])
    ladder = growth_laws.p_depth(check.ladder, check.ladder.snapshots[-1])
    return {
        "RMS of the last state": mean([profile.rms[-1] for profile in profiles]),
        "Growth, RMS ∝ L^p": None if ladder is None else ladder.exponent,
        "Gradient's gain G": growth_laws.gradient_gain(profiles),
        "Top token cosine": mean([profile.cos[-1] for profile in profiles]),
        "Loss (nats)": mean([profile.loss for profile in profiles]),
    }
