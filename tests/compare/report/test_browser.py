"""The page in a real browser: Debian's Chromium, driven by playwright. Nothing is fetched, nothing is logged."""

from __future__ import annotations

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from normlab.compare.report import build
from normlab.compare.report.run_metrics import PROFILES
from normlab.compare.store import Store
from tests.browser import browsing
from tests.compare.report import synthetic

pytestmark = browsing


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(synthetic.comparison(tmp_path_factory.mktemp("page") / "c", running=True)).as_uri()


def traces(page: Any, plot: str = "plot-curves") -> list[dict[str, Any]]:
    return page.evaluate(f"document.getElementById('{plot}').data.map(t => ({{...t}}))")


def schemes_drawn(page: Any) -> set[int]:
    return {trace["meta"]["scheme"] for trace in traces(page) if trace["meta"]["part"] == "mean"}


def first_column(page: Any) -> list[str]:
    return page.eval_on_selector_all("#ranking tbody th", "cells => cells.map(c => c.textContent.trim())")


def axis(page: Any, which: str) -> dict[str, Any]:
    layout = f"document.getElementById('plot-curves').layout.{which}axis"
    return page.evaluate(f"({{type: {layout}.type, title: {layout}.title.text}})")


def choose(page: Any, name: str, value: str) -> None:
    page.locator(f"input[name={name}][value={value}]").check()


def until(page: Any, condition: str) -> None:
    """Wait for what plotly does after a pause; the page's own policy forbids playwright's way of waiting."""
    for _ in range(100):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never came true: {condition}")


def test_every_plot_is_drawn(open_page: Any, comparison: str) -> None:
    page = open_page(comparison)
    names = ["ranking", "curves", "rates", *PROFILES]
    for name in names:
        assert page.locator(f"#plot-{name} svg.main-svg").first.is_visible()
        assert traces(page, f"plot-{name}")
    # A log axis cannot show a negative cosine.
    assert page.evaluate("document.getElementById('plot-token_cosine').layout.yaxis.type") == "linear"
    assert min(traces(page, "plot-token_cosine")[0]["y"]) < 0
    assert page.locator("h2").count() == 9
    # Plotly's own choice of buttons would offer to send the figure away.
    page.locator("#plot-curves").hover()
    assert page.locator("#plot-curves .modebar-btn").count() == 4
    # Bands hold all seeds; the failed run has a line of its own.
    parts = [(trace["meta"]["scheme"], trace["meta"]["part"]) for trace in traces(page)]
    assert sorted(parts) == [(0, "band"), (0, "mean"), (1, "band"), (1, "failed"), (1, "mean"),
                             (2, "band"), (2, "mean"), (3, "band"), (3, "mean")]  # fmt: skip
    mean = next(trace for trace in traces(page) if trace["meta"] == {"scheme": 0, "part": "mean"})
    assert all(
        low <= y <= high and seeds == 3 for y, (low, high, seeds) in zip(mean["y"], mean["customdata"], strict=True)
    )


@pytest.mark.full
def test_the_legend_hides_and_shows_a_scheme_in_every_plot(open_page: Any, comparison: str) -> None:
    page = open_page(comparison)
    button = page.locator("#curves .legend button", has_text="peri")
    assert schemes_drawn(page) == {0, 1, 2, 3}
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert schemes_drawn(page) == {0, 1, 3}
    assert len(traces(page, "plot-hidden_rms")) == 3
    assert page.locator("#profiles .legend button", has_text="peri").get_attribute("aria-pressed") == "false"
    button.focus()
    page.keyboard.press("Space")
    assert schemes_drawn(page) == {0, 1, 2, 3}


