"""Rules on changes, ranks, rates and ladders: verdicts worked out by hand, or equal to the ladder's own answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from normlab.errors import NormLabError
from normlab.ladders import statistics
from normlab.ladders.statistics import answer
from normlab.ladders.statistics.more_seeds import GapFit, seeds_to_decide
from normlab.ladders.stored_rows import judged_rows
from normlab.studies.cells import by_cell, cell_name
from normlab.studies.evidence import Evidence
from normlab.studies.exact import kendall_tau, order_p_values
from normlab.studies.rules import RULES, read_rule
from tests.matrix import parametrize
from tests.studies.rows import evidence, row, rows_of

BASE = [4.0, 4.1, 3.9]
SIZES = {"4x256": (12_000_000, 76e6), "6x384": (23_000_000, 153e6), "8x512": (42_000_000, 280e6)}
BUDGETS = (29_507_584, 59_015_168, 118_013_952)


def rule(kind: str, **table):
    return read_rule({"kind": kind, **table}, "a test")


# -- change ------------------------------------------------------------------------------------------------------------


def lengths(gap_at_2048: float) -> Evidence:
    """A gap of -0.04 at length 512, and another one at 2048, over three seeds with a little noise."""
    noise = (0.001, -0.001, 0.0)
    return Evidence({
        "512": rows_of({"a": [b - 0.04 for b in BASE], "b": BASE}),
        "2048": rows_of({"a": [b + gap_at_2048 + n for b, n in zip(BASE, noise, strict=True)], "b": BASE}),
    })  # fmt: skip


@pytest.mark.parametrize(("gap", "expected"), [(-0.04, "reproduced"), (0.0, "refuted"), (-0.02, "open")])
def test_a_change_is_the_difference_of_two_gaps(gap, expected):
    found = rule("change", scheme="a", against="b", start="512", by=0.02).decide(lengths(gap))
    assert found.verdict == expected
    assert found.estimate == pytest.approx(gap + 0.04)
    # Student's interval with two degrees of freedom and a standard deviation of 0.001.
    assert found.high - found.low == pytest.approx(2 * 4.302653 * 0.001 / math.sqrt(3), rel=1e-5)


def test_a_change_from_an_arm_without_rows_yet_is_not_decided():
    with pytest.raises(NormLabError, match="256"):
        rule("change", scheme="a", against="b", start="256").decide(lengths(0.0))


def test_seeds_that_an_arm_or_a_side_lacks_are_noted():
    rows = dict(lengths(-0.04).rows)
    rows["2048"] += [row("a", 3, 4.0), row("b", 3, 4.0), row("b", 4, 4.0)]
    found = rule("change", scheme="a", against="b", start="512", by=0.02).decide(Evidence(rows))
    assert (found.verdict, found.seeds) == ("reproduced", 3)
    assert found.notes == (
        "b@2048: seed 4 has no partner in a@2048 and is left out",
        "2048: seed 3 has no partner in 512 and is left out",
    )


def test_a_change_needs_another_arm():
    found = rule("change", scheme="a", against="b", start="512", arms=["512"]).decide(lengths(0.0))
    assert (found.verdict, found.notes) == ("open", ("there is no arm besides 512",))


# -- rank --------------------------------------------------------------------------------------------------------------


def test_tau_and_its_chances_are_those_of_all_orders():
    assert (kendall_tau([1, 2, 3]), kendall_tau([3, 2, 1]), kendall_tau([1, 1, 2])) == (1.0, -1.0, pytest.approx(2 / 3))
    # Of the 24 orders of four, 1 has no inversion, 3 have one, 5 have two (Mahonian numbers).
    assert order_p_values([1, 2, 3, 4])[0] == pytest.approx(1 / 24)
    assert order_p_values([2, 1, 3, 4])[0] == pytest.approx(4 / 24)
    assert order_p_values([2, 1, 4, 3])[0] == pytest.approx(9 / 24)
    for values in itertools.permutations([1.0, 2.0, 3.0, 4.0]):
        assert order_p_values(values)[0] == pytest.approx(order_p_values([-v for v in values])[1])


@pytest.mark.parametrize(
    ("means", "expected"), [([1, 2, 3, 4, 5], "reproduced"), ([5, 4, 3, 2, 1], "refuted"), ([2, 1, 4, 3, 5], "open")]
)
def test_rank(means, expected):
    names = [f"s{k}" for k in range(5)]
    values = {name: [mean + seed / 10 for seed in range(3)] for name, mean in zip(names, means, strict=True)}
    found = rule("rank", expected=names).decide(evidence(values))
    # 1/120 for agreement; two exchanged neighbours have (1 + 4 + 9) / 120.
    assert found.verdict == expected
    assert (found.seeds, found.runs) == (3, 15)
    found = rule("rank", expected=names).decide(evidence({**values, "s2": values["s2"][:2]}))
    assert found.notes == ("s2: its mean is without seed 2, which others have",)


def test_a_rank_needs_four_different_schemes_that_all_ran():
    with pytest.raises(NormLabError, match="4 to 8 different schemes"):
        rule("rank", expected=["a", "b", "c"])
    found = rule("rank", expected=["a", "b", "c", "d"]).decide(evidence({"a": [1.0], "b": [2.0], "c": [3.0]}))
    assert (found.verdict, found.notes) == ("open", ("d has no runs",))


# -- rate --------------------------------------------------------------------------------------------------------------


def tuned(arm: str, losses: dict[float, float]) -> dict[str, list[dict]]:
    return {arm: [row("a", 1000, loss, lr=2 * lr, base_lr=lr, role="tune") for lr, loss in losses.items()]}


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ({1e-3: 3.0, 2e-3: 2.0, 4e-3: 3.0}, "reproduced"),
        ({1e-3: 2.4, 1.414e-3: 2.0, 2e-3: 2.1}, "reproduced"),
        ({5e-4: 2.1, 1e-3: 2.0, 2e-3: 2.4}, "refuted"),
        ({2e-3: 2.0, 4e-3: 2.1}, "open"),
        ({5e-4: 2.1, 1e-3: 2.0, 2e-3: 2.003, 4e-3: 2.4}, "open"),
    ],
)
def test_rates_agree_within_a_step(second, expected):
    rows = tuned("small", {1e-3: 3.0, 2e-3: 2.0, 4e-3: 3.0}) | tuned("large", second)
    assert rule("rate", scheme="a").decide(Evidence(rows)).verdict == expected


def test_the_seeds_and_runs_of_a_rate_are_those_that_tuned_it():
    rows = tuned("small", {1e-3: 3.0, 2e-3: 2.0, 4e-3: 3.0}) | tuned("large", {1e-3: 3.0, 2e-3: 2.0, 4e-3: 3.0})
    second = {arm: [{**one, "seed": 1001, "run": one["run"] + "b"} for one in own] for arm, own in rows.items()}
    judged = {arm: [row("a", seed, 1.9, lr=2e-3) for seed in range(5)] for arm in rows}
    found = rule("rate", scheme="a").decide(Evidence({arm: rows[arm] + second[arm] + judged[arm] for arm in rows}))
    assert (found.verdict, found.seeds, found.runs) == ("reproduced", 2, 12)
    assert found.power.startswith("2 seeds for each rate")


def test_seeds_that_disagree_leave_a_rate_open_if_asked():
    """Together both sizes want 2e-3; with seed 1001 alone the larger one wants 4e-3."""
    both = {1e-3: 3.0, 2e-3: 2.0, 4e-3: 2.4, 8e-3: 3.0}
    rows = {arm: tuned(arm, both)[arm] for arm in ("small", "large")}
    other = {"small": both, "large": {1e-3: 3.0, 2e-3: 2.0, 4e-3: 1.9, 8e-3: 3.0}}
    for arm, losses in other.items():
        rows[arm] = rows[arm] + [{**one, "seed": 1001, "run": one["run"] + "b"} for one in tuned(arm, losses)[arm]]
    lax, strict = (rule("rate", scheme="a", each_seed=each).decide(Evidence(rows)) for each in (False, True))
    assert (lax.verdict, strict.verdict) == ("reproduced", "open")
    assert lax.power.endswith("by single seeds it is 1, 2")
    assert "with seed 1001 alone the best rates are a factor of 2 apart" in strict.notes
    for one in rows["large"]:
        one["stuck"] = one["seed"] == 1001
    lost = rule("rate", scheme="a", each_seed=True).decide(Evidence(rows))
    assert (lost.verdict, lost.notes[-1]) == ("open", "seed 1001 trained at no rate in an arm")


def test_a_seed_that_tuned_in_one_arm_alone_is_noted():
    both = {1e-3: 3.0, 2e-3: 2.0, 4e-3: 2.4}
    rows = tuned("small", both) | tuned("large", both)
    rows["large"] += [{**one, "seed": 1001, "run": one["run"] + "b"} for one in rows["large"]]
    found = rule("rate", scheme="a", each_seed=True).decide(Evidence(rows))
    assert found.notes == ("seed 1001 did not tune in every arm: it says nothing alone",)


def test_a_seed_that_does_not_tell_rates_apart_does_not_disagree():
    both = {1e-3: 3.0, 2e-3: 2.0, 4e-3: 2.4}
    rows = tuned("small", both) | tuned("large", both)
    near = {1e-3: 3.0, 2e-3: 2.002, 4e-3: 2.0, 8e-3: 3.0}
    rows["small"] += [{**one, "seed": 1001, "run": one["run"] + "b"} for one in tuned("small", both)["small"]]
    rows["large"] += [{**one, "seed": 1001, "run": one["run"] + "b"} for one in tuned("large", near)["large"]]
    assert rule("rate", scheme="a", each_seed=True).decide(Evidence(rows)).verdict == "reproduced"


def test_a_best_rate_below_one_that_does_not_train_is_named():
    rows = tuned("small", {1e-3: 3.0, 2e-3: 2.0, 4e-3: 3.0}) | tuned("large", {1e-3: 3.0, 2e-3: 2.0, 4e-3: 2.1})
    rows["large"][-1]["stuck"] = True
    found = rule("rate", scheme="a").decide(Evidence(rows))
    assert found.notes == ("large: at 0.004, the next rate above the best, 1 of one run did not train",)


def test_one_size_says_nothing_of_carrying_rates():
    assert rule("rate", scheme="a").decide(Evidence(tuned("small", {1e-3: 2.0, 2e-3: 1.0}))).verdict == "open"


# -- ladders -----------------------------------------------------------------------------------------------------------


def ladder_rows(gap, *, seeds: int = 3, noise: float = 0.001) -> list[dict]:
    """Rows of a ladder of `pre` and `geonorm`; `gap` is a function of parameters and tokens."""
    rows = []
    for (size, (parameters, per_token)), budget, seed in itertools.product(SIZES.items(), BUDGETS, range(seeds)):
        loss = 1.7 + 400 / parameters**0.34 + 500 / budget**0.28 + 0.01 * seed
        for scheme, shift in (("pre", 0.0), ("geonorm", gap(parameters, budget) + noise * (seed - 1))):
            place = {"size": size, "parameters": parameters, "budget": budget, "flops": per_token * budget}
            name = f"{scheme}-{size}-{seed}"
            rows.append(row(
                scheme, seed, loss + shift, **place, trunk=name, planned_steps=budget // 16384, tokens_per_s=1e6,
                loss_books=loss + 2 * shift, run=f"{name}-{budget}", arm="main",
            ))  # fmt: skip
    return rows


@pytest.fixture(scope="module", autouse=True)
def _answers() -> Iterator[None]:
    """A ladder's answer takes a second: several rules ask for the same one."""

    def remembered(rows: Any, **how: Any) -> Any:
        key = repr((rows, sorted(how.items())))
        if key not in known:
            known[key] = answer(rows, **how)
        return known[key]

    known: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "answer", remembered)
        yield


