"""The pages in a real browser: tokens move, plots are drawn, and there is nothing to complain of."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from normlab.dynamics.experiments.result import ExperimentResult
from normlab.dynamics.result import Band, Simulation
from tests.browser import browsing
from tests.dynamics.shown import HOSTILE, LOOKS, result, run, simulation


@pytest.fixture
def visit(open_page: Any, tmp_path: Path) -> Any:
    """Open the page of a result."""

    def visit(shown: Simulation | ExperimentResult, **options: Any) -> Any:
        return open_page(shown.save(tmp_path / "page.html").as_uri(), **options)

    return visit


FRAME = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
PICTURES = "[...document.querySelectorAll('canvas')].map(canvas => canvas.toDataURL())"


def pictures(page: Any) -> list[str]:
    page.evaluate(FRAME)
    return page.evaluate(PICTURES)


def until(page: Any, condition: str) -> None:
    """Wait for it; the page's policy forbids playwright's own way, which evaluates text inside the page."""
    for _ in range(300):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(condition)


def traces(page: Any, plot: str) -> list[dict[str, Any]]:
    return json.loads(page.evaluate(f"JSON.stringify(document.getElementById('plot-{plot}').data)"))


def parts(page: Any, plot: str) -> list[str]:
    return [trace["meta"]["part"] for trace in traces(page, plot)]


def clock(page: Any) -> float:
    page.evaluate(FRAME)
    return float(page.locator("#clock").text_content().removeprefix("layer "))


@pytest.mark.full
@browsing
def test_tokens_are_drawn_where_they_are(visit: Any) -> None:
    """All tokens end at the pole: the pixels of their colour gather there, under the view as it is."""
    page = visit(simulation(run()))
    page.locator("input[name=trails][value=off]").check(force=True)
    page.locator("#scrub").focus()
    page.keyboard.press("End")
    page.evaluate(FRAME)
    centre = page.evaluate(
        """() => {
          const canvas = document.querySelector("canvas"), n = canvas.width;
          const ink = NormLab.colour(0).match(/[0-9a-f]{2}/gi).map((h) => parseInt(h, 16));
          const pixels = canvas.getContext("2d").getImageData(0, 0, n, n).data;
          let count = 0, x = 0, y = 0;
          for (let i = 0; i < pixels.length; i += 4) {
            if (ink.every((value, c) => Math.abs(value - pixels[i + c]) < 30)) {
              count += 1; x += (i / 4) % n; y += Math.floor(i / 4 / n);
            }
          }
          const { tilt } = Stage.view();
          return { x: x / count / n, y: y / count / n, count, tilt };
        }"""
    )
    assert centre["count"] > 20
    assert centre["x"] == pytest.approx(0.5, abs=0.01)
    # The pole (0, 1, 0) tilted towards the eye stands cos(tilt) above the middle; the sphere's radius is 0.465 widths.
    assert centre["y"] == pytest.approx(0.5 - 0.465 * math.cos(centre["tilt"]), abs=0.01)


@pytest.mark.full
@browsing
def test_play_moves_all_spheres_in_step_and_stops_at_the_end(visit: Any) -> None:
    page = visit(simulation())
    page.locator("#pace").select_option("4")
    before = pictures(page)
    page.locator("#play").click()
    assert page.locator("#play").text_content() == "Pause"
    until(page, "Stage.view().at > 1")
    after = pictures(page)
    assert len(before) == 2
    assert all(old != new for old, new in zip(before, after, strict=True))
    until(page, "!Stage.view().playing")
    assert clock(page) == 10.0
    # Playing again begins anew.
    page.locator("#play").click()
    until(page, "Stage.view().at < 15")


@pytest.mark.full
@browsing
def test_the_keyboard_plays_and_steps(visit: Any) -> None:
    page = visit(simulation())
    page.locator("#stage").focus()
    page.keyboard.press("Home")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert clock(page) == 1.5
    page.keyboard.press("ArrowLeft")
    assert clock(page) == 1.0
    page.keyboard.press("Space")
    assert page.evaluate("Stage.view().playing")
    page.keyboard.press("Space")
    assert not page.evaluate("Stage.view().playing")
    turn = page.evaluate("Stage.view().turn")
    page.keyboard.press("Shift+ArrowRight")
    assert page.evaluate("Stage.view().turn") > turn


@pytest.mark.full
@browsing
def test_scrubbing_moves_the_cursor_over_the_curves(visit: Any) -> None:
    page = visit(simulation())
    page.locator("#scrub").fill("10")
    assert clock(page) == 5.0
    assert page.locator("#play").text_content() == "Play"
    where = "([id, t]) => { const x = document.getElementById(id)._fullLayout.xaxis; return x._offset + x.d2p(t); }"
    wanted = page.evaluate(where, ["plot-cosine", 5.0])
    cursor = page.locator(".watched[data-plot=plot-cosine] .cursor")
    assert cursor.is_visible()
    assert float(cursor.evaluate("c => parseFloat(c.style.left)")) == pytest.approx(wanted, abs=0.5)
    assert "cosine 1.000" in page.locator(".sphere .now").first.text_content()


@pytest.mark.full
@browsing
def test_dragging_turns_every_sphere(visit: Any) -> None:
    page = visit(simulation(), viewport={"width": 1200, "height": 1400})
    before = pictures(page)
    box = page.locator("canvas").first.bounding_box()
    page.mouse.move(box["x"] + 50, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 120, box["y"] + 70, steps=3)
    page.mouse.up()
    after = pictures(page)
    assert all(old != new for old, new in zip(before, after, strict=True))
    page.locator("#upright").click()
    assert pictures(page) == before


@pytest.mark.full
@browsing
def test_it_plays_by_itself_once_and_goes_back_to_where_it_opened(visit: Any) -> None:
    page = visit(simulation(), reduced_motion="no-preference", viewport={"width": 1000, "height": 1800})
    opening = page.evaluate("NormLab.data.opening")
    assert page.evaluate("Stage.view().at") == opening > 0
    assert "where the schemes differ most" in page.locator("#where").text_content()
    page.locator("#pace").evaluate("pace => { pace.value = '4'; }")
    until(page, "Stage.view().playing")
    assert page.evaluate("Stage.view().at") < opening
    until(page, "!Stage.view().playing")
    page.evaluate(FRAME)
    assert page.evaluate("Stage.view().at") == opening
    page.wait_for_timeout(2000)
    assert not page.evaluate("Stage.view().playing")


@pytest.mark.full
@browsing
def test_it_stays_still_if_motion_is_unwanted_or_its_reader_has_taken_over(visit: Any) -> None:
    sight = {"viewport": {"width": 1000, "height": 1800}}
    still = visit(simulation(), **sight)
    taken = visit(simulation(), reduced_motion="no-preference", **sight)
    taken.locator("#scrub").fill("10")
    taken.wait_for_timeout(2200)
    for page in (still, taken):
        assert not page.evaluate("Stage.view().playing")
    assert still.evaluate("Stage.view().at === NormLab.data.opening")
    assert taken.evaluate("Stage.view().at") == 10


@pytest.mark.full
@browsing
def test_at_its_opening_the_spheres_differ(visit: Any) -> None:
    drawn = "[...document.querySelectorAll('canvas')].map(canvas => canvas.toDataURL())"
    paths = tuple(run().paths[min(k, 1)] for k in range(LOOKS))
    page = visit(simulation(run("post"), run("pre", rate=0.5, paths=paths)))
    page.evaluate(FRAME)
    apart = page.evaluate("Stage.view().at")
    assert apart > 0
    # One colour for both, so that only the places of the tokens can differ.
    page.evaluate("document.documentElement.style.setProperty('--series-1', NormLab.colour(0))")
    page.locator("#scrub").fill(str(apart))
    page.evaluate(FRAME)
    first, second = page.evaluate(drawn)
    assert first != second
    page.locator("#scrub").fill("0")
    page.evaluate(FRAME)
    first, second = page.evaluate(drawn)
    assert first == second


@pytest.mark.full
@browsing
def test_laws_are_drawn_over_the_data_and_runs_can_be_hidden(visit: Any) -> None:
    page = visit(simulation())
    assert parts(page, "variance") == ["simulated"] * 2 + ["fitted", "predicted"] * 2
    page.locator("#sphere .legend button", has_text="post").click()
    assert {trace["meta"]["scheme"] for trace in traces(page, "variance")} == {1}
    page.evaluate(FRAME)
    assert page.locator(".sphere").first.is_hidden()
    assert page.locator(".ticks i").count() == 2
    page.locator("input[name=time-scale][value=log]").check(force=True)
    assert page.evaluate("document.getElementById('plot-radius').layout.xaxis.type") == "log"


@browsing
def test_every_plot_is_drawn(visit: Any) -> None:
    page = visit(simulation(config={"seeds": 4}))
    page.locator("#more-observables summary").click()
    plots = page.eval_on_selector_all(".plot", "plots => plots.map(p => [p.id, p.data.length])")
    assert {name for name, _ in plots} >= {"plot-cosine", "plot-radius", "plot-fastest", "plot-histogram"}
    assert all(count for _, count in plots)
    assert "seeds" in parts(page, "cosine")


@browsing
def test_experiments_draw_curves_bands_and_images(visit: Any) -> None:
    page = visit(result())
    assert sorted(parts(page, "figure-0")) == ["band", "data", "data", "model", "theory"]
    assert parts(page, "figure-1") == ["image", "halo", "theory"]
    page.locator("#figures .legend button", has_text="post").click()
    assert sorted(parts(page, "figure-0")) == ["data", "model"]


ODD = {
    "no paths": lambda: simulation(run(paths=())),
    "circle": lambda: simulation(run(), config={"dim": 2}),
    "log clock": lambda: simulation(run(), config={"clock": "log"}),
    "two looks": lambda: simulation(run(times=(0.0, 1.0), bands={"cosine": Band(mean=(0, 1), low=(0, 1), high=(0, 1))},
                                        histogram=(), merges=(), fits=(), paths=run().paths[:2])),
    "not finite": lambda: simulation(run(bands={"variance": Band(mean=(math.nan,) * LOOKS, low=(), high=())}, fits=(),
                                         tail=None)),
    "bare": lambda: result(figures=(), verdicts=(), rows=(), columns=(), config={}, versions={}, command=()),
    "hostile": lambda: simulation(run(HOSTILE), run("b")),
}  # fmt: skip


@pytest.mark.full
@browsing
@pytest.mark.parametrize("what", ODD)
def test_odd_results_draw_without_complaint(visit: Any, what: str) -> None:
    page = visit(ODD[what](), reduced_motion="no-preference", viewport={"width": 1000, "height": 1400})
    page.wait_for_timeout(150)
    assert page.locator("#configuration").count() == 1
    assert page.locator(".plot script").count() == 0


@pytest.mark.full
@browsing
@pytest.mark.parametrize("shown", [simulation, result])
@pytest.mark.parametrize("width", [360, 320])
def test_a_phone_needs_no_sideways_scrolling(visit: Any, shown: Any, width: int) -> None:
    page = visit(shown(), viewport={"width": width, "height": 740}, is_mobile=True, has_touch=True)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.full
@browsing
def test_dark_mode_reaches_spheres_and_plots(visit: Any) -> None:
    light, dark = (visit(simulation(), color_scheme=scheme) for scheme in ("light", "dark"))
    assert pictures(light) != pictures(dark)
    ink = "document.getElementById('plot-cosine').data.at(-1).line.color"
    assert light.evaluate(ink) != dark.evaluate(ink)
    before = pictures(light)
    light.emulate_media(color_scheme="dark")
    until(light, f"{PICTURES}[0] !== {json.dumps(before[0])}")


@pytest.mark.full
@browsing
@pytest.mark.parametrize("shown", [simulation, result])
def test_everything_one_can_reach_has_a_name(visit: Any, shown: Any) -> None:
    page = visit(shown())
    unnamed = "e => !(e.ariaLabel || e.textContent.trim() || e.labels?.length)"
    reachable = "button, input, select, summary, canvas, [role=img], [role=region], [tabindex]"
    assert page.evaluate(f"[...document.querySelectorAll('{reachable}')].filter({unnamed}).length") == 0
