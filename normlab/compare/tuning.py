"""Select a scheme's learning rate from its tune runs.

A run trains, fails (an error, a loss that is not finite) or is stuck (its loss was not 0.1 below the unigram entropy
300 steps after warm-up, or at its end; it stays marked if it recovers). Rates are compared by the number of failed and
stuck runs first, then by the mean result. Interrupted runs (their process was killed) are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from normlab.compare.bracket import Score
from normlab.train.metrics import Metric
from normlab.utils.text import counted

Row = Mapping[str, Any]
Edge = Literal["largest", "smallest"]
EDGES: tuple[Edge, ...] = ("largest", "smallest")


@dataclass(frozen=True)
class RateResults:
    """Results of one scheme at one rate, by seed."""

    values: dict[int, float | None] = field(default_factory=dict)
    """Result of each seed; None for a run that failed or was stuck."""
    stuck: dict[int, float | None] = field(default_factory=dict)
    """Final value of each stuck run, or its last value if it was stopped early; None if it has none."""

    @property
    def trained(self) -> list[float]:
        return [value for value in self.values.values() if value is not None]

    @property
    def lost(self) -> int:
        """Runs that failed or were stuck."""
        return len(self.values) - len(self.trained)

    def score(self, metric: Metric) -> Score:
        """Score for `Bracket`; lower is better."""
        return Score(self.lost, _mean(self.trained, metric))


def group_by_rate(rows: Iterable[Row], role: str) -> dict[float, RateResults]:
    """Results of the runs with this role, by rate and seed."""
    grouped: dict[float, RateResults] = {}
    for row in rows:
        if row["role"] == role and row["state"] != "interrupted":
            value = row["value"] if row["state"] == "done" else None
            usable = value if value is not None and math.isfinite(value) else None
            at_rate = grouped.setdefault(row["lr"], RateResults())
            at_rate.values[row["seed"]] = None if row.get("stuck") else usable
            if row.get("stuck"):
                at_rate.stuck[row["seed"]] = usable
    return grouped


def pick_rate(tune: Mapping[float, RateResults], metric: Metric) -> float | None:
    """The rate with the best mean among those with the fewest lost runs and the most seeds; ties: the lower one.

    If every run at every rate was stuck, the rate with the best final values; None if there is no result at all.
    """
    most = max(len(at_rate.values) for at_rate in tune.values())
    whole = {lr: own for lr, own in tune.items() if len(own.values) == most and (own.trained or own.stuck)}

    def key(lr: float) -> tuple[int, int, float, float]:
        own = whole[lr]
        failed, ends = own.lost - len(own.stuck), [end for end in own.stuck.values() if end is not None]
        return own.lost, failed, _mean(own.trained or ends, metric), lr

    return min(whole, key=key, default=None)


def grid_edge(lr: float | None, tune: Mapping[float, RateResults]) -> Edge | None:
    """Whether a rate, or one with equal results, is the largest or smallest tried: a better one may lie beyond it."""
    if lr is None or len(tune) < 2:
        return None
    # What it is itself comes before what it equals: two ends may be equal.
    alike = [lr, *(other for other, own in tune.items() if _are_equal(own, tune[lr]))]
    return next((edge for rate in alike for edge in EDGES if rate == edge_rate(edge, tune)), None)


def edge_rate(edge: Edge, tried: Iterable[float]) -> float:
    """The largest or smallest rate tried."""
    return max(tried) if edge == "largest" else min(tried)


def edge_text(lr: float, edge: Edge, tried: Iterable[float]) -> str:
    """Where a rate at an edge lies: "the largest tried", or "as good as the largest tried"."""
    return f"the {edge} tried" if lr == edge_rate(edge, tried) else f"as good as the {edge} tried"


def lost_above_text(lr: float | None, tune: Mapping[float, RateResults]) -> str:
    """How many runs did not train at the next rate above one, which is then the limit of training. Empty if all did."""
    larger = min((rate for rate in tune if lr is not None and rate > lr), default=None)
    if larger is None or not tune[larger].lost:
        return ""
    own = tune[larger]
    return (
        f"at {larger:.3g}, the next rate above the best, {own.lost} of {counted(len(own.values), 'run')} did not train"
    )


def _are_equal(a: RateResults, b: RateResults) -> bool:
    """Whether two rates trained equally well; accuracies are counts, and often equal."""
    if not a.trained or (a.lost, len(a.trained)) != (b.lost, len(b.trained)):
        return False
    return math.fsum(a.trained) == math.fsum(b.trained)


def _mean(values: list[float], metric: Metric) -> float:
    # Exact, so that equal results of several seeds have equal means in whatever order.
    return metric.sign * math.fsum(values) / len(values) if values else math.inf
