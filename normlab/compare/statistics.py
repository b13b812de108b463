"""Statistics of a comparison: paired differences over seeds with confidence intervals, ranking, and winner.

Runs of two schemes with the same seed see the same batches in the same order. Their difference is taken seed by seed,
which cancels most of the noise. Whether lower or higher is better depends on the metric of the rows.

Several schemes are compared at once, so each interval has a Bonferroni correction: with k schemes in the ranking its
level is 1 - (1 - level) / (k - 1), and all intervals against the baseline hold jointly with probability `level`. The
same correction covers the winner: a false winner would have to beat the truly best scheme, which is part of only k - 1
pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from normlab.compare.tuning import Edge, RateResults, Row, edge_text, grid_edge, group_by_rate, pick_rate
from normlab.errors import NormLabError, unknown
from normlab.numerics.student_t import shifted_outside, t_interval, t_outside
from normlab.train.metrics import LOSS, Metric, metric_named

Values = Mapping[Any, float | None]
"""Result of each seed, or of each repeat with a seed; None, NaN and infinities are runs that failed or were stuck."""

_ROUNDING = 4.0 * float(np.finfo(float).eps)
"""Scatter of equal differences, relative to the values, that their rounding makes."""

Verdict = Literal[
    "baseline", "better", "worse", "no difference shown", "one seed", "unreliable", "failed", "stuck", "not judged",
    "no pairs",
]  # fmt: skip


POWER = 0.8
"""Usual chance of showing what is there: four times out of five."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Mean of a - b over the seeds with which both trained, with its confidence interval.

    With one pair there is only a mean: no interval and no p-value. The same where all pairs differ by one number, as a
    few accuracies may, which are counts: their scatter of zero says nothing of how far another seed would be.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    level: float
    sd: float | None
    """Standard deviation of the paired differences."""

    p: float | None
    """Two-sided p-value of a mean difference of zero, for this comparison alone."""

    failed_a: int
    failed_b: int

    @property
    def spans_zero(self) -> bool:
        """Whether the interval contains zero; a missing interval counts as containing it."""
        return self.low is None or self.high is None or self.low <= 0.0 <= self.high


@dataclass(frozen=True, kw_only=True)
class SchemeResult:
    """Result of one scheme: the rate selected by its tune runs, and its judge runs at that rate."""

    scheme: str
    label: str
    verdict: Verdict
    lr: float | None = None
    edge: Edge | None = None
    """Whether the selected rate, or one as good, is the largest or smallest tried: a better one may lie beyond it."""

    values: dict[int, float | None] = field(default_factory=dict)
    """Result of each judge seed at the selected rate; None for a run that failed or was stuck."""

    stuck: dict[int, float | None] = field(default_factory=dict)
    """Final value of each stuck judge run, by seed (None: stopped early). Not part of any mean or difference."""

    tune: dict[float, RateResults] = field(default_factory=dict)
    """Results of the tune runs, by rate."""

    difference: Difference | None = None
    """Difference to the baseline; None for the baseline itself and if no seed trained in both."""

    interrupted: int = 0
    """Number of runs whose process was killed; they are not counted for or against the scheme."""
    metric: Metric = LOSS
    """Metric of the values."""

    @property
    def edge_words(self) -> str:
        """Where the selected rate lies, if at an edge: "the largest tried", or "as good as the largest tried"."""
        return "" if self.lr is None or self.edge is None else edge_text(self.lr, self.edge, self.tune)

    @property
    def finished(self) -> list[float]:
        """Results of the judge runs that trained."""
        return [value for value in self.values.values() if value is not None]

    @property
    def failed(self) -> int:
        """Judge runs without a result."""
        return self.lost - len(self.stuck)

    @property
    def lost(self) -> int:
        """Judge runs that failed or were stuck; a scheme with any is never called better."""
        return len(self.values) - len(self.finished)

    @property
    def tuned(self) -> dict[int, float | None]:
        """Result of each tune seed at the selected rate."""
        return self.tune[self.lr].values if self.lr in self.tune else {}

    @property
    def detectable(self) -> float | None:
        """The true difference to the baseline that is detected with a power of 80 %."""
        found = self.difference
        return None if found is None or not found.sd else minimum_detectable(found.n, found.sd, found.level)

    @property
    def mean(self) -> float | None:
        return float(np.mean(self.finished)) if self.finished else None


