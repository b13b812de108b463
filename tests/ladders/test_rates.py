"""Rates next to ones that do not train: chosen only if further seeds train, too."""

from __future__ import annotations

from collections.abc import Callable

from normlab.ladders.config import TUNE_SEED
from normlab.ladders.plan import LadderPlan
from normlab.ladders.run import LadderRun
from tests.ladders.small import STEP, configuration, trained
from tests.ladders.test_plan import bowl

Loss = Callable[[LadderRun], float | None]


def cliff(lost: Callable[[LadderRun], bool]) -> Loss:
    """Larger rates are better up to 1.6e-2; None for runs that are lost."""
    return lambda run: None if lost(run) else bowl(1.6e-2)(run)


def confirming(plan: LadderPlan, loss: Loss, scheme: str = "pre") -> list[tuple[str, int, float, int]]:
    """Size, budget, rate and seed of a scheme's confirming runs, in the order of their rows."""
    rows = [row for row in trained(plan, loss) if row["role"] == "confirm" and row["scheme"] == scheme]
    return [(row["size"], row["budget"], row["base_lr"], row["seed"]) for row in rows]


def test_without_a_loss_next_to_the_best_rate_nothing_is_confirmed() -> None:
    plan = LadderPlan(configuration(lrs="auto"))
    assert confirming(plan, bowl(4e-3)) == []


def test_a_rate_next_to_a_loss_is_confirmed_at_the_smallest_budget_of_both_sizes() -> None:
    plan = LadderPlan(configuration(lrs="auto"))
    loss = cliff(lambda run: run.base_lr > 4e-3)
    seeds = (TUNE_SEED + 1, TUNE_SEED + 2)
    assert confirming(plan, loss) == [(size, 10 * STEP, 4e-3, seed) for size in ("1x8", "1x16") for seed in seeds]
    found = plan.rates.found(trained(plan, loss))["pre"]
    assert (found.lr, found.verdict) == (4e-3, "confirmed")


def test_a_rate_that_trains_by_luck_is_passed_over_for_the_next_that_is_sure() -> None:
    """As SpanNorm at 6x384: at 4e-3 one seed of three trains, and is the best of all runs."""
    plan = LadderPlan(configuration(lrs="auto"))
    loss = cliff(lambda run: run.base_lr > 4e-3 or (run.base_lr == 4e-3 and run.config.seed != TUNE_SEED))
    rows = trained(plan, loss)
    found = plan.rates.found(rows)["pre"]
    assert found.lr == 2.83e-3
    small, _, test = found.searches
    assert [small.has_failed(lr) for lr in (2.83e-3, 4e-3)] == [False, True]
    assert small.pick == test.pick == 2.83e-3
    # One seed more at 4e-3 is enough to give it up; both seeds train at the rate below.
    assert [run[2] for run in confirming(plan, loss)] == [4e-3, 2.83e-3, 2.83e-3] * 2
    assert {row["base_lr"] for row in rows if row["role"] == "judge" and row["scheme"] == "pre"} == {2.83e-3}


def test_a_loss_at_the_middle_size_alone_lowers_the_rates_of_larger_ones() -> None:
    plan = LadderPlan(configuration(lrs="auto"))

    def lost(run: LadderRun) -> bool:
        at_middle = str(run.rung.size) == "1x16"
        return run.base_lr > (2e-3 if at_middle else 8e-3)

    found = plan.rates.found(trained(plan, cliff(lost)))["pre"]
    assert (found.lr, found.verdict) == (8e-3, "corrected")
    assert found.power == -1.0


def test_confirming_runs_are_known_while_the_search_goes_on() -> None:
    plan = LadderPlan(configuration(lrs="auto"))
    rows = trained(plan, cliff(lambda run: run.base_lr > 4e-3))
    before = [row for row in rows if row["role"] == "tune" and row["size"] == "1x8"]
    due = [run for run in plan.runnable(before) if run.scheme == "pre"]
    assert [(run.role, run.base_lr, run.config.seed) for run in due] == [("confirm", 4e-3, TUNE_SEED + 1)]
    assert plan.is_open(before)


def test_one_lucky_run_does_not_choose_the_rate_of_all_budgets() -> None:
    """The best rate is 4e-3 at both budgets; one run at 5.66e-3 is 0.1 below what its rate gives."""
    plan = LadderPlan(configuration(lrs="auto"))

    def loss(run: LadderRun) -> float | None:
        is_lucky = run.role == "tune" and run.tokens == 10 * STEP and run.base_lr == 5.66e-3
        own = bowl(4e-3)(run)
        return None if own is None else own - 0.1 * is_lucky

    found = plan.rates.found(trained(plan, loss))["pre"]
    assert found.searches[0].pick == 5.66e-3
    assert found.lr == 4e-3