def on_ladder(gap, **how: Any) -> Evidence:
    return Evidence(by_cell({"main": ladder_rows(gap, **how)}))


def test_cells_are_arms_and_tune_runs_are_apart():
    rows = ladder_rows(lambda *_: 0.0)
    tune = [{**rows[0], "role": "tune", "run": "t"}]
    found = by_cell({"main": rows + tune})
    assert sorted(found) == sorted([*(cell_name(s, b) for s in SIZES for b in BUDGETS), "rates,4x256,29.5M"])
    assert {one["arm"] for one in found["8x512,118M"]} == {"8x512,118M"}
    assert len(found["8x512,118M"]) == 6
    assert by_cell({"arm": rows_of({"a": BASE})})["arm"] == [{**one, "arm": "arm"} for one in rows_of({"a": BASE})]
    with pytest.raises(NormLabError, match="one ladder"):
        by_cell({"a": rows, "b": rows})


def test_a_gap_is_the_ladders_own_interval():
    rows = ladder_rows(lambda *_: -0.03)
    found = rule("gap", scheme="geonorm", against="pre", cell="8x512,118M").decide(Evidence(by_cell({"main": rows})))
    own = statistics.answer(judged_rows(rows), baseline="pre", level=0.95).schemes[0].cells[-1].gap
    assert own is not None
    assert (found.estimate, found.low, found.high) == (own.mean, own.low, own.high)
    assert (found.verdict, found.seeds) == ("reproduced", 3)
    on_books = rule("gap", scheme="geonorm", against="pre", cell="8x512,118M", value="loss_books", by=0.05)
    assert on_books.decide(Evidence(by_cell({"main": rows}))).estimate == pytest.approx(-0.06, abs=2e-3)


