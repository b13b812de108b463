"""The page of a check: all is in it, text from users stays text, and a real browser has nothing to complain of."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from normlab.checks.result import Check
from normlab.checks.view.page import commands, page
from normlab.checks.view.panels import PANELS
from normlab.checks.view.plots import plot_data
from normlab.checks.view.side_by_side import Against
from normlab.probes.profile import BLOCK, BOUNDARY
from tests.browser import browsing
from tests.checks import finished
from tests.checks.test_result import RATES, THEORY, full


def theory_of(depth: int) -> Any:
    """Bounds of the right length for a stack so deep."""
    look = dataclasses.replace(
        THEORY.before, certificate=tuple(1.2 + 2.0 * k for k in range(depth + 1)), used=(0.2,) * (depth + 1)
    )
    return dataclasses.replace(
        THEORY, depth=depth, before=look, after=dataclasses.replace(look, step=30),
        predicted=tuple(math.sqrt(1.0 + k) for k in range(depth + 1)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def check() -> Check:
    return finished.check(name="peri", theory=theory_of(24), rates=RATES, **finished.ladders())


def sections(html: str) -> list[str]:
    return re.findall(r'<section id="([a-z]+)"', html)


def test_every_part_has_its_section(check: Check) -> None:
    always = ["verdicts", "profiles", "ladders", "configuration", "reproduce"]
    assert sections(page(finished.check())) == always
    assert sections(page(check)) == ["verdicts", "profiles", "ladders", "rates", "theory", "configuration", "reproduce"]


def test_the_verdict_is_the_first_thing_said() -> None:
    note = "width 4096 -> 256 (--shrink 16)"
    html = page(finished.collapsing(notes_of_target=(note,)))
    words = "Will lose its gradient and collapse its tokens into one when deep"
    assert f'<p class="headline" data-tone="fail">{words}' in html
    assert html.index(words) < html.index(note.replace(">", "&gt;")) < html.index('<section id="verdicts"')
    assert "next to no gradient, so they do not learn" in html


def test_the_page_needs_nothing_from_outside(check: Check) -> None:
    html = page(check).partition("<script>")[0]
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', html)
    assert "default-src 'none'" in html


def test_text_from_users_is_escaped() -> None:
    hostile = finished.check(
        name=finished.HOSTILE, notes=("<img src=x onerror=alert(2)>",), notes_of_target=("</script><b>",),
        command=("normlab", "check", "<i>"), versions={"<u>": "<s>"}, remedies=("<em>",), config={"<q>": "<p>"},
    )  # fmt: skip
    # Up to plotly's own code, the data of the plots included.
    html = page(hostile).partition("\n<script>\n")[0]
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 2
    for tag in ("<script>alert(1)", "<img src=x", "</script><b>", "<em>", "<u>", "<q>"):
        assert tag not in html


def test_commands_can_be_pasted() -> None:
    check = finished.check(command=("normlab", "check", "peri(step=0.1)", "--seeds", "3"))
    assert commands([check]) == ["pip install normlab==0.1.0 torch==2.13.0", "normlab check 'peri(step=0.1)' --seeds 3"]
    assert commands([finished.check(command=())]) == []


def test_panels_are_measured_fields_under_their_own_names() -> None:
    names = [panel.name for panel in PANELS]
    assert len(set(names)) == len(names)
    assert set(names) - {"gain", "headroom"} <= {*BOUNDARY, *BLOCK}
    assert all(panel.at_boundaries == (panel.name in (*BOUNDARY, "headroom")) for panel in PANELS)
    judged = {verdict.name for verdict in finished.check().verdicts}
    assert {panel.verdict for panel in PANELS} - {""} <= judged


def test_what_was_not_measured_is_not_drawn() -> None:
    rungs = finished.ladder()
    bare = [dataclasses.replace(profile, attn_entropy=[], logit_max=[], sink=[]) for profile in rungs.profiles]
    data = plot_data([finished.check(dataclasses.replace(rungs, profiles=tuple(bare)))])
    names = {panel["name"] for panel in data["panels"]}
    assert "rms" in names
    assert not names & {"attn_entropy", "logit_max", "sink"}


def test_plots_get_means_over_seeds_and_their_spread() -> None:
    one = finished.ladder((12,), burst=False).profiles[0]
    two = dataclasses.replace(one, seed=1, rms=[3.0 * x for x in one.rms])
    data = plot_data([finished.check(dataclasses.replace(finished.ladder((12,)), profiles=(one, two)))])
    profile = data["checks"][0]["profiles"][0]
    assert profile["mean"]["rms"][-1] == pytest.approx(2.0 * one.rms[-1], rel=1e-4)
    assert profile["spread"]["rms"] == [pytest.approx(one.rms, rel=1e-4), pytest.approx(two.rms, rel=1e-4)]
    # Over depths the mean is geometric: sizes may differ by orders of magnitude.
    assert data["checks"][0]["ladder"]["before"]["rms"][0][1] == pytest.approx(math.sqrt(3.0) * one.rms[-1], rel=1e-4)


def test_guilty_blocks_are_drawn_unless_all_are() -> None:
    data = plot_data([finished.collapsing()])["checks"][0]["guilty"]
    assert data["cos"] == {"depth": 24, "blocks": [22, 23]}
    assert "grad_h" not in data


def test_fitted_laws_pass_through_what_was_measured(check: Check) -> None:
    fit = plot_data([check])["checks"][0]["fits"]["after"]["rms"]
    # l^0.5 from boundary 1 on: log((1 + 24) / (1 + 12)) / log 2 halved.
    assert fit["p"] == pytest.approx(0.5 * math.log2(25 / 13), abs=1e-3)
    assert fit["x"] == [12, 48.0]
    assert fit["y"][0] == pytest.approx(1.1 * math.sqrt(13), rel=1e-4)


@pytest.fixture
def visit(open_page: Any, tmp_path: Path) -> Any:
    """Open the page of a check."""

    def visit(result: Check | Against, **options: Any) -> Any:
        return open_page(result.save(tmp_path / "page.html").as_uri(), **options)

    return visit


def traces(page: Any, plot: str) -> list[dict[str, Any]]:
    return json.loads(page.evaluate(f"JSON.stringify(document.getElementById('plot-{plot}').data)"))


def parts(page: Any, plot: str) -> list[str]:
    return [trace["meta"]["part"] for trace in traces(page, plot)]


@browsing
def test_every_plot_is_drawn_without_complaint(visit: Any, check: Check) -> None:
    page = visit(check)
    page.locator("#more-profiles summary").click()
    plots = page.eval_on_selector_all(".plot", "plots => plots.map(p => [p.id, p.data.length])")
    assert {name for name, _ in plots} >= {"plot-rms", "plot-ladder-G", "plot-rates", "plot-scale", "plot-step-loss"}
    assert [name for name, count in plots if count == 0] == []
    assert page.locator("#plot-kurtosis svg.main-svg").first.is_visible()


@pytest.mark.full
@browsing
def test_bounds_lie_over_the_measured_curve(visit: Any, check: Check) -> None:
    page = visit(check)
    assert parts(page, "rms") == ["bound", "law", "before", "after"]
    bound, _, _, after = (trace["y"] for trace in traces(page, "rms"))
    assert all(high >= low for high, low in zip(bound, after, strict=True))
    # Theory looked at the deepest stack alone.
    page.locator("#profile-depth").select_option("12")
    assert parts(page, "rms") == ["before", "after"]


@pytest.mark.full
@browsing
def test_the_profiles_follow_their_switches_by_keyboard(visit: Any, check: Check) -> None:
    page = visit(check)
    page.locator("input[name=profile-when][value=both]").focus()
    page.keyboard.press("ArrowRight")
    assert parts(page, "grad_h") == ["before"]
    page.keyboard.press("ArrowRight")
    assert parts(page, "grad_h") == ["after"]
    kind = "document.getElementById('plot-cos').layout.yaxis.type"
    assert page.evaluate(kind) == "linear"
    page.locator("input[name=profile-scale][value=auto]").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate(kind) == "log"


@pytest.mark.full
@browsing
def test_two_checks_share_every_plot(visit: Any, check: Check) -> None:
    page = visit(Against(check, finished.collapsing()))
    assert page.locator("h1").text_content() == "peri against post"
    schemes = {trace["meta"]["scheme"] for trace in traces(page, "grad_h")}
    assert schemes == {0, 1}
    page.locator("#profiles .legend button", has_text="peri").click()
    assert {trace["meta"]["scheme"] for trace in traces(page, "grad_h")} == {1}
    assert page.locator("#differences tbody th", has_text="backward").count() == 1


@browsing
@pytest.mark.full
@pytest.mark.parametrize("width", [360, 320])
def test_a_phone_needs_no_sideways_scrolling(visit: Any, check: Check, width: int) -> None:
    page = visit(check, viewport={"width": width, "height": 740}, is_mobile=True, has_touch=True)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.full
@browsing
def test_dark_mode_reaches_the_plots(visit: Any, check: Check) -> None:
    light, dark = (visit(check, color_scheme=scheme) for scheme in ("light", "dark"))
    ink = "document.getElementById('plot-rms').data.at(-1).line.color"
    assert light.evaluate(ink) != dark.evaluate(ink)


@browsing
def test_hostile_names_stay_text_in_plots(visit: Any) -> None:
    hostile = finished.check(name=finished.HOSTILE, theory=theory_of(24))
    page = visit(Against(hostile, finished.check()))
    page.evaluate("Plotly.Fx.hover('plot-grad_h', [{curveNumber: 0, pointNumber: 3}])")
    assert "<script>alert(1)</script>" in page.locator("#plot-grad_h .hoverlayer").text_content()
    assert page.locator(".plot script").count() == 0


@pytest.mark.full
@browsing
@pytest.mark.parametrize("what", ["broken", "one depth", "no burst", "bare"])
def test_odd_checks_draw_without_complaint(visit: Any, what: str) -> None:
    rungs = finished.ladder((12, 24))
    broken = dataclasses.replace(rungs.profiles[-1], rms=[math.nan] * 25, grad_h=[math.inf] * 25, loss=math.nan)
    odd = {
        "broken": lambda: finished.check(dataclasses.replace(rungs, profiles=(*rungs.profiles[:-1], broken))),
        "one depth": lambda: finished.check(finished.ladder((12,))),
        "no burst": lambda: finished.check(finished.ladder(burst=False), theory=theory_of(24)),
        "bare": lambda: finished.check(curves={}, command=(), versions={}, config={}),
    }
    page = visit(odd[what]())
    assert traces(page, "rms")


@pytest.mark.full
@browsing
def test_everything_one_can_reach_has_a_name(visit: Any) -> None:
    page = visit(full())
    unnamed = "e => !(e.ariaLabel || e.textContent.trim() || e.labels?.length)"
    reachable = "button, input, select, summary, [role=img], [role=region]"
    assert page.evaluate(f"[...document.querySelectorAll('{reachable}')].filter({unnamed}).length") == 0