def paired_difference(a: Values, b: Values, level: float = 0.95) -> Difference:
    """Student's t interval for the mean of a - b over the seeds that are in both."""
    _check_level(level)
    first, second = _finished(a), _finished(b)
    failed_a, failed_b = len(a) - len(first), len(b) - len(second)
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        raise NormLabError(
            f"no seed finished in both: {len(a)} runs ({failed_a} failed) against {len(b)} ({failed_b} failed); "
            "a paired difference needs the same seed on both sides"
        )
    differences = np.array([first[seed] - second[seed] for seed in seeds])
    mean, n = float(differences.mean()), len(seeds)
    low = high = sd = p = None
    if n > 1:
        largest = max(abs(value) for seed in seeds for value in (first[seed], second[seed]))
        spread = float(differences.std(ddof=1))
        # What rounding leaves of equal differences is no scatter either.
        sd = spread if spread > _ROUNDING * largest else 0.0
    if sd:
        error = sd / math.sqrt(n)
        half = t_interval(level, n - 1) * error
        low, high, p = mean - half, mean + half, t_outside(abs(mean) / error, n - 1)
    elif n > 1 and mean == 0.0:
        p = 1.0
    return Difference(
        mean=mean, low=low, high=high, n=n, level=level, sd=sd, p=p, failed_a=failed_a, failed_b=failed_b
    )  # fmt: skip


def minimum_detectable(n: int, sd: float, level: float = 0.95, power: float = POWER) -> float:
    """The true mean difference that `n` pairs with standard deviation `sd` detect with probability `power`.

    Exact for normal differences (noncentral t); infinite with fewer than two pairs.
    """
    _check_level(level)
    if not 1.0 - level < power < 1.0:
        raise NormLabError(f"power must lie between {1.0 - level:.3g} (chance alone) and 1, got {power}; try 0.8")
    if not (math.isfinite(sd) and sd >= 0.0):
        raise NormLabError(f"a standard deviation is finite and not negative, got {sd}")
    if n < 2:
        return math.inf
    critical = t_interval(level, n - 1)
    low, high = 0.0, 1.0
    while shifted_outside(critical, high, n - 1) < power:
        low, high = high, 2.0 * high
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if shifted_outside(critical, middle, n - 1) < power else (low, middle)
    return high * sd / math.sqrt(n)


def tune_outliers(own: SchemeResult, level: float = 0.999) -> list[float]:
    """Results of tune runs at the selected rate outside the prediction interval of the judge runs there.

    Another run of the same distribution lies in mean ± t s √(1 + 1/n) with probability `level`. One outside it means
    that the result depends strongly on the seed, or that the judge seeds were lucky.
    """
    _check_level(level)
    n = len(own.finished)
    spread = float(np.std(own.finished, ddof=1)) if n > 1 else 0.0
    # Without spread there is no interval: accuracies are counts and may coincide.
    if own.mean is None or not spread:
        return []
    half = t_interval(level, n - 1) * spread * math.sqrt(1.0 + 1.0 / n)
    return [value for value in _finished(own.tuned).values() if abs(value - own.mean) > half]


def rank_schemes(rows: Iterable[Row], baseline: str, level: float = 0.95) -> list[SchemeResult]:
    """Results of all schemes, best mean first, then those that cannot be ranked.

    The rate is selected on `tune` rows alone and evaluated on `judge` rows alone, which must have other seeds. Means
    and differences are over the runs that trained; a scheme with a judge run that failed or was stuck is never called
    better.
    """
    _check_level(level)
    by_scheme = _by_scheme(rows)
    if baseline not in by_scheme:
        raise unknown("baseline", baseline, by_scheme)
    each = bonferroni_level(level, len(by_scheme))
    judged = {scheme: _judge(scheme, own) for scheme, own in by_scheme.items()}
    base = judged[baseline]
    standings = [_against(own, base, each) for own in judged.values()]
    sign = base.metric.sign
    return sorted(standings, key=lambda own: (own.mean is None, own.lost > 0, sign * (own.mean or 0.0), own.scheme))


