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
"""Version of the JSON format; increased when the meaning of a field changes."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What was checked."""

    name: str
    """Name given by the user."""
    kind: str
    """scheme, hugging face, factory, module or run."""
    depth: int
    """Number of blocks of the design; the gradient is judged at this depth."""
    width: int | None = None
    """Hidden width of the models."""
    parameters: int | None = None
    """Parameters of the model at this depth and width."""
    scheme: str | None = None
    """The scheme with its options; None if it is not known."""
    notes: tuple[str, ...] = ()
    """What was changed before the check: "width 4096 -> 256 (--shrink 16)"."""
    unigram: Number = None
    """Unigram entropy of the data in nats: a model with a higher loss does not use the context."""


@dataclass(frozen=True, kw_only=True)
class Check(StoredResult):
    """Result of `normlab.check`: profiles over depths, fitted laws, verdicts; as a table, JSON or page."""

    what = "check"
    made_by = "normlab check"

    target: Subject
    config: dict[str, Any] = field(default_factory=dict)
    """Options of the check."""
    ladder: Ladder
    """Profiles over depths, before and after the training steps."""
    widths: tuple[WidthRung, ...] | None = None
    """The width ladder, if requested."""
    rates: RateLadder | None = None
    """The learning-rate ladder, if requested."""
    steps: tuple[StepRung, ...] | None = None
    """The residual-step ladder, if requested."""
    theory: Theory | None = None
    """Theoretical predictions and bounds beside the measurements."""
    procedure: tuple[ProcedureStep, ...] = ()
    """The sanity check for a new architecture (arXiv 2510.09904), step by step."""
    verdicts: tuple[Verdict, ...]
    """One verdict for each kind of failure."""
    remedies: tuple[str, ...] = ()
    """Suggested changes, cheapest first."""
    thresholds: Thresholds = field(default_factory=Thresholds)
    """Thresholds of the verdicts."""
    notes: tuple[str, ...] = ()
    """Remarks, such as rungs that were skipped to stay within the time limit."""
    starts: tuple[Start, ...] = ()
    """Initial loss and probability of the token just read, at the size that will be trained."""
    curves: dict[str, tuple[Number, ...]] = field(default_factory=dict)
    """Loss of every training step, by depth; first seed."""
    seconds: float = 0.0
    """Duration of the check."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of NormLab, torch and Python."""
    command: tuple[str, ...] = ()
    """The command line; empty if called from Python."""
    schema: Literal[1] = SCHEMA

    @property
    def level(self) -> Level:
        """The worst level of all verdicts: ok, warn or fail."""
        return level(self.verdicts)

    @property
    def depth(self) -> int:
        """Number of blocks of the judged stack: the deepest one measured, up to the target's own depth."""
        depths = self.ladder.depths
        return max((depth for depth in depths if depth <= self.target.depth), default=depths[0])

    @property
    def trouble(self) -> list[Verdict]:
        """The verdicts that are not fine, failures first."""
        order = {"fail": 0, "warn": 1}
        found = [verdict for verdict in self.verdicts if verdict.level in order]
        return sorted(found, key=lambda verdict: order[verdict.level])

    def verdict(self, name: str) -> Verdict:
        """The verdict of this name: "forward", "collapse", ..."""
        for verdict in self.verdicts:
            if verdict.name == name:
                return verdict
        raise unknown("verdict", name, {verdict.name for verdict in self.verdicts})

    def failed(self, fail_on: str | Iterable[str] = "any") -> list[Verdict]:
        """The verdicts selected by `--fail-on` that failed; see `normlab.checks.judge.fail_on`."""
        return fired(self.verdicts, fail_on)

    def profile(self, when: When | None = None) -> Profile:
        """Profile of the judged stack, first seed; by default after training, if there was any.

        A stack that broke at once has no profile after the burst; the deepest one that has replaces it.
        """
        when = when or self.ladder.snapshots[-1]
        depths = [depth for depth in self.ladder.depths if self.ladder.at(depth, when)]
        return self.ladder.at(max((depth for depth in depths if depth <= self.depth), default=depths[0]), when)[0]

    def table(self) -> str:
        """The result as plain text, as the terminal shows it."""
        from normlab.checks.view.card import text

        return text(self)

    def to_html(self) -> str:
        """The result as a self-contained HTML page."""
        from normlab.checks.view.page import page

        return page(self)
