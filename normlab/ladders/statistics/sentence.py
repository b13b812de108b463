"""Sentences for each scheme: one on what the ladder shows, one for each place beyond it."""

from __future__ import annotations

from collections.abc import Sequence

from normlab.ladders.statistics.answer import CellGap, Identified, Interval, Projection, Trend, TrendTest
from normlab.ladders.statistics.cells import Cell
from normlab.pages.numbers import format_count, join_names
from normlab.utils.text import capitalised

_MOVES = {
    "shrinks": "the gap shrinks over the ladder",
    "grows": "the gap grows over the ladder",
    "crosses": "the gap changes sign over the ladder",
    "not shown": "whether the gap moves over the ladder is not shown",
}
_TURNS = {"better": "the gap moves in its favour over the ladder", "worse": "the gap moves against it over the ladder"}
"""Of a change that is shown, where the size of the gap is not."""


def sentence(
    scheme: str,
    baseline: str,
    top: CellGap,
    trend: Trend,
    projections: Sequence[Projection],
    targets: Sequence[Projection],
    identified: Identified,
    level: float = 0.95,
    lost: str = "",
) -> str:
    """What a page prints for a scheme; `level` is the joint level of all schemes' intervals at one place.

    `lost`: what `lost_runs` says of it.
    """
    k = top.multiplier
    ratio = f", compute multiplier {k.mean:.2f} ({k.low:.2f} to {k.high:.2f})" if k else ""
    parts = [f"{scheme}: {_at_cell(baseline, top, top.gap, level)}{ratio}", lost, _moves(trend)]
    next_rung = [own for own in projections if own not in targets][:1]
    within = "; ".join(part for part in parts if part)
    return " ".join(f"{text}." for text in [within, *_beyond([*next_rung, *targets], next_rung, identified)])


def sentence_by_cell(
    scheme: str, baseline: str, cells: Sequence[CellGap], identified: Identified, level: float = 0.95, lost: str = ""
) -> str:
    """The same for a scheme without a fit: each cell by its own seeds, no trend and nothing beyond."""
    judged, told = [cell for cell in cells if cell.is_usable], f"; {lost}" if lost else ""
    if not judged:
        return f"{scheme}: no cell of the ladder can be compared with {baseline}{told}."
    top = max(judged, key=lambda cell: cell.flops)
    at_top = _at_cell(baseline, top, top.student, level)
    why = identified.reasons[0].text
    return f"{scheme}: {at_top}{told}; {_counts(judged)}; {why}."


def lost_runs(cells: Sequence[Cell], top: float) -> str:
    """How many runs of a scheme did not train: who is ahead where a few did has not shown that it scales.

    `top`: the FLOPs of its largest cell that counts, beyond which it may have lost some everywhere.
    """
    lost, beyond = sum(cell.lost for cell in cells), [cell for cell in cells if cell.flops > top]
    if not lost:
        return ""
    where = ", among them some at every cell with more compute" if beyond and all(own.lost for own in beyond) else ""
    return f"{lost} of its {sum(cell.runs for cell in cells)} runs did not train{where}"


def _counts(cells: Sequence[CellGap]) -> str:
    """At how many cells a side is shown, and how many differences are on it whether or not that is shown."""
    known = [cell.student for cell in cells if cell.student is not None]
    sides = {"better": sum(own.high < 0.0 for own in known), "worse": sum(own.low > 0.0 for own in known)}
    told = " and ".join(f"{word} at {count}" for word, count in sides.items() if count) or "no difference shown at any"
    seeds = [value for cell in cells for value in cell.differences.values()]
    below = sum(value < 0.0 for value in seeds)
    differences = f"{below} of {len(seeds)} differences are below zero"
    return f"{told} of {len(cells)} cells, each by its own seeds alone ({differences})"


def _at_cell(baseline: str, cell: CellGap, gap: Interval | None, level: float) -> str:
    where, percent = f"at {cell.size} with {format_count(cell.tokens)} tokens", f"{100 * level:g} %"
    if gap is None:
        mean = sum(cell.differences.values()) / len(cell.differences)
        return f"one seed is no evidence {where} ({mean:+.3f} nats to {baseline})"
    if gap.spans_zero:
        ends = f"{gap.mean:+.3f} ({percent}: {gap.low:+.3f} to {gap.high:+.3f})"
        return f"no difference to {baseline} shown {where}, {ends}"
    word = "better" if gap.mean < 0.0 else "worse"
    low, high = sorted((abs(gap.low), abs(gap.high)))
    return f"{word} than {baseline} by {abs(gap.mean):.3f} nats ({percent}: {low:.3f} to {high:.3f}) {where}"


def _moves(trend: Trend) -> str:
    if trend.compute is None:
        return ""
    test = trend.compute
    # With the place: where larger sizes did not train, the ladder of this scheme ends before that of others.
    start, end = f"{test.gap_bottom.mean:+.3f} at {test.bottom.name}", f"{test.gap_top.mean:+.3f}"
    if test.turn is not None and test.gap_turn is not None:
        between = f"{test.gap_turn.mean:+.3f} at {test.turn.name}"
        return f"the gap moves and comes back over the ladder ({start}, {between}, {end} at the top){in_compute(test)}"
    return f"{_in_nats(test)} ({start} to {end}){in_compute(test)}"


def _in_nats(test: TrendTest) -> str:
    if test.verdict == "not shown" and test.direction is not None:
        return _TURNS[test.direction]
    if test.verdict != "constant":
        return _MOVES[test.verdict]
    worth = f", {100 * (test.margin_multiplier - 1.0):.2g} % of compute," if test.margin_multiplier else ""
    return f"the gap changes by less than {test.margin:.3f} nats{worth} over the ladder"


def in_compute(test: TrendTest) -> str:
    """How the multiplier moves: a gap that shrinks with a constant multiplier is no loss of advantage."""
    moves = test.multiplier_moves
    if moves == "not shown":
        is_said = test.verdict not in ("constant", "crosses") and test.direction is not None
        return ", but a change of the compute multiplier is not shown" if is_said else ""
    if moves is None:
        return ""
    agree = test.verdict != "constant" and (test.change.mean < 0.0) == (moves == "rises")
    joined = "but" if test.verdict == "not shown" and test.direction is None else "and" if agree else "while"
    return f", {joined} the compute multiplier {moves}"


def _beyond(places: Sequence[Projection], next_rung: Sequence[Projection], identified: Identified) -> list[str]:
    """What is said of each place; one sentence for all that are not identified for the same reason."""
    alike: dict[str, list[str]] = {}
    for own in places:
        name = own.place.name
        where = f"one rung beyond ({name})" if own in next_rung else f"at {name}"
        reasons = identified.against(name)
        alike.setdefault(f"not identified: {reasons[0].text}" if reasons else _range(own), []).append(where)
    return [capitalised(f"{join_names(names)} the gap is {said}") for said, names in alike.items()]


def _range(own: Projection) -> str:
    simple = f"({own.simple_law.low:+.3f} to {own.simple_law.high:+.3f} if it keeps a simple law)"
    smooth = ", if it stays smooth" if own.is_smoothness else ""
    text = f"between {own.gap.low:+.3f} and {own.gap.high:+.3f}{smooth}"
    if own.gap.spans_zero:
        return f"{text}: sign open {simple}"
    return f"{text}: {'better' if own.gap.mean < 0.0 else 'worse'} {simple}"