def test_a_run_on_a_ladder_without_a_partner_is_noted():
    found = Evidence(by_cell({"main": ladder_rows(lambda *_: -0.03)[1:]}))
    note = "geonorm against pre: one run without a partner of the same seed, part of no gap (geonorm at 4x256, "
    at_top = rule("gap", scheme="geonorm", against="pre", cell="8x512,118M").decide(found)
    trend = rule("trend", scheme="geonorm", against="pre", ways=("constant",)).decide(found)
    assert [one.notes[-1][: len(note)] for one in (at_top, trend)] == [note, note]


@parametrize(("gap", "expected"), [(-0.03, "reproduced"), (0.03, "refuted"), (0.0, "open")], quick=[-0.03])
def test_gaps_at_several_cells(gap, expected):
    found = rule("gap", scheme="geonorm", against="pre", cell="8x512,*").decide(on_ladder(lambda *_: gap))
    assert found.verdict == expected
    assert len(found.parts) == 3


def test_gaps_too_large_for_a_fit_are_judged_by_the_seeds_of_their_cell():
    found = on_ladder(lambda *_: -0.5)
    at_top = rule("gap", scheme="geonorm", against="pre", cell="8x512,118M").decide(found)
    # Student's interval with two degrees of freedom and a standard deviation of 0.001.
    half = 4.302653 * 0.001 / math.sqrt(3)
    assert (at_top.verdict, at_top.low, at_top.high) == (
        "reproduced", pytest.approx(-0.5 - half, abs=1e-7), pytest.approx(-0.5 + half, abs=1e-7)
    )  # fmt: skip
    trend = rule("trend", scheme="geonorm", against="pre", ways=["constant"]).decide(found)
    assert trend.verdict == "open"
    assert trend.notes == ("gaps of up to 0.50 nats are too large for the assumptions of a trend or a forecast",)
    within = rule("gap", scheme="geonorm", against="pre", cell="8x512,118M", direction="below", by=0.5).decide(found)
    assert (within.verdict, within.runs_to_decide) == ("open", math.inf)


