"""Plan of a ladder: which runs there are, in which order, and at which learning rates."""

from __future__ import annotations

import math
from typing import Any

import pytest

from normlab.compare.bracket import grid_index
from normlab.errors import NormLabError
from normlab.ladders.plan import LadderPlan
from normlab.ladders.run import LadderRun
from normlab.ladders.rung import path_batch, path_decay
from normlab.ladders.size import Size, Target
from tests.ladders import small
from tests.ladders.small import STEP, configuration, row, trained


def bowl(best: float) -> Any:
    """Loss of a run whose best rate is `best` at every size."""
    return lambda run: 3.0 + 0.1 * math.log2(run.base_lr / best) ** 2


def two_bowls(small: float, larger: float) -> Any:
    """The same with the best rate `small` at 1x8 and `larger` at every other size."""
    return lambda run: bowl(small if str(run.rung.size) == "1x8" else larger)(run)


def test_sizes_and_targets_from_text() -> None:
    assert Size.parse("12x768") == Size(12, 768)
    assert str(Target.parse("16x1024:400M")) == "16x1024:400000000"
    for wrong in ("12", "12x", "x768", "0x768", "12x768x4"):
        with pytest.raises(NormLabError, match="expected depth x width"):
            Size.parse(wrong)
    with pytest.raises(NormLabError, match="expected size:tokens"):
        Target.parse("16x1024")


def test_every_budget_of_a_seed_comes_from_one_trunk() -> None:
    plan = LadderPlan(configuration())
    runs = plan.known_runs([])
    # Three sizes, two seeds, two schemes, each a trunk and a branch.
    assert len(runs) == 3 * 2 * 2 * 2
    trunks = [run for run in runs if run.trunk is None]
    assert {run.config.branches for run in trunks} == {(10 * STEP,)}
    assert {run.tokens for run in trunks} == {20 * STEP}
    branches = [run for run in runs if run.trunk is not None]
    assert {run.tokens for run in branches} == {10 * STEP}
    assert all(run.trunk is not None and run.facts()["trunk"] == run.trunk.name for run in branches)
    assert [plan.dependents(run) for run in trunks] == [[branch] for branch in branches]
    assert not any(plan.dependents(run) for run in branches)
    # Two of ten steps decay; only these are trained.
    assert {run.first_step for run in branches} == {8}
    assert all(math.isclose(run.work, 0.2 * run.facts()["flops"]) for run in branches)


def test_branches_wait_for_their_trunk_and_the_largest_size_for_its_forecast() -> None:
    plan = LadderPlan(configuration())
    first = plan.runnable([])
    assert {run.trunk for run in first} == {None}
    assert {str(run.rung.size) for run in first} == {"1x8", "1x16"}
    after = plan.runnable([row(first[0], 3.0)])
    assert [run.trunk.name for run in after if run.trunk is not None] == [first[0].name]
    rows = trained(plan, lambda run: 3.0)
    assert plan.fitted_have_ended(rows)
    assert not plan.fitted_have_ended(rows[:-1])
    plan.forecasts = dict.fromkeys(plan.config.names, "a hash")
    assert {str(run.rung.size) for run in plan.runnable(rows)} == {"2x16"}
    rows = trained(plan, lambda run: 3.0, rows)
    work = plan.work(rows)
    assert (work.ended, work.done, work.is_open) == (work.runs, pytest.approx(work.whole), False)


def test_a_trunk_that_did_not_train_has_no_branches_to_run() -> None:
    plan = LadderPlan(configuration())
    trunk = plan.runnable([])[0]
    for lost in (row(trunk, None), row(trunk, 3.0, stuck=True), row(trunk, None, diverged=7)):
        assert not [run for run in plan.runnable([lost]) if run.trunk is not None]


def test_rates_are_bracketed_at_two_budgets_and_tested_at_a_middle_size() -> None:
    plan = LadderPlan(configuration(lrs="auto"))
    rows = trained(plan, bowl(4e-3))
    tuned = [entry for entry in rows if entry["role"] == "tune"]
    places = {(entry["size"], entry["budget"]) for entry in tuned}
    assert places == {("1x8", 10 * STEP), ("1x8", 20 * STEP), ("1x16", 10 * STEP)}
    for name, found in plan.rates.found(rows).items():
        assert (name, found.lr, found.verdict) == (name, 4e-3, "confirmed")
        assert [search.end for search in found.searches] == ["interior"] * 3
    judged = {entry["base_lr"] for entry in rows if entry["role"] == "judge"}
    assert judged == {4e-3}


