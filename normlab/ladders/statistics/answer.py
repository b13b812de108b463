"""The answer of a ladder: gaps, trends, projections and verdicts as frozen dataclasses that are stored as JSON.

A gap is the loss of a scheme less the loss of the baseline in nats a token: negative is better. A compute multiplier k
means that the scheme reaches with compute C what the baseline reaches with k·C: above one is better.

Two estimators stand side by side. The smooth estimator assumes only that the gap changes smoothly: its intervals are
the ones to call 95 %, and verdicts come from it alone. The simple-law estimator assumes that the gap keeps a simple
law: its intervals are conditional on that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from normlab.pages.numbers import format_count
from normlab.utils.records import StoredResult, to_plain

SCHEMA = 1
FEW_STEPS = 3000
"""A run of fewer steps says mostly who starts faster."""

Verdict = Literal["shrinks", "grows", "crosses", "constant", "not shown"]
"""How the gap moves within the ladder. `constant`: its change is smaller than `TrendTest.margin`, at the level. `not
shown`: none of these, though its change may be (`TrendTest.direction`)."""

AxisName = Literal["compute", "tokens", "size"]
Reason = Literal[
    "gap too large", "never varied", "wide interval", "forms disagree", "missed forecast", "small ladder",
    "other tokens per parameter", "rate at edge",
]  # fmt: skip
"""Why a gap is not identified, in the order in which reasons are shown."""
OldReason = Literal["a", "b", "c", "d", "e", "f"]
"""All but the first two in answers that were stored before reasons had names."""


class Record:
    """A dataclass as plain values for JSON."""

    def to_dict(self) -> dict[str, Any]:
        return to_plain(self)


@dataclass(frozen=True)
class Interval(Record):
    """An interval with its level; `mean` is the mean of the estimate's distribution, not always the middle."""

    low: float
    high: float
    mean: float
    level: float

    @property
    def width(self) -> float:
        return self.high - self.low

    @property
    def spans_zero(self) -> bool:
        return self.low <= 0.0 <= self.high


def place_name(size: str, tokens: int) -> str:
    """A size and a budget in words: 12x768, 118M tokens."""
    return f"{size}, {format_count(tokens)} tokens"


@dataclass(frozen=True, kw_only=True)
class Place(Record):
    """A place on a ladder or beyond it: a model size and a budget of tokens."""

    name: str
    """For example "12x768, 118M tokens", "3.5 × the top" or the name of the target."""
    size: str
    """Name of the model size; empty for a place that is a multiple of the top."""
    parameters: int
    tokens: int
    flops: float
    steps: int | None = None

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.parameters

    @property
    def cell(self) -> tuple[int, int]:
        """Parameters and tokens, as in `LadderRow.cell`."""
        return self.parameters, self.tokens


@dataclass(frozen=True, kw_only=True)
class CellGap(Record):
    """The gap of one scheme to the baseline at one cell of the ladder (a size and a budget)."""

    size: str
    parameters: int
    tokens: int
    flops: float
    tokens_per_parameter: float
    steps: int | None
    n: int
    """Number of seeds with which both trained."""
    differences: dict[str, float]
    """Loss of the scheme less loss of the baseline, by seed (as text, since JSON has no other names)."""
    student: Interval | None
    """Student's interval from this cell alone; None with fewer than two pairs."""
    gap: Interval | None
    """The smooth estimator's interval at this cell, from all cells together; None where no fit was possible."""
    multiplier: Interval | None
    """Compute multiplier in FLOPs, those of the scheme counted as its own."""
    multiplier_in_time: Interval | None
    """The same in time, by the measured ratio of speeds; None where speeds are unknown."""
    few_steps: bool
    """Fewer steps than the minimum: the gap is partly that of early training."""
    is_usable: bool
    """Whether the cell has a gap that counts; it is part of the fit, where there is one."""
    reason: str | None = None
    """Why the cell has no gap that counts: "unreliable: seed 1 of peri diverged"."""
    epochs: float | None = None
    """How often the data was seen; None where unknown."""
    seed_sd: float | None = None
    """Estimated standard deviation of a paired difference over seeds there, from all cells; None without a fit."""
    off_sd: float | None = None
    """Standard deviations of the cell's mean by which it is off the smooth estimate; above 3 it contradicts."""

    @property
    def cell(self) -> tuple[int, int]:
        return self.parameters, self.tokens