def test_a_cell_with_a_failure_is_open_and_a_missing_one_too():
    rows = ladder_rows(lambda *_: -0.03)
    lost = [{**one, "state": "failed", "value": None, "loss": None, "diverged": 9}
            if one["run"].startswith("geonorm-8x512-0") else one for one in rows]  # fmt: skip
    found = rule("gap", scheme="geonorm", against="pre", cell="8x512,118M").decide(Evidence(by_cell({"main": lost})))
    assert found.verdict == "open"
    assert "seed 0 of geonorm diverged" in found.notes[0]
    found = rule("gap", scheme="geonorm", against="pre", cell="12x768,*").decide(on_ladder(lambda *_: 0.0))
    assert (found.verdict, found.notes) == ("open", ("no cell 12x768,* on the ladder yet",))
    with pytest.raises(NormLabError, match="peri has no runs on the ladder"):
        rule("gap", scheme="peri", against="pre", cell="8x512,*").decide(on_ladder(lambda *_: 0.0))


def shrinking(_: int, tokens: int) -> float:
    return {BUDGETS[0]: -0.12, BUDGETS[1]: -0.08, BUDGETS[2]: -0.04}[tokens]


@pytest.mark.parametrize(
    ("gap", "ways", "expected"),
    [
        (shrinking, ["shrinks"], "reproduced"),
        (shrinking, ["constant", "grows"], "refuted"),
        (lambda *_: -0.03, ["constant"], "reproduced"),
    ],
)
def test_trend(gap, ways, expected):
    found = rule("trend", scheme="geonorm", against="pre", ways=ways).decide(on_ladder(gap))
    assert found.verdict == expected, found.ours


