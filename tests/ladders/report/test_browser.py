"""The page of a ladder in a real browser. Nothing is fetched, nothing is logged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from normlab.ladders.report import LadderReport, build
from tests.browser import browsing
from tests.ladders.report import answers, synthetic
from tests.ladders.report.reports import full, path, table_only

pytestmark = browsing


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(full(), tmp_path_factory.mktemp("page") / "ladder.html").as_uri()


def traces(page: Any, plot: str) -> list[dict[str, Any]]:
    return page.evaluate(f"document.getElementById('{plot}').data.map(t => ({{...t}}))")


def plots(page: Any) -> list[str]:
    return page.eval_on_selector_all(".plot", "plots => plots.map(p => p.id)")


def test_every_plot_is_drawn(open_page: Any, ladder: str) -> None:
    page = open_page(ladder)
    names = plots(page)
    assert [f"plot-gap-{k}" for k in (1, 2, 3)] == names[:3]
    assert len(names) == 3 + 4 + 3 + 1 + 1 + 3 + 1
    for name in names:
        assert page.locator(f"#{name} svg.main-svg").first.is_visible()
        assert traces(page, name)


BROKEN = """() => {
  const broken = [], walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    if (node.parentElement.closest("svg")) continue;
    for (const found of node.data.matchAll(/\\d+e-\\d+|N\\^-α.*β/g)) {
      const range = document.createRange();
      range.setStart(node, found.index);
      range.setEnd(node, found.index + found[0].length);
      if (new Set([...range.getClientRects()].map(box => box.top)).size > 1) broken.push(found[0]);
    }
  }
  return broken;
}"""


def test_numbers_are_not_broken_at_their_hyphens(open_page: Any, ladder: str) -> None:
    for width in (320, 360, 380, 400):
        page = open_page(ladder, viewport={"width": width, "height": 900})
        assert page.evaluate(BROKEN) == [], width
    # On a phone each child of a cell is a column of its own.
    assert (
        page.eval_on_selector_all(".scroll td", "cells => Math.max(...cells.map(cell => cell.childNodes.length))") == 1
    )


@pytest.mark.full
def test_the_gap_has_every_seed_every_cell_a_band_and_a_dashed_law_inside_it(open_page: Any, ladder: str) -> None:
    drawn = traces(open_page(ladder), "plot-gap-1")
    parts = {part: [t for t in drawn if t["meta"]["part"] == part] for part in ("seeds", "cells", "band", "simple")}
    assert len(parts["seeds"][0]["x"]) == 3 * 3 * 3 + 3 * 2
    assert len(parts["cells"][0]["x"]) == 12
    assert len(parts["band"]) == 4
    assert all(trace["line"]["dash"] not in ("solid", None) for trace in parts["simple"])
    beyond = next(t for t in drawn if t["meta"]["part"] == "beyond")
    bars = next(t for t in parts["simple"] if None in t["y"])
    ends = zip(beyond["y"][::3], bars["y"][::3], bars["y"][1::3], beyond["y"][1::3], strict=True)
    assert all(low < simple_low < simple_high < high for low, simple_low, simple_high, high in ends)


@pytest.mark.full
def test_nothing_is_drawn_beyond_the_ladder_where_that_is_not_identified(open_page: Any, ladder: str) -> None:
    page = open_page(ladder)
    # Peri is identified at all three places, geonorm at none.
    assert [page.locator(f"#plot-gap-{k} .annotation", has_text="?").count() for k in (1, 2)] == [0, 3]
    reach = [max(x for t in traces(page, f"plot-gap-{k}") for x in t["x"] if x is not None) for k in (1, 2)]
    assert reach[1] == synthetic.TOP_FLOPS < reach[0]


@pytest.mark.full
def test_nothing_but_a_far_band_is_cropped(open_page: Any, ladder: str) -> None:
    page = open_page(ladder)
    for k in (1, 2, 3):
        layout = f"document.getElementById('plot-gap-{k}').layout"
        left, right = page.evaluate(f"{layout}.xaxis.range")
        bottom, top = page.evaluate(f"{layout}.yaxis.range")
        for trace in traces(page, f"plot-gap-{k}"):
            if trace["meta"]["part"] in ("seeds", "cells"):
                assert all(left < math.log10(x) < right for x in trace["x"])
                assert all(bottom < y < top for y in trace["y"])


@pytest.mark.full
def test_the_legend_hides_a_scheme_everywhere_and_offers_no_baseline_for_gaps(open_page: Any, ladder: str) -> None:
    page = open_page(ladder)
    assert page.locator("#gaps .legend button:visible").count() == 3
    assert page.locator("#rates .legend button:visible").count() == 4
    page.locator("#gaps .legend button", has_text="geonorm").click()
    assert page.locator("#plot-gap-2").is_hidden()
    assert {trace["meta"]["scheme"] for trace in traces(page, "plot-multiplier")} == {1, 3}
    page.locator("#gaps .legend button", has_text="geonorm").click()
    assert page.locator("#plot-gap-2").is_visible()


@pytest.mark.full
def test_the_multiplier_changes_from_flops_to_time(open_page: Any, ladder: str) -> None:
    page = open_page(ladder)
    assert len(traces(page, "plot-multiplier")[1]["x"]) == 12
    page.locator("input[name=multiplier-kind][value=time]").check()
    # Only the top size has measured speeds.
    assert len(traces(page, "plot-multiplier")[1]["x"]) == 3
    assert page.evaluate("document.getElementById('plot-multiplier').layout.yaxis.title.text") == "Multiplier in time"


@pytest.mark.full
def test_each_panel_may_have_its_own_scale(open_page: Any, ladder: str) -> None:
    page = open_page(ladder)
    ranges = "[1, 2, 3].map(k => document.getElementById(`plot-gap-${k}`).layout.yaxis.range.join())"
    assert len(set(page.evaluate(ranges))) == 1
    page.locator("input[name=gap-scale][value=own]").check()
    assert len(set(page.evaluate(ranges))) == 3


@pytest.mark.full
def test_a_result_outside_its_forecast_is_a_cross_and_a_rate_at_an_edge_has_a_ring(open_page: Any, ladder: str) -> None:
    page = open_page(ladder)
    marks = traces(page, "plot-forecast")[0]["marker"]["symbol"]
    assert marks == ["circle", "circle", "x"] + ["circle"] * 6
    rings = [[t for t in traces(page, f"plot-rates-{k}") if t["meta"].get("part") == "edge"] for k in range(3)]
    assert [sum(bool(t["x"]) for t in panel) for panel in rings] == [1, 1, 0]
    # Runs that were stuck or diverged are crosses at the upper edge and do not stretch the axis.
    peri = next(t for t in traces(page, "plot-rates-0") if t["meta"] == {"scheme": 1, "part": "tried"})
    assert peri["marker"]["symbol"][-2:] == ["x-thin", "x-thin"]
    assert max(peri["y"]) < 5


@pytest.mark.full
def test_hostile_text_is_shown_as_text(open_page: Any, ladder: str) -> None:
    page = open_page(ladder)
    assert "<script>alert(1)</script>" in page.locator("h1").text_content()
    assert page.locator(".plot script").count() == 0
    page.evaluate("Plotly.Fx.hover('plot-multiplier', [{curveNumber: 5, pointNumber: 3}])")
    assert synthetic.HOSTILE in page.locator("#plot-multiplier .hoverlayer").text_content()
    ticks = page.locator("#plot-forecast .ytick").all_text_contents()
    assert any(tick.startswith("spannorm <script>") for tick in ticks)


@pytest.mark.full
@pytest.mark.parametrize("width", [320, 400, 768])
def test_a_narrow_screen_needs_no_sideways_scrolling(open_page: Any, ladder: str, width: int) -> None:
    page = open_page(ladder, viewport={"width": width, "height": 740}, is_mobile=True, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Panels are stacked: every plot is about as wide as the screen.
    widths = page.eval_on_selector_all(".multiples .plot", "plots => plots.map(p => p.getBoundingClientRect().width)")
    assert width == 768 or min(widths) > 0.7 * width


@pytest.mark.full
@pytest.mark.parametrize("width", [1280, 400])
def test_no_label_is_cut(open_page: Any, ladder: str, width: int) -> None:
    page = open_page(ladder, viewport={"width": width, "height": 900})
    # Ticks and titles of axes lie inside their plot; names of targets do not touch each other.
    cut = page.evaluate("""() => [...document.querySelectorAll('.plot')].flatMap((plot) => {
        const frame = plot.getBoundingClientRect();
        const labels = plot.querySelectorAll('.xtick text, .ytick text, .xtitle, .ytitle, .annotation text');
        return [...labels].filter((label) => {
            const box = label.getBoundingClientRect();
            return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
        }).map((label) => `${plot.id}: ${label.textContent}`);
    })""")
    assert cut == []
    touching = page.evaluate("""() => [...document.querySelectorAll('[id^=plot-gap]')].flatMap((plot) => {
        const boxes = [...plot.querySelectorAll('.annotation')].map((label) => label.getBoundingClientRect());
        const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom - 2 && b.top < a.bottom - 2;
        return boxes.filter((a, i) => boxes.some((b, j) => i < j && meet(a, b))).map(() => plot.id);
    })""")
    assert touching == []


@pytest.mark.full
@pytest.mark.parametrize(("width", "is_told"), [(1280, False), (400, True)])
def test_shares_are_told_in_words_where_bars_are_narrow(open_page: Any, ladder: str, width: int, is_told: bool) -> None:
    page = open_page(ladder, viewport={"width": width, "height": 900})
    told = page.locator(".shares").first
    assert told.is_visible() == is_told
    assert page.locator(".segment i").first.is_visible() != is_told
    # The largest share is told first.
    largest = told.text_content().partition(",")[0]
    assert page.locator(f".bar .segment[title='{largest}']").count()


@pytest.mark.full
def test_dark_mode_reaches_the_plots(open_page: Any, ladder: str) -> None:
    page = open_page(ladder, color_scheme="dark")
    assert page.evaluate("document.getElementById('plot-gap-1').data.at(-1).marker.color") == "#ff8a4c"


@pytest.mark.full
@pytest.mark.parametrize("report", [table_only, path], ids=["table", "path"])
def test_small_ladders_draw_without_complaint(open_page: Any, tmp_path: Path, report: Any) -> None:
    page = open_page(build(report(), tmp_path / "ladder.html").as_uri())
    for name in plots(page):
        assert traces(page, name)
        assert page.locator(f"#{name} svg.main-svg").first.is_visible()


@pytest.mark.full
def test_one_cell_and_one_scheme_draw_without_complaint(open_page: Any, tmp_path: Path) -> None:
    rows = synthetic.rows(schemes=("pre", "peri"), sizes=("4x256",), budgets=(118_000_000,), lost=False)
    report = LadderReport(rows, answers.answer(rows, targets=False, fitted=False))
    page = open_page(build(report, tmp_path / "ladder.html").as_uri())
    assert plots(page) == ["plot-gap-1", "plot-baseline"]