@dataclass(frozen=True, kw_only=True)
class TrendTest(Record):
    """How the gap moves along one axis of the ladder from `bottom` to `top`, by the smooth estimator."""

    axis: AxisName
    """compute: bottom cell to top cell; tokens: at the largest size; size: at the largest common budget."""
    bottom: Place
    top: Place
    verdict: Verdict
    gap_bottom: Interval
    gap_top: Interval
    change: Interval
    """Gap at the top less gap at the bottom."""
    log_multiplier_change: Interval | None
    """ln k at the top less ln k at the bottom: a gap that shrinks with a constant multiplier is no loss."""
    margin: float
    """Changes below this many nats are called constant."""
    margin_multiplier: float | None = None
    """What `margin` is worth at the top as a factor of compute; None where the baseline's slope is unknown."""
    turn: Place | None = None
    """Where neither a verdict nor a change is shown: the cell whose gap is shown to lie beyond those of both ends."""
    gap_turn: Interval | None = None
    """The gap there."""

    @property
    def direction(self) -> Literal["better", "worse"] | None:
        """Where a change of the gap is shown: to which side the scheme moves, on whichever of them it is."""
        if self.change.spans_zero:
            return None
        return "better" if self.change.mean < 0.0 else "worse"

    @property
    def multiplier_moves(self) -> Literal["rises", "falls", "not shown"] | None:
        """How the compute multiplier moves; None where it is unknown."""
        drift = self.log_multiplier_change
        if drift is None or drift.spans_zero:
            return None if drift is None else "not shown"
        return "rises" if drift.mean > 0.0 else "falls"


@dataclass(frozen=True, kw_only=True)
class Trend(Record):
    """The trend within the ladder: its verdict is the one over compute, from the bottom cell to the top cell."""

    verdict: Verdict
    compute: TrendTest | None
    tokens: TrendTest | None
    """At the largest size that has several budgets; None on a path."""
    sizes: TrendTest | None
    """At the largest budget that several sizes have; None on a path."""


@dataclass(frozen=True, kw_only=True)
class Projection(Record):
    """The gap at a place beyond the ladder."""

    place: Place
    times_top: float
    """FLOPs there as a multiple of the top cell's."""
    gap: Interval
    """The smooth estimator's interval of the mean gap: the one to call 95 %."""
    simple_law: Interval
    """Interval if the gap keeps a simple law: never in a verdict."""
    constant_multiplier: Interval | None
    """Interval if the compute multiplier is constant; None where the ladder rejects that."""
    multiplier: Interval | None
    """Compute multiplier in FLOPs, by the smooth estimator."""
    shrinks: float
    """Probability that the gap is smaller there, in absolute value, than at the top, by the smooth estimator."""
    shrinks_simple_law: float
    """The same if the gap keeps a simple law."""
    is_smoothness: bool
    """Beyond 100 × the top: `gap`, too, holds only if the gap stays as smooth as within the ladder."""


@dataclass(frozen=True, kw_only=True)
class Obstacle(Record):
    """One reason why the gap at a target is not identified."""

    rule: Reason | OldReason
    text: str
    target: str | None = None
    """Name of the target that it concerns; None: all of them."""

    def __post_init__(self) -> None:
        names = dict(zip(get_args(OldReason), get_args(Reason)[2:], strict=True))
        object.__setattr__(self, "rule", names.get(self.rule, self.rule))


@dataclass(frozen=True, kw_only=True)
class Identified(Record):
    """Whether the gap is identified at every target. If not, a page shows the reasons and no number in its headline."""

    is_identified: bool
    reasons: list[Obstacle] = field(default_factory=list)

    def against(self, target: str) -> list[Obstacle]:
        """Why the gap at one target is not identified; a far target says nothing against a near one."""
        return [own for own in self.reasons if own.target in (None, target)]


@dataclass(frozen=True, kw_only=True)
class MoreRuns(Record):
    """What more runs would gain: width of the smooth estimator's interval at a place, now and as expected with them."""

    what: str
    """For example "2 more seeds at every cell", "one more size above the top"."""
    place: Place
    width_now: float
    width_then: float


