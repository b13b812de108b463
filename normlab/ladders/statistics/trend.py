"""Does the gap shrink, grow or cross within the ladder? By the smooth estimator alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from normlab.ladders.statistics.answer import AxisName, Interval, Place, Trend, TrendTest, Verdict
from normlab.ladders.statistics.baseline import slopes_at
from normlab.ladders.statistics.cells import MeanLoss
from normlab.ladders.statistics.estimators.fit import Sample, estimate
from normlab.ladders.statistics.multiplier import average, change_functionals

MARGIN_MULTIPLIER = 1.05
"""A change of the gap that is shown to be worth less than 5 % of compute at the top is called constant."""
MARGIN = 0.01
"""The same in nats, where the baseline's slope is unknown."""

NO_TREND = Trend(verdict="not shown", compute=None, tokens=None, sizes=None)
"""Of a scheme without a fit."""

_GAPS_CHANGE_AND_SUM = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 1.0], [1.0, 1.0]])
"""Functionals over (bottom, top)."""


def find_trend(sample: Sample, places: Sequence[Place], baseline: Sequence[MeanLoss], level: float) -> Trend:
    """Trends over compute, over tokens at a fixed size and over sizes at a fixed budget."""
    ordered = sorted(places, key=lambda place: (place.flops, place.tokens))
    compute = _along("compute", [ordered], sample, baseline, level)
    tokens = sizes = None
    if sample.kind == "grid":
        by_size, by_budget = defaultdict(list), defaultdict(list)
        for place in ordered:
            by_size[place.size].append(place)
            by_budget[place.tokens].append(place)
        tokens = _along("tokens", list(by_size.values()), sample, baseline, level)
        sizes = _along("size", list(by_budget.values()), sample, baseline, level)
    return Trend(verdict=compute.verdict if compute else "not shown", compute=compute, tokens=tokens, sizes=sizes)


def _along(
    axis: AxisName, lines: list[list[Place]], sample: Sample, baseline: Sequence[MeanLoss], level: float
) -> TrendTest | None:
    """Along the line with most cells; of several, the one that reaches the most compute."""
    line = max(lines, key=lambda own: (len(own), own[-1].flops))
    return _test(axis, line, sample, baseline, level) if len(line) > 1 else None


def _test(axis: AxisName, line: list[Place], sample: Sample, baseline: Sequence[MeanLoss], level: float) -> TrendTest:
    bottom, top = line[0], line[-1]
    slopes = slopes_at(baseline, [bottom, top])
    drift, margin = None, MARGIN
    if slopes is not None:
        rows = change_functionals(slopes.nodes[0], slopes.nodes[1])
        in_flops = math.log(sample.flops_ratio(top) / sample.flops_ratio(bottom))
        drift = average(estimate(sample, [bottom, top], rows)).moved(in_flops).interval(level)
        margin = float(np.median(slopes.nodes[1])) * math.log(MARGIN_MULTIPLIER)
    found = [own.interval(level) for own in estimate(sample, [bottom, top], _GAPS_CHANGE_AND_SUM)]
    verdict = verdict_of(*found, margin=margin)
    if verdict == "constant" and _leaves(sample, line, margin, level):
        verdict = "not shown"
    is_open = verdict == "not shown" and found[2].spans_zero
    turn = _turn(sample, line, level) if is_open else None
    return TrendTest(
        axis=axis, bottom=bottom, top=top, verdict=verdict, gap_bottom=found[0], gap_top=found[1], change=found[2],
        log_multiplier_change=drift, margin=margin, margin_multiplier=None if slopes is None else MARGIN_MULTIPLIER,
        turn=turn, gap_turn=estimate(sample, [turn])[0].interval(level) if turn is not None else None,
    )  # fmt: skip


def _leaves(sample: Sample, line: list[Place], margin: float, level: float) -> bool:
    """Whether the gap between bottom and top is shown to differ from that at the top: a bump is not constant."""
    differences = np.concatenate([np.eye(len(line) - 1), np.full((len(line) - 1, 1), -1.0)], axis=1)
    found = [own.interval(level) for own in estimate(sample, line, differences)]
    return any(not own.spans_zero and abs(own.mean) > margin for own in found)


def _turn(sample: Sample, line: list[Place], level: float) -> Place | None:
    """The cell that lies furthest beyond both ends on one side, if any is shown to: a bump ends where it began."""
    if len(line) < 3:
        return None
    cells, inner = np.eye(len(line)), line[1:-1]
    # Any of them would do: corrected over them (Bonferroni).
    each = 1.0 - (1.0 - level) / len(inner)
    ends = [[own.interval(each) for own in estimate(sample, line, cells[1:-1] - cells[end])] for end in (0, -1)]
    beyond = [
        (min(abs(first.mean), abs(last.mean)), place)
        for place, first, last in zip(inner, *ends, strict=True)
        if not first.spans_zero and not last.spans_zero and first.mean * last.mean > 0.0
    ]
    return max(beyond, key=lambda own: own[0])[1] if beyond else None


def verdict_of(bottom: Interval, top: Interval, change: Interval, both: Interval, *, margin: float) -> Verdict:
    """crosses: two signs, both shown. shrinks, grows: shown of the gap's size, whatever its sign; `both` is the sum.

    top² - bottom² is the change times the sum, so that the gap is smaller at the top if they have opposite signs. A
    change that is shown does not say it where the gap may have changed its sign: from -0.02 to +0.02 the size stays.
    """
    if not bottom.spans_zero and not top.spans_zero and bottom.mean * top.mean < 0.0:
        return "crosses"
    if not change.spans_zero:
        if both.spans_zero:
            return "not shown"
        return "shrinks" if change.mean * both.mean < 0.0 else "grows"
    return "constant" if max(abs(change.low), abs(change.high)) < margin else "not shown"
