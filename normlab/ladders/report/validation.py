"""Gaps on further validation sets: one line for each scheme and set, at the top of the ladder and one step beyond."""

from __future__ import annotations

from normlab.ladders.report.content import LadderReport, best_interval
from normlab.ladders.report.glance import beyond_cell, trend_cell
from normlab.ladders.report.tables import gap_digits, interval_cell, scheme_cell, side_cell, times_cell
from normlab.ladders.statistics.answer import SchemeAnswer
from normlab.pages.numbers import NONE, format_count
from normlab.pages.tables import Cell, Column, Table

MAIN = "all"
"""Name of the validation text that gaps are measured on elsewhere on the page."""


def set_table(content: LadderReport) -> Table:
    """The main validation text first, then each further set."""
    columns = [
        Column("Scheme"), Column("Validation text"), Column("Largest run, tokens"), Column("Gap there"),
        Column("Says"), Column("Multiplier, FLOPs"), Column("With more compute"), Column("Gap one rung beyond"),
    ]  # fmt: skip
    every = {MAIN: content.answer, **content.sets} if content.sets else {}
    rows = [
        _row(content, name, own)
        for scheme in content.schemes[1:]
        for name, answer in every.items()
        for own in answer.schemes
        if own.scheme == scheme
    ]
    note = (
        f"{MAIN}: the text that the rest of this page is about. Each line is estimated from its own text alone; "
        "intervals hold together over the schemes of one text at one cell, not over several texts or cells."
    )
    return Table("Validation sets", columns, rows, note=note).filled()


def _row(content: LadderReport, name: str, own: SchemeAnswer) -> list[Cell]:
    top, places = own.top, gap_digits(content)
    interval = best_interval(top) if top else None
    ahead = min(own.projections, key=lambda projection: projection.times_top, default=None)
    return [
        scheme_cell(content, own.scheme),
        Cell(name, name, whole=len(name) <= 24),
        Cell(f"{top.size}, {format_count(top.tokens)}" if top else "not judged", whole=True),
        interval_cell(interval, places),
        side_cell(interval) if interval else Cell(NONE),
        times_cell(top.multiplier if top else None),
        trend_cell(own),
        beyond_cell(own, ahead, places),
    ]