@dataclass(frozen=True, kw_only=True)
class HeldOut(Record):
    """A forecast that was written before its runs, beside what came."""

    scheme: str
    place: Place
    seeds: int
    forecast: Interval
    simple_law: Interval | None
    measured: float | None
    """Mean paired difference; None where the runs are missing or unreliable."""
    is_hit: bool | None
    is_simple_law_hit: bool | None


@dataclass(frozen=True, kw_only=True)
class SchemeAnswer(Record):
    """Everything about one scheme against the baseline."""

    scheme: str
    cells: list[CellGap]
    trend: Trend
    projections: list[Projection]
    identified: Identified
    form_weights: dict[str, float]
    """Weights of the simple law's families, "fades or grows" and "settles", whose sum is one; empty without a fit."""
    axis_weights: dict[str, float]
    """The same for the axis that drives the gap: "parameters alone", "mostly parameters", "compute",
    "mostly tokens", "tokens alone". On a path there is only "compute"."""
    sentence: str
    what_more: list[MoreRuns]
    held_out: list[HeldOut]
    seeds_for_sign: int | None = None
    """More seeds at every cell with which the sign at the top would show four times out of five; None: it shows
    already, or 100 more would not do."""

    @property
    def top(self) -> CellGap | None:
        """The usable cell with the largest size and budget."""
        usable = [cell for cell in self.cells if cell.is_usable]
        return max(usable, key=lambda cell: cell.flops) if usable else None


@dataclass(frozen=True, kw_only=True)
class BaselineCell(Record):
    """The baseline at one cell: its mean loss, the law's value, and the slope by which gaps become multipliers."""

    size: str
    parameters: int
    tokens: int
    flops: float
    n: int
    loss: float
    fitted: float
    slope: Interval
    """-dL/d ln C in nats an e-fold of compute."""


@dataclass(frozen=True, kw_only=True)
class BaselineLaw(Record):
    """The law of the baseline's loss. Only its values and slopes are well known; E is shown as a range."""

    kind: Literal["L(C)", "L(N, D)"]
    text: str
    irreducible: Interval | None
    """Range of E that the ladder allows between zero and the smallest loss; None: it allows hardly any."""
    residual_sd: float
    cells: list[BaselineCell]


@dataclass(frozen=True, kw_only=True)
class LadderAnswer(StoredResult):
    """The answer of a ladder, for pages and JSON."""

    what: ClassVar[str] = "ladder answer"
    made_by: ClassVar[str] = "normlab ladder"
    schema: int = SCHEMA

    baseline: str
    level: float
    """Joint level over all schemes at any one place; not over several places."""
    level_each: float
    """Level of each interval after Bonferroni's correction over the schemes."""
    kind: Literal["path", "grid", "too small"]
    """path: one budget a size; grid: several."""
    schemes: list[SchemeAnswer]
    baseline_law: BaselineLaw | None
    cautions: list[str]
    """What a reader must know, in sentences: unreliable cells, few steps, contradicting cells."""
    priors: dict[str, str]
    """Assumptions of the estimators, in words."""
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class CellForecast(Record):
    """Prediction intervals of the mean paired difference of `seeds` new seeds at a cell that is not trained yet."""

    scheme: str
    place: Place
    seeds: int
    gap: Interval
    """The smooth estimator's prediction interval: this one judges the forecast."""
    simple_law: Interval
    """Prediction interval if the gap keeps a simple law."""


@dataclass(frozen=True, kw_only=True)
class Design(Record):
    """A ladder before it is trained."""

    cells: list[Place]
    seeds: int
    top_seeds: int | None = None
    """Seeds of the largest size, where it has another number."""
    targets: list[Place] = field(default_factory=list)
    seed_sd: float = 0.007
    """Assumed standard deviation of a paired difference over seeds."""
    is_branched: bool = True
    """Whether the budgets of a size are cooldown branches of one trunk."""


@dataclass(frozen=True, kw_only=True)
class ExpectedWidth(Record):
    """Width of the smooth estimator's interval at a place if the gap followed a straight line: the best case."""

    place: Place
    width: float
