"""Records of a coordinate check: values by module, size and seed, fitted exponents and findings, stored as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from normlab.checks.result import Subject
from normlab.numerics.power_law import Fit
from normlab.probes.profile import Number
from normlab.utils.records import StoredResult

AxisName = Literal["width", "depth"]

Rule = Literal["none", "derived", "hypothesis"]
"""Claim of the transfer rules about an axis: none; changes do not depend on it; the same as a hypothesis."""

Finding = Literal["flat", "grows", "shrinks", "as its size", "unclear", "constant", "not finite"]
"""How a value depends on the width or the depth.

flat         the interval of its exponent lies within the threshold
grows        it lies above
shrinks      it lies below
as its size  a change that shrinks, but no faster than the output itself at step 0: unit vectors, the initial logits
unclear      the interval contains the threshold: more seeds, or a wider range of sizes, would tell
constant     nothing to fit: the value is zero, as a change is where nothing is trained
not finite   a value was not finite at some size, or the training broke
"""

BREAKS_RULE: tuple[Finding, ...] = ("grows", "shrinks", "not finite")
"""Findings on a change that contradict a rule that it does not depend on the size."""

LOGITS = "logits"
"""The name of the model's output among the modules."""

THRESHOLD = 0.25
"""A wrong rule for a rate or an initial scale leaves an exponent of 1/2 or a multiple; this is half of the least."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Values of one module at one size, with one seed."""

    size: int
    """Width or number of blocks."""
    seed: int
    sizes: tuple[Number, ...]
    """RMS at steps 0 to T; None if it was not finite or training had failed."""
    changes: tuple[Number, ...]
    """RMS of the difference to step 0, at steps 1 to T."""


@dataclass(frozen=True, kw_only=True)
class Trend:
    """How the output of one module depends on the size."""

    module: str
    """Path in the model; a star stands for all blocks, over which the root mean square is taken."""
    points: tuple[Point, ...]
    start: Fit | None
    """Exponent of the RMS at step 0: mean over seeds with Student's t interval."""
    first: Fit | None
    """Exponent of the change in the first step."""
    last: Fit | None
    """Exponent of the change in all steps together."""
    size: Finding
    """Finding on the RMS at step 0."""
    change: Finding
    """Finding on the change at the first or last step, whichever grows more: later on norms bound it."""
    relative: Fit | None
    """Exponent of that change over the RMS at step 0."""

    @property
    def steepest(self) -> Fit | None:
        """The exponent that decides the finding on the change."""
        return steepest(self.first, self.last)

    @property
    def breaks_rule(self) -> bool:
        """Whether it contradicts a derived rule, by which initial values do not grow and changes are flat."""
        return self.change in BREAKS_RULE or self.size in ("grows", "not finite")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Results over one axis (width or depth), with the other fixed."""

    name: AxisName
    sizes: tuple[int, ...]
    fixed: int | None
    """The depth of a check over width, the width of one over depth; None if unknown."""
    rule: Rule
    trends: tuple[Trend, ...]
    """Modules in the order of the forward pass."""

    @property
    def broken_rules(self) -> list[Trend]:
        """The modules that contradict a derived rule."""
        return [trend for trend in self.trends if self.rule == "derived" and trend.breaks_rule]


@dataclass(frozen=True, kw_only=True)
class CoordinateCheck(StoredResult):
    """Result of `normlab.check_coordinates`: sizes and changes of every module over width and depth, with exponents."""

    what = "coordinate check"
    made_by = "normlab check --coordinates"

    target: Subject
    config: dict[str, Any] = field(default_factory=dict)
    """Options of the check."""
    base_dim: int | None
    """Width at which the learning rate was tuned; None without the width rules."""
    base_depth: int | None
    """Depth at which the learning rate was tuned; None without the depth rule."""
    steps: int
    """Optimiser steps, all on one batch."""
    lr: float
    seeds: int
    threshold: float = THRESHOLD
    """Largest absolute exponent that counts as flat."""
    axes: tuple[Axis, ...]
    notes: tuple[str, ...] = ()
    """Remarks, such as sizes that were skipped to stay within the time limit."""
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    """The command line; empty if called from Python."""
    schema: Literal[1] = 1

    @property
    def failed(self) -> bool:
        """Whether a module contradicts a derived rule."""
        return any(axis.broken_rules for axis in self.axes)

    def axis(self, name: AxisName) -> Axis | None:
        """The axis of this name; None if it was not measured."""
        return next((axis for axis in self.axes if axis.name == name), None)

    def table(self) -> str:
        """The result as plain text, as the terminal shows it."""
        from normlab.checks.coordinates.card import text

        return text(self)

    def to_html(self) -> str:
        """The result as a self-contained HTML page."""
        from normlab.checks.coordinates.page import page

        return page(self)


def steepest(*fits: Fit | None) -> Fit | None:
    """The fit with the largest exponent; None if there are none."""
    return max((fit for fit in fits if fit is not None), key=lambda fit: fit.exponent, default=None)