@pytest.mark.full
def test_the_table_sorts_by_click_and_by_keyboard(open_page: Any, comparison: str) -> None:
    page = open_page(comparison)
    before = first_column(page)
    heading = page.locator("#ranking thead th", has_text="Scheme")
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert first_column(page) == sorted(before, key=str.lower)
    heading.locator("button").focus()
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    assert first_column(page) == sorted(before, key=str.lower, reverse=True)
    # The baseline has no difference: it stays last in both directions.
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    for _ in range(2):
        page.keyboard.press("Enter")
        assert first_column(page)[-1] == "pre"
    assert heading.get_attribute("aria-sort") == "none"
    # Numbers sort as numbers: seed 101 after seed 3.
    page.locator("#runs thead th", has_text="Seed").first.locator("button").click()
    seeds = page.locator("#runs table").first.evaluate(
        "table => [...table.tBodies[0].rows].map(r => +r.cells[4].textContent)"
    )
    known = [seed for seed in seeds if seed]
    assert known == sorted(known)
    assert len(set(known)) > 3


@pytest.mark.full
def test_the_curves_follow_their_switches(open_page: Any, comparison: str) -> None:
    page = open_page(comparison)
    assert axis(page, "x") == {"type": "linear", "title": "Tokens"}
    page.locator("input[name=curve-x][value=tokens]").focus()
    page.keyboard.press("ArrowRight")
    assert axis(page, "x")["title"] == "Steps"
    page.keyboard.press("ArrowRight")
    assert axis(page, "x")["title"] == "Seconds of training"
    for name in ("curve-x-scale", "curve-y-scale"):
        choose(page, name, "log")
    assert (axis(page, "x")["type"], axis(page, "y")["type"]) == ("log", "log")
    choose(page, "curve-kind", "train")
    assert axis(page, "y")["title"] == "Training loss (nats)"
    page.locator("#curve-rate").select_option("0.0006")
    assert {trace["meta"]["part"] for trace in traces(page)} == {"band", "mean"}


@pytest.mark.full
def test_a_run_that_learnt_nothing_does_not_flatten_the_others(open_page: Any, comparison: str, tmp_path: Path) -> None:
    assert open_page(comparison).locator("#rates-outside").is_hidden()
    folder = synthetic.comparison(tmp_path / "c", profiles=False)
    rows = Store(folder).rows()
    stuck = [row | {"value": 6.96} if row["scheme"] == "post" and row["role"] == "tune" else row for row in rows]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in stuck))
    page = open_page(build(folder).as_uri())
    top = "document.getElementById('plot-rates').layout.yaxis.range[1]"
    assert page.locator("#rates-outside").is_visible()
    assert page.evaluate(top) < 4.5
    assert_nothing_cropped(page)
    post = next(trace for trace in traces(page, "plot-rates") if trace.get("name", "").startswith("post"))
    assert post["marker"]["symbol"].count("arrow-bar-up") == 6
    assert any("6.9600" in text for text in post["text"])
    choose(page, "rates-view", "all")
    until(page, f"{top} > 6.96")
    assert_nothing_cropped(page)


def assert_nothing_cropped(page: Any) -> None:
    """Every mark of the plot over rates lies inside its axes."""
    axes = page.evaluate(
        "(({xaxis, yaxis}) => [xaxis.range, yaxis.range])(document.getElementById('plot-rates').layout)"
    )
    (left, right), (bottom, top) = axes
    marks = [trace for trace in traces(page, "plot-rates") if trace["mode"] == "markers"]
    assert len(marks) == 4
    assert all(left < math.log10(x) < right for trace in marks for x in trace["x"])
    assert all(bottom <= y <= top for trace in marks for y in trace["y"])