@pytest.mark.parametrize(
    ("lost", "axis", "open_for"),
    [
        ("8x512-0", "compute", "8x512,118M"),
        ("8x512-0", "tokens", "8x512,118M"),
        ("4x256-0", "sizes", "4x256,118M"),
        ("4x256-0", "tokens", None),
        ("6x384-0", "compute", None),
    ],
)
def test_a_trend_over_less_than_the_axis_is_open(lost, axis, open_for):
    """Where the largest size is stuck, what the smaller ones show is no verdict on a claim up to that size."""
    rows = [
        {**one, "stuck": True} if one["run"].startswith(f"geonorm-{lost}") else one for one in ladder_rows(shrinking)
    ]
    table = {"scheme": "geonorm", "against": "pre", "ways": ["shrinks", "constant"], "axis": axis}
    found = rule("trend", **table).decide(Evidence(by_cell({"main": rows})))
    size = lost.partition("-")[0]
    assert f"{size},29.5M; {size},59M; {size},118M: unreliable: seed 0 of geonorm stuck" in found.notes
    ends = [note for note in found.notes if note.startswith("no gap at")]
    assert ends == ([f"no gap at {open_for}, an end of the ladder"] if open_for else [])
    assert found.verdict == ("open" if open_for else "reproduced"), found.ours


@parametrize(("gap", "expected"), [(-0.03, "reproduced"), (0.03, "refuted"), (0.0, "open")], quick=[-0.03])
def test_a_gain_that_does_not_shrink_is_a_gain(gap, expected):
    found = rule("trend", scheme="geonorm", against="pre", ways=["constant", "grows"], top="below")
    assert found.decide(on_ladder(lambda *_: gap)).verdict == expected


def test_a_scheme_without_runs_at_a_cell_leaves_its_gap_open():
    rows = [one for one in ladder_rows(lambda *_: -0.03) if (one["scheme"], one["size"]) != ("geonorm", "8x512")]
    table = {"scheme": "geonorm", "against": "pre", "cell": "8x512,118M"}
    found = rule("gap", **table).decide(Evidence(by_cell({"main": rows})))
    assert (found.verdict, found.notes) == ("open", ("geonorm has no run at 8x512,118M",))


def test_seeds_that_would_settle_a_gap():
    near, far = (on_ladder(lambda *_, gap=gap: gap, noise=0.01) for gap in (-0.002, -0.01))
    table = {"scheme": "geonorm", "against": "pre", "cell": "8x512,118M"}
    found = rule("gap", **table).decide(far)
    assert found.verdict == "open"
    # One more seed is two more runs at each of nine cells.
    assert (found.runs_to_decide - found.runs) % 18 == 0
    assert found.runs < found.runs_to_decide < math.inf
    # What a size does to one scheme alone is no noise of seeds: more of them do not show a gap of 0.002.
    assert rule("gap", **table).decide(near).runs_to_decide == math.inf
    decided = rule("gap", **table, by=0.05).decide(far)
    assert (decided.verdict, decided.runs_to_decide) == ("refuted", None)


