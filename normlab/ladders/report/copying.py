"""Copying from the context at every cell of a ladder: schemes that begin late are behind in short runs."""

from __future__ import annotations

from statistics import fmean

from normlab.compare.report.copy_gain import COPYING_NOTE, gain_words
from normlab.ladders.report.content import LadderReport
from normlab.ladders.report.tables import scheme_cell
from normlab.pages.numbers import NONE, format_count
from normlab.pages.tables import Cell, Column, Table, numeric_cell


def copying_table(content: LadderReport) -> Table:
    """The gain of copying at the end of the runs: a line for each size and scheme, a column for each budget."""
    budgets = content.budgets
    columns = [Column("Size"), Column("Scheme"), *(Column(f"{format_count(own)} tokens", True) for own in budgets)]
    rows = [
        [Cell(size, place), scheme_cell(content, scheme), *(_gain(content, size, own, scheme) for own in budgets)]
        for place, size in enumerate(content.sizes)
        for scheme in content.schemes
    ]
    measured = [row for row in rows if any(cell.text != NONE for cell in row[2:])]
    note = f"{COPYING_NOTE} Mean over seeds at the end of the runs, with the lowest and the highest."
    return Table("Copying from the context", columns, measured, note=note).filled()


def _gain(content: LadderReport, size: str, tokens: int, scheme: str) -> Cell:
    own = [row for row in content.rows if (row.size, row.tokens, row.scheme) == (size, tokens, scheme)]
    gains = [row.copying for row in own if row.is_usable and row.copying is not None]
    if not gains:
        return Cell(NONE)
    mean, low, high = (gain_words(value) for value in (fmean(gains), min(gains), max(gains)))
    return numeric_cell(mean if len(gains) == 1 else f"{mean} ({low} to {high})", fmean(gains))
