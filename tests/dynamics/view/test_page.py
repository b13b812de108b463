"""The pages of simulations and experiments as text: all is in them, and nothing of it is taken for code."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest

from normlab.dynamics.experiments.result import judge_prediction
from normlab.dynamics.result import Merge
from normlab.dynamics.view.figures import Figure, make_curve
from normlab.dynamics.view.page import agreement_sentence, headline, render_result, reproduce_commands
from normlab.dynamics.view.plots import MAX_GROUPS, PATH_SCALE, figures_data, simulation_data
from tests.dynamics.shown import HOSTILE, LOOKS, result, run, simulation


def sections(html: str) -> list[str]:
    return re.findall(r'<section id="([a-z]+)"', html)


def test_every_part_has_its_section() -> None:
    end = ["configuration", "reproduce"]
    assert sections(render_result(simulation())) == ["sphere", "laws", "observables", "merges", *end]
    assert sections(render_result(simulation(run(merges=())))) == ["sphere", "laws", "observables", *end]
    assert sections(render_result(result())) == ["figures", "results", "verdicts", *end]
    assert sections(render_result(result(verdicts=()))) == ["figures", "results", *end]


def test_the_headline_says_what_happened() -> None:
    assert headline(simulation()) == (
        "By time 10 post has gathered its tokens most (mean cosine 1.00), peri(step=0.1) least (0.99)."
    )
    assert headline(simulation(run())).startswith("post: the mean cosine of two tokens goes from 0.00 to 1.00")
    assert headline(simulation(run(bands={"radius": run()["radius"]}))) == ""


def test_agreement_is_counted() -> None:
    right, wrong = result().verdicts
    assert agreement_sentence(result()) == "1 of 2 predictions hold."
    assert agreement_sentence(result(verdicts=(right, right))) == "All 2 predictions hold."
    unknown = (judge_prediction("a", "b", 1.0, None, 0.1),) * 2
    assert agreement_sentence(result(verdicts=unknown)) == "Measured, without a prediction: 2 numbers."
    assert wrong.sentence in render_result(result()).partition('<section id="figures"')[0]
    assert 'data-tone="fail"' in render_result(result())


def test_text_from_users_is_escaped() -> None:
    pages = [
        render_result(simulation(run(HOSTILE), run(), notes=(HOSTILE,), config={HOSTILE: HOSTILE})),
        render_result(result(about=HOSTILE, notes=(HOSTILE,), columns=(HOSTILE, "b"), rows=((HOSTILE, 1.0),),
                    figures=(dataclasses.replace(result().figures[0], title=HOSTILE, x_label=HOSTILE),))),
    ]  # fmt: skip
    for html in pages:
        # Up to plotly's own code, the data of the plots included.
        own = html.partition("\n<script>\n")[0]
        assert "<script>alert" not in own
        assert own.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 4


def test_the_page_needs_nothing_from_outside() -> None:
    for html in (render_result(simulation()), render_result(result())):
        assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', html.partition("<script>")[0])
        assert "default-src 'none'" in html


def test_a_projection_is_explained_where_there_is_one() -> None:
    high = render_result(simulation(run(), config={"dim": 512, "tokens": 256}, explained=0.587))
    assert "Tokens live in dimension 512" in high
    assert "59 % of their square length" in high
    assert "5 of 256 tokens are drawn" in high
    assert "Tokens live on this sphere" in render_result(simulation())
    assert "Tokens live on a circle" in render_result(simulation(config={"dim": 2}))


def test_paths_travel_as_whole_numbers() -> None:
    drawn = simulation_data(simulation())["runs"][0]["paths"]
    assert len(drawn) == LOOKS
    assert drawn[0][:3] == [round(PATH_SCALE * math.sin(0.3)), round(PATH_SCALE * math.cos(0.3)), 0]


def test_laws_lie_over_the_data() -> None:
    law = simulation_data(simulation(run(rate=2.5)))["runs"][0]["laws"][0]
    assert law["times"][0] == 2.0
    assert law["fitted"] == pytest.approx([math.exp(-2.5 * time) for time in law["times"]], rel=1e-4)
    # The predicted line has its own slope and meets the fitted one in the middle.
    middle = len(law["times"]) // 2
    assert law["predicted"][middle] == pytest.approx(law["fitted"][middle], rel=1e-4)
    assert math.log(law["predicted"][-1] / law["predicted"][0]) == pytest.approx(-2.0 * 6.0, rel=1e-4)


def test_merge_ticks_lie_on_looks() -> None:
    found = run(times=tuple(0.1 * k for k in range(LOOKS)), merges=(Merge(time=0.1 * 3, clusters=4),))
    drawn = simulation_data(simulation(found))["runs"][0]
    assert drawn["merges"][0] in drawn["times"]


def test_theory_shares_the_colour_of_what_it_speaks_of() -> None:
    data = figures_data(result().figures)
    assert [scheme["label"] for scheme in data["schemes"]] == ["post", "peri"]
    assert [c["group"] for c in data["figures"][0]["curves"]] == [0, 0, 1, None]
    many = tuple(make_curve(f"token {k}", (0,), (1,)) for k in range(MAX_GROUPS + 1))
    bundle = Figure(title="", x_label="", y_label="", curves=many)
    assert figures_data((bundle,))["schemes"] == []


def test_commands_can_be_pasted() -> None:
    assert reproduce_commands(simulation()) == [
        "pip install normlab==0.1.0 torch==2.13.0", "normlab simulate --scheme 'post,peri(step=0.1)'"
    ]  # fmt: skip
    assert reproduce_commands(simulation(command=())) == []


def test_what_was_read_back_makes_the_same_page() -> None:
    for found in (simulation(), result()):
        kept = type(found).from_json(found.to_json())
        assert render_result(kept) == render_result(found)
    assert dataclasses.replace(simulation(), seconds=2.0).to_html() != render_result(simulation())
