"""The page from real answers: somebody else's table of losses, a path, and a grid with a forecast."""

from __future__ import annotations

from pathlib import Path

import pytest

from normlab.ladders.report import LadderReport, markdown, terminal_lines, to_json
from normlab.ladders.report.page import render_page
from normlab.ladders.rows import read_table
from normlab.ladders.statistics import Place, answer, forecast
from tests.ladders.report import synthetic
from tests.ladders.report.reports import path, table_only
from tests.ladders.report.test_page import sections, text_of


def test_a_table_of_losses_gives_a_page_without_any_design(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    lines = [f"{r.scheme},{r.parameters},{r.tokens},{r.flops},{r.seed},{r.loss}" for r in path().rows]
    table.write_text("\n".join(["scheme,parameters,tokens,flops,seed,loss", *lines]))
    rows = read_table(table)
    report = LadderReport(rows, answer(rows, baseline="pre"))
    page = render_page(report)
    assert sections(page) == [
        "glance", "gaps", "tokens-or-size", "multiplier", "beyond", "cells", "training", "baseline", "assumptions",
        "environment",
    ]  # fmt: skip
    words = text_of(page)
    # Sizes without a name are called by their parameters.
    assert "At the top of the ladder (110M, 236M tokens) geonorm is worse than pre" in words
    assert "Twice the compute lowers the loss of pre by" in words
    for absent in ("None", "nan", "steps", "epochs", "Forecast and result"):
        assert absent not in words
    assert "| peri | 110M, 236M |" in markdown(report)


def test_one_seed_on_three_sizes_says_what_is_not_identified() -> None:
    rows = table_only().rows
    report = LadderReport(rows, answer(rows, baseline="pre"))
    words = text_of(render_page(report))
    assert "What this ladder cannot tell, and why:" in words
    assert "3 rungs, fewer than 4." in words
    assert "not identified" in terminal_lines(report)[0]
    assert to_json(report)["answer"]["priors"].keys() >= {"smooth", "simple_law"}


@pytest.mark.full
def test_a_grid_with_a_lost_seed_and_a_forecast() -> None:
    rows = synthetic.rows(schemes=("pre", "peri", "geonorm"))
    places = [
        Place(name=f"12x768, {n:,} tokens", size="12x768", parameters=110_100_000, tokens=n, flops=717e6 * n)
        for n in synthetic.BUDGETS
    ]
    below = [row for row in rows if row.size != synthetic.TOP]
    made = forecast(below, baseline="pre", cells=places, seeds=2)
    report = LadderReport(rows, answer(rows, baseline="pre", held_out=made), synthetic.design())
    # The answer's own forecast goes before the design's.
    assert len(report.held_out) == 2 * 3
    words = text_of(render_page(report))
    assert "of 6 forecasts made before the runs held" in words
    # The smallest cell has a lost seed, so the trend begins at the next one. There an end of geonorm's interval is
    # within 0.001 of zero: what is said of the trend is left to the tests of the statistics.
    assert "geonorm is worse than pre" in words
    assert "not judged" in words