@pytest.mark.full
def test_so_many_seeds_show_the_gap_four_times_out_of_five():
    gap = -0.01
    rows = judged_rows(ladder_rows(lambda *_: gap, noise=0.01))
    fit = GapFit.of(rows, "geonorm", "pre", 0.95)
    top = [place for place in fit.places if place.size == "8x512"][-1:]

    def shown(own: GapFit) -> bool:
        return own.gaps(top)[0].high < 0.0

    more = seeds_to_decide(fit, shown, 100)
    assert not shown(fit)
    seeds = fit.sample.seeds + more
    # New seeds scatter as the estimator found: by budget, and correlated between budgets of a size (one trunk).
    same = fit.sample.groups[:, None] == fit.sample.groups
    sds = fit.sample.noise.sds(fit.sample.tokens)
    covariance = np.outer(sds, sds) * np.where(np.eye(len(same)) > 0, 1.0, same * fit.sample.noise.branch) / seeds
    rng = np.random.default_rng(0)
    # Cholesky: the axes of the default method turn with the last digit where two variances are equal.
    draws = rng.multivariate_normal(np.full(len(seeds), gap), covariance, 400, method="cholesky")
    samples = [replace(fit.sample, means=draw, seeds=seeds) for draw in draws]
    share = np.mean([shown(replace(fit, sample=one)) for one in samples])
    # 400 draws know a share of 0.8 to 0.02; seeds grow by a factor of up to 1.4, which is more than needed.
    assert 0.8 - 3 * 0.02 < share < 0.97
    assert seeds_to_decide(fit, lambda _: False, 100) == math.inf


def test_seeds_without_scatter_are_a_number_or_infinite():
    fit = GapFit.of(judged_rows(ladder_rows(lambda *_: -0.01, noise=0.0)), "geonorm", "pre", 0.95)
    assert seeds_to_decide(fit, lambda own: own.gaps(own.places[-1:])[0].high < 0.0, 100) == 1
    assert seeds_to_decide(fit, lambda own: own.gaps(own.places[-1:])[0].high < -0.02, 100) == math.inf


@pytest.mark.full
def test_seeds_that_would_settle_a_trend():
    table = {"scheme": "geonorm", "against": "pre", "ways": ["constant", "grows"], "top": "below"}
    found = rule("trend", **table).decide(on_ladder(lambda *_: -0.01, noise=0.01))
    assert found.verdict == "open"
    assert found.runs < found.runs_to_decide < math.inf
    found = rule("trend", **table).decide(on_ladder(lambda *_: -0.002, noise=0.01))
    assert (found.verdict, found.runs_to_decide) == ("open", math.inf)


def test_every_rule_says_when_it_holds():
    whole = {
        "difference": {"scheme": "a", "against": "b"}, "change": {"scheme": "a", "against": "b", "start": "x"},
        "order": {"tiers": [["a"], ["b"]]}, "bound": {"scheme": "a", "at_most": 1.0},
        "count": {"scheme": "a", "at_most": 0.0}, "correlation": {"x": "u", "y": "value"},
        "rank": {"expected": list("abcd")}, "gap": {"scheme": "a", "against": "b", "cell": "c"},
        "trend": {"scheme": "a", "against": "b", "ways": ["grows"]}, "rate": {"scheme": "a"},
    }  # fmt: skip
    assert whole.keys() == RULES.keys()
    for kind, table in whole.items():
        made = rule(kind, **table)
        assert "reproduced" in made.sentence or "refuted" in made.sentence
        assert {*made.subjects} <= {*made.schemes}


def test_a_value_from_before_training_counts_whatever_became_of_the_run():
    runs = ((0, 1e-3, "judge"), (1, 1e-3, "judge"), (1000, 1e-3, "tune"), (1000, 2e-3, "tune"))
    rows = [row("a", seed, None, stuck=True, lr=lr, role=role, profiles=[{"grad": 0.001 + 0.0001 * seed}])
            for seed, lr, role in runs]  # fmt: skip
    table = {"scheme": "a", "value": "profiles.0.grad", "at_most": 0.5}
    assert rule("bound", **table).decide(Evidence({"main": rows})).verdict == "open"
    found = rule("bound", **table, at_start=True).decide(Evidence({"main": rows}))
    # Two rates of a seed start from the same weights: one observation.
    assert found.seeds == 3