@pytest.mark.full
def test_stuck_runs_are_part_of_no_mean(open_page: Any, tmp_path: Path) -> None:
    folder = synthetic.comparison(tmp_path / "c", hostile=False, fails=False)
    rows = Store(folder).rows()
    stuck = [
        row | {"value": 6.96, "stuck": True} if row["scheme"] == "peri" and row["seed"] in (1, 101) else row
        for row in rows
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in stuck))
    page = open_page(build(folder).as_uri())
    parts = [trace["meta"]["part"] for trace in traces(page) if trace["meta"]["scheme"] == 2]
    assert sorted(parts) == ["band", "failed", "mean"]
    mean = next(trace for trace in traces(page) if trace["meta"] == {"scheme": 2, "part": "mean"})
    assert {seeds for _, _, seeds in mean["customdata"]} == {2}
    line = traces(page, "plot-rates")[4]
    assert line["mode"] == "lines"
    assert max(line["y"]) < 4.5
    assert "2 of 3, 1 stuck" in page.locator("#ranking tbody").inner_text()


@pytest.mark.full
@pytest.mark.parametrize("width", [1280, 400])
def test_no_column_is_clipped(open_page: Any, comparison: str, tmp_path: Path, width: int) -> None:
    page = open_page(comparison, viewport={"width": width, "height": 900})
    page.locator("#configuration summary").click()
    # Scrolled sideways or not: every cell lies inside the frame of its table, and no text runs out of its cell.
    wrong = page.evaluate("""() => [...document.querySelectorAll('.scroll')].flatMap((frame) => {
        const { left, right } = frame.getBoundingClientRect();
        return [...frame.querySelectorAll('tbody th, tbody td')].filter((cell) => {
            const box = cell.getBoundingClientRect(), over = cell.scrollWidth > cell.clientWidth + 1;
            return box.width && (box.left < left - 1 || box.right > right + 1 || over);
        }).map((cell) => `${cell.dataset.label}: ${cell.textContent}`);
    })""")
    assert wrong == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    code = page.locator(".commands")
    assert code.evaluate("element => element.scrollWidth <= element.clientWidth")


@pytest.mark.full
def test_smoothing_smooths(open_page: Any, comparison: str) -> None:
    page = open_page(comparison)
    choose(page, "curve-kind", "train")

    def roughness() -> float:
        y = next(trace["y"] for trace in traces(page) if trace["meta"] == {"scheme": 0, "part": "mean"})[60:]
        return sum(abs(b - a) for a, b in pairwise(y))

    slider = page.locator("#curve-smoothing")
    slider.fill("0")
    rough = roughness()
    slider.fill("0.9")
    assert page.locator("output[for=curve-smoothing]").text_content() == "0.90"
    assert roughness() < rough / 3


@pytest.mark.full
def test_differences_are_paired_by_seed(open_page: Any, comparison: str) -> None:
    page = open_page(comparison)
    choose(page, "curve-y", "difference")
    means = {trace["meta"]["scheme"]: trace["y"] for trace in traces(page) if trace["meta"]["part"] == "mean"}
    assert set(means[0]) == {0}
    # The synthetic curves differ by their final loss at every step; five digits travel in the page.
    finals = [
        synthetic._final_loss("peri", 1.2e-3, s) - synthetic._final_loss("pre", 1.2e-3, s) for s in synthetic.JUDGE
    ]
    assert means[2][-1] == pytest.approx(sum(finals) / 3, abs=1e-4)


@pytest.mark.full
def test_the_profile_follows_its_step(open_page: Any, comparison: str) -> None:
    page = open_page(comparison)
    last = traces(page, "plot-hidden_rms")[0]["y"]
    slider = page.locator("#profile-step")
    slider.focus()
    page.keyboard.press("Home")
    assert page.locator("output[for=profile-step]").text_content() == "10"
    first = traces(page, "plot-hidden_rms")[0]["y"]
    assert first[0] == last[0] == 1
    assert first[-1] < last[-1]
    # A scheme's failed run ended early; its others speak for it.
    assert len(traces(page, "plot-hidden_rms")) == 4


