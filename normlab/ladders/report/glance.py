"""The answer at a glance: one line for each scheme, from the top of its ladder to the furthest target."""

from __future__ import annotations

from normlab.ladders.report.content import LadderReport, best_interval
from normlab.ladders.report.tables import NOT_IDENTIFIED, gap_digits, interval_cell, scheme_cell, side_cell, times_cell
from normlab.ladders.statistics.answer import Projection, SchemeAnswer
from normlab.pages.numbers import NONE, format_count
from normlab.pages.tables import Cell, Column, Table

_TRENDS = {
    "shrinks": "gap shrinks",
    "grows": "gap grows",
    "crosses": "gap changes sign",
    "constant": "gap stays within {margin:.3f}",
    "not shown": "no trend shown",
}
_TURNS = {"better": "gap moves in its favour", "worse": "gap moves against it"}


def glance_table(content: LadderReport) -> Table:
    """Gap and multiplier at the top, the trend, one step beyond, and the furthest place asked for."""
    columns = [
        Column("Scheme"), Column("Largest run, tokens"), Column("Gap there"), Column("Says"),
        Column("Multiplier, FLOPs"), Column("With more compute"),
        Column(f"Gap at {_name(content, 0)}"), Column(f"Gap at {_name(content, -1)}"),
    ]  # fmt: skip
    rows = [_row(content, own) for own in content.answer.schemes]
    return Table("At a glance", columns, rows, sortable=False).filled()


def _row(content: LadderReport, own: SchemeAnswer) -> list[Cell]:
    top, places = own.top, gap_digits(content)
    interval = best_interval(top) if top else None
    ahead = sorted(own.projections, key=lambda projection: projection.times_top)
    last = ahead[-1] if len(ahead) > 1 else None
    return [
        scheme_cell(content, own.scheme),
        Cell(f"{top.size}, {format_count(top.tokens)}" if top else "not judged", whole=True),
        interval_cell(interval, places),
        side_cell(interval) if interval else Cell("one seed: no interval" if top else NONE),
        times_cell(top.multiplier if top else None),
        trend_cell(own),
        beyond_cell(own, ahead[0] if ahead else None, places),
        beyond_cell(own, last, places),
    ]


def trend_cell(own: SchemeAnswer) -> Cell:
    """How the gap moves in nats; that it stays is said with its margin."""
    if not own.top:
        return Cell(NONE, whole=True)
    test, verdict = own.trend.compute, own.trend.verdict
    if verdict == "not shown" and test is not None and test.direction is not None:
        return Cell(_TURNS[test.direction], whole=True)
    if test is not None and test.turn is not None:
        return Cell("gap moves and comes back", whole=True)
    return Cell(_TRENDS[verdict].format(margin=test.margin if test else 0.0), whole=True)


def beyond_cell(own: SchemeAnswer, there: Projection | None, places: int) -> Cell:
    """The gap beyond the ladder; "not identified" where it is not (the tables below hold its interval)."""
    if there is None:
        return Cell(NONE)
    if own.identified.against(there.place.name):
        return NOT_IDENTIFIED
    return interval_cell(there.gap, places)


def _name(content: LadderReport, position: int) -> str:
    """Name of the first or last place beyond the ladder."""
    found = [own.projections for own in content.answer.schemes if own.projections]
    if not found:
        return NONE
    return sorted(found[0], key=lambda projection: projection.times_top)[position].place.name
