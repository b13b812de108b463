"""One sentence or two for each scheme: what the ladder shows, and what it leaves open."""

from __future__ import annotations

from collections.abc import Sequence

from normlab.ladders.statistics.answer import CellGap, Identified, Interval, Projection, Trend, TrendTest
from normlab.pages.numbers import format_count

_MOVES = {
    "shrinks": "the gap shrinks over the ladder",
    "grows": "the gap grows over the ladder",
    "crosses": "the gap changes sign over the ladder",
    "constant": "the gap is the same from the bottom to the top of the ladder",
    "not shown": "whether the gap moves over the ladder is not shown",
}


def sentence(
    scheme: str,
    baseline: str,
    top: CellGap | None,
    trend: Trend,
    projections: Sequence[Projection],
    targets: Sequence[Projection],
    identified: Identified,
    level: float = 0.95,
) -> str:
    """What a page prints for a scheme; `level` is the joint level of all schemes' intervals."""
    if top is None or top.gap is None:
        return f"{scheme}: no cell of the ladder can be compared with {baseline}."
    parts = [_at_top(scheme, baseline, top, f"{100 * level:g} %"), _moves(trend)]
    beyond = [own for own in projections if own not in targets]
    if beyond:
        parts.append(f"one rung beyond ({beyond[0].times_top:.3g} × the compute) {_range(beyond[0])}")
    parts += [_at_target(own, identified) for own in targets]
    if not targets and identified.reasons:
        parts.append(f"at larger sizes not identified: {identified.reasons[0].text}")
    return "; ".join(part for part in parts if part) + "."


def _at_target(own: Projection, identified: Identified) -> str:
    reasons = identified.against(own.place.name)
    return f"at {own.place.name} " + (f"not identified: {reasons[0].text}" if reasons else _range(own))


def _at_top(scheme: str, baseline: str, top: CellGap, level: str) -> str:
    assert top.gap is not None
    where = f"at {top.size} with {format_count(top.tokens)} tokens"
    k = top.multiplier
    ratio = f", compute multiplier {k.mean:.2f} ({k.low:.2f} to {k.high:.2f})" if k else ""
    if top.gap.spans_zero:
        return f"{scheme}: no difference to {baseline} shown {where}, {_signed(top.gap, level)}{ratio}"
    word = "better" if top.gap.mean < 0.0 else "worse"
    low, high = sorted((abs(top.gap.low), abs(top.gap.high)))
    by = f"{abs(top.gap.mean):.3f} nats ({level}: {low:.3f} to {high:.3f})"
    return f"{scheme}: {word} than {baseline} by {by} {where}{ratio}"


def _moves(trend: Trend) -> str:
    if trend.compute is None:
        return ""
    test = trend.compute
    # With the place: where larger sizes did not train, the ladder of this scheme ends before that of others.
    ends = f"{test.gap_bottom.mean:+.3f} at {test.bottom.name} to {test.gap_top.mean:+.3f}"
    return f"{_MOVES[test.verdict]} ({ends}){_in_compute(test)}"


def _in_compute(test: TrendTest) -> str:
    """A gap that shrinks with a constant multiplier is no loss of advantage: say which it is."""
    drift = test.log_multiplier_change
    if drift is None or test.verdict in ("constant", "not shown", "crosses"):
        return ""
    if drift.spans_zero:
        return ", but a change of the compute multiplier is not shown"
    return f", and the compute multiplier {'rises' if drift.mean > 0.0 else 'falls'}"


def _range(own: Projection) -> str:
    simple = f"({own.simple_law.low:+.3f} to {own.simple_law.high:+.3f} if it keeps a simple law)"
    smooth = ", if it stays smooth" if own.is_smoothness else ""
    text = f"between {own.gap.low:+.3f} and {own.gap.high:+.3f}{smooth}"
    if own.gap.spans_zero:
        return f"{text}: sign open {simple}"
    return f"{text}: {'better' if own.gap.mean < 0.0 else 'worse'} {simple}"


def _signed(interval: Interval, level: str) -> str:
    return f"{interval.mean:+.3f} ({level}: {interval.low:+.3f} to {interval.high:+.3f})"