@pytest.mark.full
def test_dark_mode_reaches_page_and_plots(open_page: Any, comparison: str) -> None:
    page = open_page(comparison, color_scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    line = "document.getElementById('plot-curves').data.at(-1).line.color"
    light = page.evaluate(paper), page.evaluate(line)
    top = "document.getElementById('plot-curves').layout.yaxis.range[1]"
    start = page.evaluate(top)
    page.locator("#plot-curves .nsewdrag").first.dblclick()
    until(page, f"{top} > {start} + 1")
    whole = page.evaluate(top)
    page.emulate_media(color_scheme="dark")
    until(page, f"{line} !== '{light[1]}'")
    # The steep start came back with a double click, and stays through the change.
    assert page.evaluate(top) == whole
    red, green, blue = (int(part) for part in page.evaluate(paper)[4:-1].split(","))
    assert max(red, green, blue) < 64
    assert page.evaluate(paper) != light[0]


@pytest.mark.full
@pytest.mark.parametrize("width", [320, 360, 768])
def test_a_narrow_screen_needs_no_sideways_scrolling(open_page: Any, comparison: str, width: int) -> None:
    page = open_page(comparison, viewport={"width": width, "height": 740}, is_mobile=True, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("#curves summary").tap()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Links to sections: on more than one line where that leaves room for the page, else on one that scrolls.
    links = page.locator(".contents ul")
    assert links.evaluate("element => element.scrollWidth <= element.clientWidth") == (width >= 640)


def test_hostile_text_is_shown_as_text(open_page: Any, comparison: str) -> None:
    page = open_page(comparison)
    shown = synthetic.HOSTILE.replace("\u2028", " ")
    assert "<script>alert(1)</script>" in page.locator("h1").text_content()
    assert any(label.startswith("post <script>alert(1)</script> |") for label in first_column(page))
    ticks = page.locator("#plot-ranking .ytick").all_text_contents()
    assert any(tick.startswith("post <script>alert(1)</scrip") for tick in ticks)
    assert page.locator("#plot-ranking script").count() == 0
    # Hover labels go through plotly's own small HTML and its templates.
    page.evaluate("Plotly.Fx.hover('plot-curves', [{curveNumber: 4, pointNumber: 3}])")
    hovered = page.locator("#plot-curves .hoverlayer").text_content()
    assert " ".join(shown.split()) in " ".join(hovered.split())


@pytest.mark.full
def test_the_keyboard_reaches_the_results_first(open_page: Any, comparison: str) -> None:
    page = open_page(comparison)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the results"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    # Everything one can reach has a name.
    unnamed = "e => !(e.ariaLabel || e.textContent.trim() || e.labels?.length)"
    reachable = "button, input, select, [role=img], [role=region]"
    assert page.evaluate(f"[...document.querySelectorAll('{reachable}')].filter({unnamed}).length") == 0


@pytest.mark.full
def test_paper_is_light(open_page: Any, comparison: str) -> None:
    page = open_page(comparison, color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--series-0')") == "#0072b2"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") is None


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [{"judge": ()}, {"judge": (1,)}, {"schemes": ["pre"]}, {"profiles": False}, {"lrs": [1e-3]}, {"tune": ()}],
)
def test_small_comparisons_draw_without_complaint(open_page: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    page = open_page(build(synthetic.comparison(tmp_path / "c", steps=24, **options)).as_uri())
    assert traces(page)


@pytest.mark.full
@pytest.mark.parametrize("state", ["done", "failed", "running"])
def test_runs_draw_without_complaint(open_page: Any, tmp_path: Path, state: str) -> None:
    page = open_page(build(synthetic.run(tmp_path / "r", state=state)).as_uri())
    assert traces(page)
    assert page.locator(".legend button").count() == 0


@pytest.mark.full
def test_folders_without_metrics_open_without_complaint(open_page: Any, tmp_path: Path) -> None:
    folder = synthetic.comparison(tmp_path / "c", steps=24)
    shutil.rmtree(folder / "runs")
    page = open_page(build(folder).as_uri())
    assert traces(page, "plot-rates")
    (tmp_path / "config.json").write_text("{}")
    open_page(build(tmp_path).as_uri())