def test_one_rate_serves_all_budgets_of_a_trunk() -> None:
    best = {10 * STEP: 4e-3, 20 * STEP: 2e-3}

    def loss(run: LadderRun) -> float:
        # The larger budget is the steeper one and counts more.
        weight = 1.0 if run.tokens == 10 * STEP else 2.0
        return 3.0 + weight * math.log2(run.base_lr / best[run.tokens]) ** 2

    plan = LadderPlan(configuration(lrs="auto"))
    found = plan.rates.found(trained(plan, loss))["pre"]
    assert [search.pick for search in found.searches[:2]] == [4e-3, 2e-3]
    # 1·(x - 2)² + 2·(x - 1)² over x = log2(rate / 1e-3) is lowest at x = 4/3: of the grid at 1.5, index 3.
    assert found.lr is not None
    assert grid_index(found.lr) == 3


@pytest.mark.parametrize(("best_at_middle", "power"), [(2e-3, -1.0), (1e-3, -1.0), (16e-3, 1.0)])
def test_a_middle_size_that_wants_another_rate_corrects_the_rule(best_at_middle: float, power: float) -> None:
    """By a power of width from -1 to 1: one noisy step goes far beyond the middle size."""

    def loss(run: LadderRun) -> float:
        best = 4e-3 if str(run.rung.size) == "1x8" else best_at_middle
        return 3.0 + 0.1 * math.log2(run.base_lr / best) ** 2

    plan = LadderPlan(configuration(lrs="auto"))
    found = plan.rates.found(trained(plan, loss))["peri"]
    assert (found.verdict, found.lr) == ("corrected", 4e-3)
    assert found.power == pytest.approx(power)
    assert plan.rates.rate_at(found, Size(1, 16)) == pytest.approx(4e-3 * 2**power)
    assert plan.rates.rate_at(found, Size(8, 32)) == pytest.approx(4e-3 * 4**power)


def test_rates_beyond_all_that_were_tried_are_found() -> None:
    """At the middle size the best rate is twice as high; at 1x64 the corrected rule asks for eight times that."""

    plan = LadderPlan(configuration(sizes=("1x8", "1x16", "1x64"), lrs="auto"))
    found = plan.rates.found(trained(plan, two_bowls(4e-3, 8e-3)))["pre"]
    tried = {lr for search in found.searches for lr in search.tried}
    assert max(tried) == 16e-3
    assert plan.rates.sizes_outside(found) == {Size(1, 64): pytest.approx(32e-3)}
    untuned = LadderPlan(configuration())
    assert untuned.rates.sizes_outside(untuned.rates.found([])["pre"]) == {}


def test_a_middle_size_that_is_only_deeper_corrects_the_rule_by_a_power_of_depth() -> None:
    """With the width it could not: the rates that failed the test at the middle size were kept there and above."""
    plan = LadderPlan(configuration(sizes=("1x8", "4x8", "16x8"), lrs="auto"))
    found = plan.rates.found(trained(plan, two_bowls(4e-3, 1e-3)))["pre"]
    assert (found.verdict, found.lr) == ("corrected", 4e-3)
    # Rates next to each other may count as equally good, at both sizes: the smallest power that brings them together.
    assert -1.0 <= found.power < 0.0
    for depth in (4, 16):
        assert plan.rates.rate_at(found, Size(depth, 8)) == pytest.approx(4e-3 * depth**found.power)
    assert 1e-3 <= (plan.rates.rate_at(found, Size(4, 8)) or 0.0) < 4e-3 / math.sqrt(2.0)


def test_rates_that_one_seed_does_not_tell_apart_correct_nothing() -> None:
    """At the middle size twice the rate is better by chance: carried on by a power, it would be 6 times at the top."""

    def loss(run: LadderRun) -> float:
        is_middle = str(run.rung.size) == "1x16"
        lucky = 0.105 if is_middle and run.base_lr == 8e-3 else 0.0
        return bowl(4e-3)(run) - lucky

    plan = LadderPlan(configuration(lrs="auto"))
    found = plan.rates.found(trained(plan, loss))["pre"]
    assert [search.pick for search in found.searches] == [4e-3, 4e-3, 8e-3]
    assert (found.verdict, found.power) == ("confirmed", 0.0)


def test_what_a_budget_changes_is_not_taken_for_what_width_does() -> None:
    """The larger budget wants an eighth of the rate, the test is at the smaller one."""

    def loss(run: LadderRun) -> float:
        best, weight = (8e-3, 1.0) if run.tokens == 10 * STEP else (1e-3, 100.0)
        return 3.0 + weight * math.log2(run.base_lr / best) ** 2

    plan = LadderPlan(configuration(lrs="auto"))
    found = plan.rates.found(trained(plan, loss))["pre"]
    assert found.searches[-1].pick == 8e-3
    assert found.lr is not None
    assert found.lr < 4e-3
    assert found.verdict == "confirmed"


