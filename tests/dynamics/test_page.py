"""The pages of simulations and experiments: all is in them, tokens move, a real browser has nothing to complain of."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from normlab.dynamics.drawing import FINE, MOST_GROUPS, figures_data, simulation_data
from normlab.dynamics.experiments.result import Result, judge
from normlab.dynamics.figures import Figure, curve, image
from normlab.dynamics.fits import Rate
from normlab.dynamics.page import agreement, commands, headline, page
from normlab.dynamics.result import Band, Fitted, Merge, Run, Simulation
from normlab.dynamics.tails import Tail
from tests.browser import browsing

HOSTILE = "<script>alert(1)</script>"
LOOKS, TOKENS = 21, 5
TIMES = tuple(0.5 * k for k in range(LOOKS))


def band(values: tuple[float, ...]) -> Band:
    return Band(mean=values, low=tuple(0.9 * v for v in values), high=tuple(1.1 * v for v in values))


def run(scheme: str = "post", *, beta: float = 1.0, rate: float = 2.0, **changes: Any) -> Run:
    """Tokens that come down the sphere to its pole, and a variance that falls as e^{−rate t}."""
    fall = tuple(math.exp(-rate * time) for time in TIMES)
    rise = tuple(1 - value for value in fall)
    bands = {"cosine": rise, "variance": fall, "clusters": tuple(float(max(1, 5 - k // 3)) for k in range(LOOKS))}
    bands |= {"radius": (1.0,) * LOOKS, "fastest": fall}
    angles = [[(1 - k / (LOOKS - 1)) * (0.3 + 0.2 * token) for token in range(TOKENS)] for k in range(LOOKS)]
    fitted = Rate(form="exponential", value=-rate, low=-rate - 0.1, high=-rate + 0.1, begin=2.0, end=8.0, intercept=0.0)
    found: dict[str, Any] = {
        "times": TIMES,
        "bands": {name: band(values) for name, values in bands.items()},
        "histogram": tuple((0.25, 0.25, 0.25, 0.25) for _ in TIMES),
        "merges": (Merge(time=1.5, clusters=4), Merge(time=3.0, clusters=3)),
        "fits": (Fitted(observable="variance", rate=fitted, predicted=-2.0),),
        "tail": Tail(form="exponential", rate=-2.0, growth=0.0),
        "paths": tuple(tuple((math.sin(a), math.cos(a), 0.0) for a in look) for look in angles),
    }  # fmt: skip
    return Run(scheme=scheme, beta=beta, **found | changes)


def simulation(*runs: Run, **changes: Any) -> Simulation:
    config = {"tokens": TOKENS, "dim": 3, "seeds": 1, "time": 10.0, "clock": "plain", "method": "rk4"}
    found: dict[str, Any] = {
        "config": config | changes.pop("config", {}),
        "runs": runs or (run("post"), run("peri(step=0.1)", rate=0.5)),
        "explained": 1.0,
        "versions": {"normlab": "0.1.0", "torch": "2.13.0"},
        "command": ("normlab", "simulate", "--scheme", "post,peri(step=0.1)"),
    }
    return Simulation(**found | changes)


def result(**changes: Any) -> Result:
    x = (1.0, 2.0, 3.0)
    figures = (
        Figure(
            title="Curves", x_label="time", y_label="value", y_log=True,
            curves=(
                curve("post", x, (1, 2, 4), low=(0.5, 1, 2), high=(2, 4, 8)),
                curve("post, fitted", x, (1, 2, 4), role="theory"),
                curve("peri", x, (1, 3, 9), marks=True), curve("a net", x, (2, 2, 2), role="model"),
            ),
        ),
        Figure(title="Image", x_label="time", y_label="β",
               curves=(curve("edge", (1.0, 2.0), (1.0, 2.0), role="theory"),),
               image=image(x, (1.0, 2.0), ((0, 0.5, 1), (0, 0, math.nan)), "share")),
    )  # fmt: skip
    verdicts = (judge("post", "rate", -2.00001, -2.0, 1e-3), judge("peri", "rate", -1.5, -2.0, 1e-3))
    found: dict[str, Any] = {
        "experiment": "speed-laws", "about": "how fast", "config": {"scheme": ["post", "peri"], "seed": 0},
        "figures": figures, "columns": ("scheme", "rate"), "rows": (("post", -2.0), ("peri", math.nan)),
        "verdicts": verdicts,
        "notes": ("a note",), "command": ("normlab", "simulate", "speed-laws"), "versions": {"normlab": "0.1.0"},
    }  # fmt: skip
    return Result(**found | changes)


def sections(html: str) -> list[str]:
    return re.findall(r'<section id="([a-z]+)"', html)


def test_every_part_has_its_section() -> None:
    end = ["configuration", "reproduce"]
    assert sections(page(simulation())) == ["sphere", "laws", "observables", "merges", *end]
    assert sections(page(simulation(run(merges=())))) == ["sphere", "laws", "observables", *end]
    assert sections(page(result())) == ["figures", "results", "verdicts", *end]
    assert sections(page(result(verdicts=()))) == ["figures", "results", *end]


def test_the_headline_says_what_happened() -> None:
    assert headline(simulation()) == (
        "By time 10 post has gathered its tokens most (mean cosine 1.00), peri(step=0.1) least (0.99)."
    )
    assert headline(simulation(run())).startswith("post: the mean cosine of two tokens goes from 0.00 to 1.00")
    assert headline(simulation(run(bands={"radius": run()["radius"]}))) == ""


def test_agreement_is_counted() -> None:
    right, wrong = result().verdicts
    assert agreement(result()) == "1 of 2 predictions hold."
    assert agreement(result(verdicts=(right, right))) == "All 2 predictions hold."
    unknown = (judge("a", "b", 1.0, None, 0.1),) * 2
    assert agreement(result(verdicts=unknown)) == "Measured, with nothing foretold: 2 numbers."
    assert wrong.words in page(result()).partition('<section id="figures"')[0]
    assert 'data-tone="fail"' in page(result())


def test_text_from_users_is_escaped() -> None:
    pages = [
        page(simulation(run(HOSTILE), run(), notes=(HOSTILE,), config={HOSTILE: HOSTILE})),
        page(result(about=HOSTILE, notes=(HOSTILE,), columns=(HOSTILE, "b"), rows=((HOSTILE, 1.0),),
                    figures=(dataclasses.replace(result().figures[0], title=HOSTILE, x_label=HOSTILE),))),
    ]  # fmt: skip
    for html in pages:
        # Up to plotly's own code, the data of the plots included.
        own = html.partition("\n<script>\n")[0]
        assert "<script>alert" not in own
        assert own.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 4


def test_the_page_needs_nothing_from_outside() -> None:
    for html in (page(simulation()), page(result())):
        assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', html.partition("<script>")[0])
        assert "default-src 'none'" in html


def test_a_projection_is_explained_where_there_is_one() -> None:
    high = page(simulation(run(), config={"dim": 512, "tokens": 256}, explained=0.587))
    assert "Tokens live in dimension 512" in high
    assert "59 % of their square length" in high
    assert "5 of 256 tokens are drawn" in high
    assert "Tokens live on this sphere" in page(simulation())
    assert "Tokens live on a circle" in page(simulation(config={"dim": 2}))


def test_paths_travel_as_whole_numbers() -> None:
    drawn = simulation_data(simulation())["runs"][0]["paths"]
    assert len(drawn) == LOOKS
    assert drawn[0][:3] == [round(FINE * math.sin(0.3)), round(FINE * math.cos(0.3)), 0]


def test_laws_lie_over_the_data() -> None:
    law = simulation_data(simulation(run(rate=2.5)))["runs"][0]["laws"][0]
    assert law["times"][0] == 2.0
    assert law["fitted"] == pytest.approx([math.exp(-2.5 * time) for time in law["times"]], rel=1e-4)
    # The foretold line has its own slope and meets the fitted one in the middle.
    middle = len(law["times"]) // 2
    assert law["foretold"][middle] == pytest.approx(law["fitted"][middle], rel=1e-4)
    assert math.log(law["foretold"][-1] / law["foretold"][0]) == pytest.approx(-2.0 * 6.0, rel=1e-4)


def test_merge_ticks_lie_on_looks() -> None:
    found = run(times=tuple(0.1 * k for k in range(LOOKS)), merges=(Merge(time=0.1 * 3, clusters=4),))
    drawn = simulation_data(simulation(found))["runs"][0]
    assert drawn["merges"][0] in drawn["times"]


def test_theory_shares_the_colour_of_what_it_speaks_of() -> None:
    data = figures_data(result().figures)
    assert [scheme["label"] for scheme in data["schemes"]] == ["post", "peri"]
    assert [c["group"] for c in data["figures"][0]["curves"]] == [0, 0, 1, None]
    many = tuple(curve(f"token {k}", (0,), (1,)) for k in range(MOST_GROUPS + 1))
    bundle = Figure(title="", x_label="", y_label="", curves=many)
    assert figures_data((bundle,))["schemes"] == []


def test_commands_can_be_pasted() -> None:
    assert commands(simulation()) == [
        "pip install normlab==0.1.0 torch==2.13.0", "normlab simulate --scheme 'post,peri(step=0.1)'"
    ]  # fmt: skip
    assert commands(simulation(command=())) == []


@pytest.fixture
def visit(open_page: Any, tmp_path: Path) -> Any:
    """Open the page of a result."""

    def visit(shown: Simulation | Result, **options: Any) -> Any:
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
    return float(page.locator("#clock").text_content().removeprefix("t = "))


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


@browsing
def test_the_keyboard_plays_and_steps(visit: Any) -> None:
    page = visit(simulation())
    page.locator("#stage").focus()
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


@browsing
def test_it_plays_by_itself_unless_motion_is_unwanted(visit: Any) -> None:
    sight = {"viewport": {"width": 1000, "height": 1400}}
    moving = visit(simulation(), reduced_motion="no-preference", **sight)
    until(moving, "Stage.view().at > 0.2")
    still = visit(simulation(), **sight)
    still.wait_for_timeout(400)
    assert still.evaluate("Stage.view().at") == 0


@browsing
def test_laws_are_drawn_over_the_data_and_runs_can_be_hidden(visit: Any) -> None:
    page = visit(simulation())
    assert parts(page, "variance") == ["simulated"] * 2 + ["fitted", "foretold"] * 2
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


@browsing
@pytest.mark.parametrize("what", ODD)
def test_odd_results_draw_without_complaint(visit: Any, what: str) -> None:
    page = visit(ODD[what](), reduced_motion="no-preference", viewport={"width": 1000, "height": 1400})
    page.wait_for_timeout(150)
    assert page.locator("#configuration").count() == 1
    assert page.locator(".plot script").count() == 0


@browsing
@pytest.mark.parametrize("shown", [simulation, result])
@pytest.mark.parametrize("width", [360, pytest.param(320, marks=pytest.mark.full)])
def test_a_phone_needs_no_sideways_scrolling(visit: Any, shown: Any, width: int) -> None:
    page = visit(shown(), viewport={"width": width, "height": 740}, is_mobile=True, has_touch=True)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@browsing
def test_dark_mode_reaches_spheres_and_plots(visit: Any) -> None:
    light, dark = (visit(simulation(), color_scheme=scheme) for scheme in ("light", "dark"))
    assert pictures(light) != pictures(dark)
    ink = "document.getElementById('plot-cosine').data.at(-1).line.color"
    assert light.evaluate(ink) != dark.evaluate(ink)
    before = pictures(light)
    light.emulate_media(color_scheme="dark")
    until(light, f"{PICTURES}[0] !== {json.dumps(before[0])}")


@browsing
@pytest.mark.parametrize("shown", [simulation, result])
def test_everything_one_can_reach_has_a_name(visit: Any, shown: Any) -> None:
    page = visit(shown())
    unnamed = "e => !(e.ariaLabel || e.textContent.trim() || e.labels?.length)"
    reachable = "button, input, select, summary, canvas, [role=img], [role=region], [tabindex]"
    assert page.evaluate(f"[...document.querySelectorAll('{reachable}')].filter({unnamed}).length") == 0


def test_what_was_read_back_makes_the_same_page() -> None:
    for found in (simulation(), result()):
        kept = type(found).from_json(found.to_json())
        assert page(kept) == page(found)
    assert dataclasses.replace(simulation(), seconds=2.0).to_html() != page(simulation())
