"""The pages of simulations and experiments as text: all is in them, and nothing of it is taken for code."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest

from normlab.dynamics.config import OBSERVABLE_LABELS
from normlab.dynamics.experiments.result import judge_prediction
from normlab.dynamics.result import Band, Merge, Simulation
from normlab.dynamics.view.figures import Figure, make_curve
from normlab.dynamics.view.opening import opening_look
from normlab.dynamics.view.page import agreement_sentence, render_result, reproduce_commands
from normlab.dynamics.view.plots import MAX_GROUPS, PATH_SCALE, figures_data, simulation_data
from normlab.dynamics.view.words import WHY, headline, scheme_words, tail_findings
from tests.dynamics.shown import HOSTILE, LOOKS, result, run, simulation


def sections(html: str) -> list[str]:
    return re.findall(r'<section id="([a-z]+)"', html)


def test_every_part_has_its_section() -> None:
    end = ["configuration", "reproduce"]
    assert sections(render_result(simulation())) == ["sphere", "laws", "observables", "merges", *end]
    noted = render_result(simulation(run(merges=()), notes=("a remark",)))
    assert sections(noted) == ["sphere", "laws", "observables", "notes", *end]
    assert sections(render_result(simulation(run(merges=())))) == ["sphere", "laws", "observables", *end]
    assert sections(render_result(result())) == ["figures", "results", "verdicts", *end]
    assert sections(render_result(result(verdicts=()))) == ["figures", "results", *end]


def test_the_headline_says_what_happened() -> None:
    assert headline(simulation()) == (
        "After 10 layers the tokens of post are most alike (mean cosine 1.00; 1: all the same), "
        "those of peri(step=0.1) least (0.99)."
    )
    assert headline(simulation(run())) == (
        "post: within 10 layers the mean cosine of two tokens goes from 0.00 to 1.00 (1: all tokens alike)."
    )
    assert headline(simulation(run("post"), run("pre"))) == (
        "After 10 layers all have the same mean cosine of two tokens, 1.00 (1: all tokens alike)."
    )
    assert headline(simulation(run(bands={"radius": run()["radius"]}))) == ""


def test_the_page_explains_itself_to_a_newcomer() -> None:
    """What collapse is and why it matters, what a dot is, what each scheme does, before anything moves."""
    html = render_result(simulation(run("post"), run("peri(step=0.1)", rate=0.5), notes=("a remark",)))
    before = html.partition("<figure")[0]
    assert WHY.count(". ") == 1
    for words in (WHY, "Each dot is a token", "Post-Norm:", "Peri-LN:", "1: the same direction"):
        assert words in before
    own = html.partition("\n<script>\n")[0].partition('<section id="notes"')[0]
    # Signs of the paper stay out of what everybody reads; remarks for those who know it come last.
    assert not re.findall("[θρ‖]|arXiv|observable|seed", re.sub("<[^>]*>", "", own.partition('id="data"')[0]))
    assert "a remark" not in own
    assert "a remark" in html


def test_only_schemes_that_are_built_in_are_described() -> None:
    """A name in a stored result may be a path: the file is not loaded to describe it."""
    found = scheme_words(simulation(run("own.py:Scheme"), run("sqrt"), run("post", beta=2.0)))
    assert [(place, label) for place, label, _ in found] == [(2, "post, β = 2")]


def test_how_fast_tokens_gather_is_said_in_words() -> None:
    assert tail_findings(simulation(run())) == [
        "post: late in the run the squared distance of tokens from their mean falls as e^(-2 t), "
        "by the same factor in every layer: fast; theory predicts e^(-2 t)."
    ]
    assert tail_findings(simulation(run(fits=())))[0].startswith("post: tokens have not gathered by the end; theory")
    assert tail_findings(simulation(run(fits=(), tail=None))) == []


def shown_at(*cosines: list[float]) -> Simulation:
    times = tuple(float(k) for k in range(len(cosines[0])))
    bands = [{"cosine": Band(mean=tuple(values), low=(), high=())} for values in cosines]
    return simulation(*(run(times=times, bands=one, fits=()) for one in bands))


@pytest.mark.parametrize(
    ("cosines", "look"),
    [
        ([[0, 0.5, 0.9, 1, 1], [0, 0.1, 0.2, 0.6, 1]], 2),  # farthest apart in between: at both ends they agree
        ([[0, 0.5, 0.98, 1.0], [0, 0, 0, 0]], 2),  # what is nearly the largest difference comes first
        ([[0, math.nan, 0.2, 0.2], [0, 0, 0, 0.1]], 2),
        ([[0, 0, 0, 0], [0, 0, 0, 0]], 2),  # no difference at all: the middle
        ([[0, 0.1, 0.2, 0.6, 0.9, 1.0]], 3),  # one run: halfway
        ([[1.0, 0.7, 0.3, 0.0]], 2),
        ([[math.nan, 0.7, 0.3, 0.0]], 2),
        ([[0.3, 0.3]], 1),
    ],
)
def test_it_opens_where_the_schemes_differ(cosines: list[list[float]], look: int) -> None:
    assert opening_look(shown_at(*cosines)) == look
    assert simulation_data(shown_at(*cosines))["opening"] == look


def test_what_is_shown_at_first_is_said() -> None:
    said = [simulation_data(shown_at(*c))["opened"] for c in ([[0.0, 1.0]], [[0.0, 1.0], [0.0, 0.5]], [[0.0, 0.0]] * 2)]
    assert [words.partition(".")[0] for words in said] == [
        "Shown: halfway through the change", "Shown: where the schemes differ most", "Shown: the middle of the run"
    ]  # fmt: skip


def test_without_cosines_it_opens_in_the_middle() -> None:
    assert opening_look(simulation(run(bands={"radius": run()["radius"]}))) == LOOKS // 2


def test_first_and_last_values_are_named_in_words() -> None:
    html = render_result(simulation())
    for name in simulation().runs[0].bands:
        assert OBSERVABLE_LABELS[name] in html


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
    assert "Tokens live in 512 dimensions" in high
    assert "59 % of their squared length" in high
    assert "5 of 256 tokens are drawn" in high
    assert "Tokens have three dimensions here" in render_result(simulation())
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
