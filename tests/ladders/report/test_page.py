"""The page, Markdown and JSON of a ladder: their words and numbers, what is left out, and user text as text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from normlab.errors import NormLabError
from normlab.ladders import statistics
from normlab.ladders.report import LadderReport, build, markdown, terminal_lines, to_json
from normlab.ladders.report.design import LadderDesign, RateSearchFacts, TriedRate
from normlab.ladders.report.glance import glance_table, trend_cell
from normlab.ladders.report.header import header_facts
from normlab.ladders.report.page import render_page
from normlab.ladders.report.plots import plot_data, rate_panels
from normlab.ladders.report.tables import gap_table, more_runs_table, projection_table, rate_table
from normlab.ladders.report.training import training_grid
from normlab.ladders.statistics.answer import Identified, Interval, LadderAnswer, Obstacle
from normlab.ladders.statistics.ladder_answer import no_answer
from tests.ladders.report import answers, synthetic
from tests.ladders.report.reports import full, path, table_only

ALL = [
    "glance", "gaps", "tokens-or-size", "multiplier", "forecast", "beyond", "cells", "training", "rates", "baseline",
    "lost", "assumptions", "environment", "reproduce",
]  # fmt: skip


def sections(html: str) -> list[str]:
    return re.findall(r'<section id="([^"]+)"', html)


def text_of(html: str) -> str:
    """The words of a page without scripts, styles and tags."""
    body = re.sub(r"<(script|style).*?</\1>", " ", html, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


def test_a_whole_ladder_has_every_section() -> None:
    assert sections(render_page(full())) == ALL


def test_what_is_not_known_is_left_out() -> None:
    page = render_page(table_only())
    assert sections(page) == [
        "glance",
        "gaps",
        "tokens-or-size",
        "cells",
        "training",
        "baseline",
        "assumptions",
        "environment",
    ]
    words = text_of(page)
    assert "There is no band: the ladder is too small for a fit. One seed gives no interval." in words
    for absent in ("forecast", "simple law", "epochs", "embedding", "Hatched", "None", "nan"):
        assert absent not in words


def test_a_path_has_no_panels_of_tokens_or_size() -> None:
    page = render_page(path())
    assert "Gap over tokens" not in page
    assert "plot-sizes-" not in page.split("<script")[0]
    assert [len(line.cells) for line in training_grid(path())] == [1, 1, 1, 1]


def test_without_targets_nothing_is_said_beyond_the_ladder() -> None:
    rows = synthetic.rows(schemes=("pre", "peri"), lost=False)
    page = render_page(LadderReport(rows, answers.answer(rows, targets=False)))
    assert "beyond" not in sections(page)
    assert "beyond the cells of the fit" not in page


def test_numbers_of_a_cell_are_those_of_the_rows() -> None:
    report = full()
    losses = {(r.scheme, r.seed): r.loss or 0.0 for r in report.rows if (r.size, r.tokens) == ("8x512", 118_000_000)}
    gaps = [losses["peri", seed] - losses["pre", seed] for seed in (1, 2, 3)]
    row = next(row for row in gap_table(report).rows if [c.text for c in row[:3]] == ["peri", "8x512", "118M"])
    mean = sum(gaps) / 3
    assert [cell.text for cell in row[3:8]] == [
        "3.3e16", "3", f"{mean:+.3f}".replace("-", "−"),
        f"{mean - 0.012:+.3f} to {mean + 0.012:+.3f}".replace("-", "−"), "▼ better",
    ]  # fmt: skip
    drawn = plot_data(report)["gaps"][0]
    cell = next(c for c in drawn["cells"] if (c["size"], c["tokens"]) == ("8x512", 118_000_000))
    assert [seed["gap"] for seed in cell["seeds"]] == gaps


def test_rates_say_what_became_of_further_seeds() -> None:
    row = next(row for row in rate_table(full()).rows if row[0].text == "peri")
    assert "; 1 of 2 more seeds trained), 4e-3 stuck, 8e-3 diverged" in row[3].text


def test_a_cell_with_a_lost_seed_is_not_judged() -> None:
    rows = gap_table(full()).rows
    lost = next(row for row in rows if row[0].text == synthetic.HOSTILE and row[2].text == "29.5M")
    assert lost[7].text == "not judged"
    assert "seed 2" in lost[-1].text
    assert "fewer than 3,000 steps" in lost[-1].text


def test_what_is_not_identified_is_no_number_at_a_glance() -> None:
    table = glance_table(full())
    assert [column.title for column in table.columns][-2:] == ["Gap at 3.5 × the top", "Gap at 10 × the top"]
    last = {row[0].text: row[-1].text for row in table.rows}
    assert " to " in last["peri"]
    assert last["geonorm"] == "not identified"
    assert [row[5].text for row in table.rows] == ["gap shrinks", "gap changes sign", "no trend shown"]


def test_projections_keep_the_condition_of_the_simple_law_apart() -> None:
    table = projection_table(full())
    titles = [column.title for column in table.columns]
    assert titles[3:6] == ["Gap, 95 %", "Says", "If it keeps a simple law"]
    # Ordered by compute; the interval without a law spans zero, so the sign is open whatever the law says.
    assert [row[1].text for row in table.rows[:3]] == ["3.5 × the top", "16x1024, 400M tokens", "10 × the top"]
    assert {(row[0].text, row[4].text) for row in table.rows[:6]} == {
        ("peri", "≈ sign open"),
        ("geonorm", "not identified"),
    }


def test_the_grid_hatches_short_cells_and_frames_the_held_out_size() -> None:
    grid = training_grid(full())
    assert [line.label for line in grid] == list(synthetic.SIZES)
    assert grid[0].about == "11.6M parameters, 72\u00a0% embedding, 3 seeds"
    assert [cell.is_short for cell in grid[0].cells if cell] == [True, False, False]
    assert [cell.is_held_out for cell in grid[3].cells if cell] == [True, True, True]
    first = grid[3].cells[0]
    assert first is not None
    assert dict(first.facts) == {
        "tokens a parameter": "0.27", "steps": "1,800", "tokens a step": "16,384", "epochs": "0.25",
        "FLOPs": "2.1e16",
    }  # fmt: skip


def test_bands_go_through_the_budgets_of_a_size_and_on_beyond_the_top() -> None:
    ribbons = plot_data(full())["gaps"][0]["ribbons"]
    assert [len(ribbon) for ribbon in ribbons] == [3, 3, 3, 3 + 2]
    assert [len(ribbon) for ribbon in plot_data(path())["gaps"][0]["ribbons"]] == [4 + 2]
    assert plot_data(table_only())["gaps"][0]["ribbons"] == []


def refusing(*targets: str | None) -> LadderReport:
    """A path on which the gap of peri is not identified at these places; None: at all of them."""
    report = path()
    reasons = [Obstacle(rule="wide interval", text="It is wide.", target=target) for target in targets]
    peri, *others = report.answer.schemes
    peri = replace(peri, identified=Identified(is_identified=False, reasons=reasons))
    return LadderReport(report.rows, replace(report.answer, schemes=[peri, *others]))


def test_a_plot_has_no_number_where_the_words_refuse_one() -> None:
    drawn = plot_data(refusing(None))["gaps"][0]
    assert [point["flops"] for point in drawn["ribbons"][0]][-1] == drawn["top"]
    assert [place["refused"] for place in drawn["beyond"]] == [True] * 3
    assert not any(key in place for place in drawn["beyond"] for key in ("low", "high", "mean", "simple_low"))
    words = text_of(render_page(refusing(None)))
    assert "Not identified beyond the ladder: the band ends at its top." in words
    assert "not identified: the ladder cannot say, so nothing is drawn" in words


def test_a_band_ends_before_the_first_place_that_is_not_identified() -> None:
    # The places are 3.5 times the top, the target at 7.1 times, and 10 times the top.
    far = plot_data(refusing("10 × the top"))["gaps"][0]
    target = plot_data(refusing("16x1024, 400M tokens"))["gaps"][0]
    assert [len(own["ribbons"][0]) for own in (far, target)] == [4 + 1, 4 + 1]
    assert [[place["refused"] for place in own["beyond"]] for own in (far, target)] == [
        [False, False, True],
        [False, True, False],
    ]
    assert far["caption"] == "Not identified at 10 × the top: nothing is drawn there."


def test_cells_above_the_top_of_the_fit_are_beyond_it() -> None:
    report = path()
    peri = report.answer.schemes[0]
    left_out = replace(peri.cells[-1], is_usable=False, reason="unreliable: seed 1 of peri diverged")
    answered = replace(report.answer, schemes=[replace(peri, cells=[*peri.cells[:-1], left_out], projections=[])])
    drawn = plot_data(LadderReport(report.rows, answered))["gaps"][0]
    assert [point["flops"] for point in drawn["ribbons"][0]] == [cell.flops for cell in peri.cells[:-1]]


def test_the_page_says_when_the_forecast_was_made_and_whether_it_held() -> None:
    words = text_of(render_page(full()))
    assert "Forecast of 12x768 written on 2026-11-16 at 12:30, before its first run began; commit 0123456789ab" in words
    assert "8 of 9 forecasts made before the runs held" in words
    assert "miss: 0.040 lower than forecast" in words


def test_results_that_are_still_to_come_are_not_known_yet() -> None:
    report = full()
    assert report.design.forecast is not None
    cells = tuple(replace(cell, came=None, seeds=None) for cell in report.design.forecast.cells)
    design = replace(report.design, forecast=replace(report.design.forecast, cells=cells))
    words = text_of(render_page(LadderReport(report.rows, report.answer, design)))
    assert "not known yet" in words
    assert "forecasts made before the runs held" not in words


def test_reasons_for_not_identified_are_in_words() -> None:
    words = text_of(render_page(full()))
    assert "Laws that fit equally well disagree in sign there." in words
    assert "E, the loss that no compute removes, lies anywhere from 1.80 to 2.40 nats" in words


def test_user_text_stays_text() -> None:
    page = render_page(full())
    assert "<script>alert(1)" not in page
    assert "spannorm &lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "books + science <i>" not in page
    told = markdown(full())
    assert "<script>" not in told.split("`````")[0]
    assert "spannorm &lt;script&gt;alert(1)&lt;/script&gt; \\|" in told


def test_markdown_has_the_sections_that_have_content() -> None:
    headings = re.findall(r"^## (.*)$", markdown(full()), flags=re.MULTILINE)
    assert headings == [
        "Keep in mind", "At a glance", "Gap at every cell", "What drives the gap", "Forecast and result",
        "Beyond the ladder",
        "Why a gap is not identified", "What it would take", "Training", "Learning rates", "Loss of pre",
        "Runs that did not train", "Assumptions",
    ]  # fmt: skip
    small = re.findall(r"^## (.*)$", markdown(table_only()), flags=re.MULTILINE)
    assert small == ["At a glance", "Gap at every cell", "Training", "Assumptions"]


def test_json_holds_rows_answer_design_and_sentences() -> None:
    report = full()
    stored = json.loads(json.dumps(to_json(report), allow_nan=False))
    assert LadderAnswer.from_dict(stored["answer"]) == report.answer
    assert LadderDesign.from_dict(stored["design"]) == report.design
    assert len(stored["rows"]) == len(report.rows)
    assert stored["answer"]["priors"] == report.answer.priors
    assert stored["headline"].startswith("At the top of the ladder (12x768, 118M tokens) peri is better than pre")


def test_terminal_lines_end_with_the_headline() -> None:
    lines = terminal_lines(full())
    assert lines[-1].startswith("At the top of the ladder")
    assert lines[0].startswith("peri: gap −0.0")


def test_build_writes_a_file_and_refuses_a_folder(tmp_path: Path) -> None:
    target = tmp_path / "ladder.html"
    assert build(table_only(), target) == target
    assert target.read_text().startswith("<!doctype html>")
    with pytest.raises(NormLabError, match="is a folder"):
        build(table_only(), tmp_path)


@pytest.mark.parametrize(
    ("seeds", "words"), [(7, "7 more seeds at every cell"), (None, "over 100 more seeds at every cell")]
)
def test_an_open_sign_at_the_top_says_how_many_seeds_would_close_it(seeds: int | None, words: str) -> None:
    rows = synthetic.rows(schemes=("pre", "peri"), lost=False)
    found = answers.answer(rows)
    (own,) = found.schemes
    faded = [replace(cell, gap=Interval(-0.02, 0.01, -0.005, 0.95)) if cell == own.top else cell for cell in own.cells]
    is_open = replace(found, schemes=[replace(own, cells=faded, seeds_for_sign=seeds)])
    assert [row[1].text for row in more_runs_table(LadderReport(rows, found)).rows] == ["2 more seeds at every cell"]
    first = more_runs_table(LadderReport(rows, is_open)).rows[0]
    assert [cell.text for cell in first[1:4]] == [words, "12x768, 118M tokens", "0.030"]
    assert first[5].text == "−0.005, its mean"


def test_a_change_that_is_shown_is_a_trend_at_a_glance() -> None:
    report = full()
    own = report.answer.schemes[2]
    assert own.trend.compute is not None
    said = []
    for ends in ((0.01, 0.04), (-0.04, -0.01), (-0.01, 0.04)):
        change = Interval(*ends, sum(ends) / 2, 0.95)
        trend = replace(own.trend, compute=replace(own.trend.compute, change=change))
        said.append(trend_cell(replace(own, trend=trend)).text)
    assert said == ["gap moves against it", "gap moves in its favour", "no trend shown"]
    change, test = Interval(-0.01, 0.04, 0.015, 0.95), own.trend.compute
    back = replace(own.trend, compute=replace(test, change=change, turn=test.top, gap_turn=change))
    assert trend_cell(replace(own, trend=back)).text == "gap moves and comes back"


def test_gaps_too_large_for_a_fit_are_told_from_a_ladder_too_small() -> None:
    """Four sizes and three budgets are enough; half a nat is not what a fit is made for."""
    small = synthetic.rows(schemes=("pre", "peri"))
    rows = [replace(row, loss=row.loss - 0.5 * (row.scheme == "peri")) if row.loss else row for row in small]
    content = LadderReport(rows, statistics.answer(rows, baseline="pre"))
    words = text_of(render_page(content))
    assert "There is no band: gaps are too large for a fit. Bars are intervals from one cell alone." in words
    note = gap_table(content).note
    assert note is not None
    assert "intervals are those of each cell's own seeds, since nothing was fitted to the cells" in note
    assert "multiplier" not in note


def test_rates_of_schemes_without_a_judged_run_are_drawn() -> None:
    design = LadderDesign(
        rates=tuple(
            RateSearchFacts(scheme=name, size="4x256", tokens=1000, tried=(TriedRate(lr=1e-3, loss=3.0),))
            for name in ("pre", "peri", "geonorm")
        )
    )
    content = LadderReport([], no_answer("pre", 0.95), design)
    assert content.schemes == ["pre", "peri", "geonorm"]
    (panel,) = rate_panels(content)
    assert [search["scheme"] for search in panel["searches"]] == [0, 1, 2]
    assert "runs" not in dict(header_facts(content))