def bonferroni_level(level: float, schemes: int) -> float:
    """Level of each interval for which all intervals hold jointly with probability `level`."""
    return 1.0 - (1.0 - level) / max(1, schemes - 1)


def find_winner(standings: Sequence[SchemeResult], level: float = 0.95) -> SchemeResult | None:
    """The scheme that is significantly better than every other one, or None.

    A scheme with a judge run that failed or was stuck cannot win, and is not compared with the winner.
    """
    placed = [own for own in standings if own.finished and not own.lost]
    if len(placed) < 2:
        return None
    each = bonferroni_level(level, len(standings))
    return placed[0] if all(_beats(placed[0], other, each) for other in placed[1:]) else None


def _beats(own: SchemeResult, other: SchemeResult, level: float) -> bool:
    if not _finished(own.values).keys() & _finished(other.values).keys():
        return False
    difference = paired_difference(own.values, other.values, level)
    return not difference.spans_zero and own.metric.sign * difference.mean < 0.0


def _by_scheme(rows: Iterable[Row]) -> dict[str, list[Row]]:
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(row["scheme"], []).append(row)
    return grouped


def _judge(scheme: str, rows: Sequence[Row]) -> SchemeResult:
    """Result of a scheme before the comparison: its rate and its values at that rate."""
    tune, judge = group_by_rate(rows, "tune"), group_by_rate(rows, "judge")
    _check_seeds(scheme, tune, judge)
    metric = metric_named(str(rows[0].get("metric", LOSS.name)))
    lr = pick_rate(tune, metric) if tune else next(iter(judge)) if len(judge) == 1 else None
    at_rate = judge.get(lr, RateResults()) if lr is not None else RateResults()
    verdict: Verdict = "not judged"
    if (tune and lr is None) or (at_rate.values and not at_rate.trained):
        verdict = "stuck" if at_rate.stuck else "failed"
    return SchemeResult(
        scheme=scheme, label=str(rows[0].get("label") or scheme), verdict=verdict, lr=lr, edge=grid_edge(lr, tune),
        values=at_rate.values, stuck=at_rate.stuck, tune=tune, metric=metric,
        interrupted=sum(row["state"] == "interrupted" for row in rows),
    )  # fmt: skip


def _against(own: SchemeResult, base: SchemeResult, level: float) -> SchemeResult:
    """Add the difference to the baseline and the verdict."""
    if own is base:
        return replace(own, verdict="baseline") if own.finished else own
    if not own.finished:
        return own
    if not _finished(own.values).keys() & _finished(base.values).keys():
        return replace(own, verdict="unreliable" if own.lost else "no pairs")
    difference = paired_difference(own.values, base.values, level)
    return replace(own, verdict=_verdict(own, difference), difference=difference)


def _verdict(own: SchemeResult, difference: Difference) -> Verdict:
    if own.lost:
        return "unreliable"
    if difference.n == 1:
        return "one seed"
    if difference.spans_zero:
        return "no difference shown"
    return "better" if own.metric.sign * difference.mean < 0.0 else "worse"


def _finished(values: Values) -> dict[Any, float]:
    return {seed: value for seed, value in values.items() if value is not None and math.isfinite(value)}


def _check_seeds(scheme: str, tune: Mapping[float, RateResults], judge: Mapping[float, RateResults]) -> None:
    both = {s for own in tune.values() for s in own.values} & {s for own in judge.values() for s in own.values}
    if both:
        raise NormLabError(
            f"{scheme}: seed {min(both)} both picked the rate and judges it; judge with seeds that tuning has not seen"
        )


def _check_level(level: float) -> None:
    if not 0.0 < level < 1.0:
        raise NormLabError(f"a confidence level lies between 0 and 1, got {level}; try 0.95")
