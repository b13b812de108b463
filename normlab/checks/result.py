"""`Check`, the result of a check: measurements, verdicts and remedies in plain numbers, stored as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from normlab.checks.judge.fail_on import fired
from normlab.checks.judge.procedure import ProcedureStep
from normlab.checks.judge.thresholds import Thresholds
from normlab.checks.judge.verdict import Level, Verdict, level
from normlab.checks.ladder_records import Ladder, Look, RateLadder, StepRung, Twin, WidthRung
from normlab.checks.theory.records import Theory
from normlab.errors import unknown
from normlab.probes.profile import Number, Profile, When
from normlab.probes.start import Start
from normlab.utils.records import StoredResult

__all__ = ["SCHEMA", "Check", "Look", "RateLadder", "StepRung", "Subject", "Twin", "WidthRung"]

SCHEMA = 1
"""Version of the JSON; it grows when a field changes its meaning."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What was checked."""

    name: str
    """As the user named it."""
    kind: str
    """scheme, hugging face, factory, module or run."""
    depth: int
    """Blocks of the design itself; the gradient is judged at this depth."""
    width: int | None = None
    """Hidden width that was built."""
    parameters: int | None = None
    """Of the model at its own depth, as it was built."""
    scheme: str | None = None
    """The scheme with its options, where it is known."""
    notes: tuple[str, ...] = ()
    """What was changed before the check: "width 4096 -> 256 (--shrink 16)"."""
    unigram: Number = None
    """Unigram entropy of the data, nats: a loss above it has learnt nothing of the context."""


@dataclass(frozen=True, kw_only=True)
class Check(StoredResult):
    """Result of `normlab.check`: profiles over depths, fitted laws, verdicts; as a table, JSON or page."""

    what = "check"
    made_by = "normlab check"

    target: Subject
    config: dict[str, Any] = field(default_factory=dict)
    """The options it ran with."""
    ladder: Ladder
    """Profiles over depths, before and after the burst."""
    widths: tuple[WidthRung, ...] | None = None
    """The width ladder, where asked for."""
    rates: RateLadder | None = None
    """The learning-rate ladder, where asked for."""
    steps: tuple[StepRung, ...] | None = None
    """The residual-step ladder, where asked for."""
    theory: Theory | None = None
    """Predictions and bounds beside the measurement."""
    procedure: tuple[ProcedureStep, ...] = ()
    """The questions to a new architecture, answered."""
    verdicts: tuple[Verdict, ...]
    """One for each way in which a stack can fail."""
    remedies: tuple[str, ...] = ()
    """What to change, cheapest first."""
    thresholds: Thresholds = field(default_factory=Thresholds)
    """What the verdicts were held against."""
    notes: tuple[str, ...] = ()
    """What a reader must know: rungs that were left out to stay within the time."""
    starts: tuple[Start, ...] = ()
    """First loss and probability of the token read, before any training, at the size that will be trained."""
    curves: dict[str, tuple[Number, ...]] = field(default_factory=dict)
    """Loss of every step of the burst, by depth; first seed."""
    seconds: float = 0.0
    """How long it took."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of what computed it."""
    command: tuple[str, ...] = ()
    """The command line, where there was one."""
    schema: Literal[1] = SCHEMA

    @property
    def level(self) -> Level:
        """The worst level of all verdicts."""
        return level(self.verdicts)

    @property
    def depth(self) -> int:
        """Blocks of the stack that is judged: the deepest one measured, up to the target's own depth."""
        depths = self.ladder.depths
        return max((depth for depth in depths if depth <= self.target.depth), default=depths[0])

    @property
    def trouble(self) -> list[Verdict]:
        """The verdicts that are not fine, failures first."""
        order = {"fail": 0, "warn": 1}
        found = [verdict for verdict in self.verdicts if verdict.level in order]
        return sorted(found, key=lambda verdict: order[verdict.level])

    def verdict(self, name: str) -> Verdict:
        """The verdict called so: "forward", "collapse", ..."""
        for verdict in self.verdicts:
            if verdict.name == name:
                return verdict
        raise unknown("verdict", name, {verdict.name for verdict in self.verdicts})

    def failed(self, fail_on: str | Iterable[str] = "any") -> list[Verdict]:
        """The verdicts that `--fail-on` asks about and that fired; see `normlab.checks.judge.fail_on`."""
        return fired(self.verdicts, fail_on)

    def profile(self, when: When | None = None) -> Profile:
        """The stack that is judged, first seed, by default after the burst where there was one.

        A stack that broke at once has no profile after the burst; the deepest one that has replaces it.
        """
        when = when or self.ladder.snapshots[-1]
        depths = [depth for depth in self.ladder.depths if self.ladder.at(depth, when)]
        return self.ladder.at(max((depth for depth in depths if depth <= self.depth), default=depths[0]), when)[0]

    def table(self) -> str:
        """The card as plain text: what a terminal shows, without colour."""
        from normlab.checks.view.card import text

        return text(self)

    def to_html(self) -> str:
        """One page that needs no other file."""
        from normlab.checks.view.page import page

        return page(self)