def test_an_edge_pick_is_widened_or_named() -> None:
    auto, listed = LadderPlan(configuration(lrs="auto")), LadderPlan(configuration(lrs=(1e-3, 2e-3)))
    for plan in (auto, listed):
        widened = plan.rates.found(trained(plan, bowl(3.2e-2)))["pre"].searches
        assert {search.end for search in widened} == {"interior"}
        # Beyond 64 times what was tried first nothing is searched.
        named = plan.rates.found(trained(plan, bowl(10.0)))["pre"].searches
        assert "highest" in {search.end for search in named}


def test_what_one_budget_added_to_a_list_is_tried_at_the_other_and_at_the_middle_size() -> None:
    plan = LadderPlan(configuration(lrs=(1e-3, 2e-3)))
    found = plan.rates.found(trained(plan, bowl(8e-3)))["pre"]
    assert found.lr == 8e-3
    assert all(8e-3 in search.tried for search in found.searches)


def test_a_scheme_that_never_trains_has_no_rate_and_stops_nobody() -> None:
    plan = LadderPlan(configuration(lrs="auto", hold_out=False))
    rows = trained(plan, lambda run: None if run.scheme == "peri" else bowl(4e-3)(run))
    assert plan.rates.found(rows)["peri"].lr is None
    assert {entry["scheme"] for entry in rows if entry["role"] == "judge"} == {"pre"}
    assert not plan.is_open(rows)


def test_schemes_of_the_smaller_sizes_alone() -> None:
    plan = LadderPlan(configuration(small_schemes=("peri(step=0.1)",), top_seeds=1))
    plan.forecasts = dict.fromkeys(plan.config.names, "a hash")
    rows = trained(plan, lambda run: 3.0)
    at = {size: {e["scheme"] for e in rows if e["size"] == size} for size in ("1x8", "1x16", "2x16")}
    assert at["1x16"] == {"pre", "peri", "peri(step=0.1)"}
    assert at["2x16"] == {"pre", "peri"}
    assert {entry["seed"] for entry in rows if entry["size"] == "2x16"} == {0}


def test_a_path_has_one_budget_a_size_and_grows_its_batch() -> None:
    config = configuration(tokens_per_parameter=20.0, sizes=("1x8", "2x32", "2x64"), hold_out=False)
    budgets = [rung.budgets for rung in config.rungs]
    assert all(len(own) == 1 for own in budgets)
    for rung in config.rungs:
        assert rung.budgets[0] == round(20.0 * config.parameters(rung.size))
    assert config.rungs[0].batch == small.BATCH < config.rungs[-1].batch
    run = config.run(config.rungs[-1], "pre", config.rungs[-1].budgets[0], 1e-3, 0)
    assert run.lr == pytest.approx(1e-3 * math.sqrt(run.batch / small.BATCH))
    assert not LadderPlan(config).known_runs([])[0].config.branches


def test_what_a_run_forgets_is_the_same_at_every_rung_of_a_path() -> None:
    first, tokens = 8, [10_000, 80_000, 640_000]
    batches = [path_batch(first, one, tokens[0]) for one in tokens]
    assert batches == [8, 16, 32]
    decays = [path_decay(0.1, batch, one, first, tokens[0]) for batch, one in zip(batches, tokens, strict=True)]
    forgotten = [
        math.sqrt(batch / first) * decay * one / batch
        for batch, decay, one in zip(batches, decays, tokens, strict=True)
    ]
    assert forgotten == pytest.approx([forgotten[0]] * 3)


@pytest.mark.parametrize("carry", ["width", "none"])
def test_rates_carried_by_a_rule(carry: str) -> None:
    plan = LadderPlan(configuration(carry=carry))
    found = plan.rates.found([])["pre"]
    own = plan.rates.rate_at(found, Size(2, 16))
    assert own == pytest.approx(1e-2 if carry == "width" else 1e-2 * (1 / 8) ** 0.2)
    run = plan.known_runs([])[-1].config
    assert run.base_dim == (8 if carry == "width" else None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": ("1x8", "1x8")}, "named twice"),
        ({"sizes": ("1x12",), "hold_out": False}, "not a multiple of the head width"),
        ({"sizes": ("1x8",)}, "nothing to forecast"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"budgets": (0,)}, "budget must be positive"),
        ({"baseline": "post"}, "not among the schemes"),
        ({"small_schemes": ("pre",)}, "named twice"),
        ({"carry": "depth"}, "did you mean|expected|unknown"),
        ({"warmup_steps": 1}, "at least 2"),
        ({"rate_budgets": (7,)}, "not among the budgets"),
        ({"lrs": (0.0,)}, "positive and finite"),
        ({"tokens_per_parameter": -1.0}, "must be positive"),
        ({"target": ("big",)}, "expected size:tokens"),
        ({"schemes": ()}, "needs schemes"),
        ({"warmup_steps": 50}, r"steps, fewer than the 50 of the warm-up; try --warmup-steps \d+"),
    ],
)
def test_bad_options_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NormLabError, match=message) as error:
        configuration(**changes)
    assert "\n" not in str(error.value)
