"""Copying from the context at every cell, as a table of the page and of the Markdown report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from normlab.ladders.report import LadderReport, markdown
from normlab.ladders.report.copying import copying_table
from normlab.ladders.report.page import render_page
from tests.ladders.report.reports import full
from tests.ladders.report.test_page import text_of


def _with_copying(size: str, scheme: str, gains: dict[int, float | None]) -> LadderReport:
    """Seeds of one scheme at the smallest budget of a size gain so much; no other run was measured."""
    report = full()
    measured = (size, report.budgets[0], scheme)
    rows = [
        replace(row, copying=gains.get(row.seed) if (row.size, row.tokens, row.scheme) == measured else None)
        for row in report.rows
    ]
    return replace(report, rows=rows)


def test_the_mean_stands_with_the_lowest_and_the_highest_seed() -> None:
    report = _with_copying("6x384", "peri", {1: 0.1, 2: 0.6, 3: 0.2})
    table = copying_table(report)
    assert [column.title for column in table.columns] == ["Size", "Scheme", "29.5M tokens"]
    (row,) = table.rows
    assert [cell.text for cell in row] == ["6x384", "peri", "0.30 (0.10 to 0.60)"]
    assert row[2].sort == pytest.approx(0.3)
    assert "Copying from the context" in text_of(render_page(report))
    assert "| 6x384 | peri | 0.30 (0.10 to 0.60) |" in markdown(report)


def test_one_measured_seed_has_no_range() -> None:
    (row,) = copying_table(_with_copying("4x256", "geonorm", {1: -0.004, 2: None})).rows
    assert row[2].text == "0.00"


def test_nothing_is_shown_where_nothing_was_measured() -> None:
    assert copying_table(full()).rows == []
    assert "Copying from the context" not in text_of(render_page(full()))
