"""Which runs there are, and which can start: from the configuration and the rows alone."""

from __future__ import annotations

from typing import Any

import pytest

from normlab.compare.plan import Plan, PlannedRun
from normlab.compare.statistics import rank_schemes
from tests.compare import small


def plan(**changes: Any) -> Plan:
    known = {"schemes": ("pre", "post", "peri"), "lrs": (1e-3, 2e-3), "seeds": 3, "tune_seeds": 2}
    return Plan(small.configuration("text", **(known | changes)))


def row(run: PlannedRun, value: float | None) -> dict[str, Any]:
    return {
        "run": run.name, "scheme": run.scheme, "label": run.scheme, "lr": run.config.lr, "seed": run.config.seed,
        "role": run.role, "state": "failed" if value is None else "done", "value": value,
    }  # fmt: skip


def test_tune_runs_are_schemes_times_rates_times_seeds() -> None:
    tune = plan().tune()
    assert len({run.name for run in tune}) == len(tune) == 3 * 2 * 2
    assert {run.role for run in tune} == {"tune"}
    assert {run.config.seed for run in tune} == {1000, 1001}


def test_nothing_is_judged_before_its_rate_is_known() -> None:
    it = plan()
    assert it.runnable([]) == it.tune()
    # All of post's tune runs but one, in which the lower rate is better.
    post = [run for run in it.tune() if run.scheme == "post"]
    rows = [row(run, run.config.lr) for run in post]
    assert {run.role for run in it.runnable(rows[:-1])} == {"tune"}
    judge = [run for run in it.runnable(rows) if run.role == "judge"]
    assert [(run.scheme, run.config.lr, run.config.seed) for run in judge] == [("post", 1e-3, s) for s in range(3)]


def test_seeds_that_pick_and_seeds_that_judge_are_disjoint_and_shared_by_all_schemes() -> None:
    it = plan(seeds=1000, tune_seeds=3)
    tune = {run.config.seed for run in it.tune()}
    judge = {scheme: {run.config.seed for run in it.judge(scheme, 1e-3)} for scheme in ("pre", "post")}
    assert not tune & judge["pre"]
    assert judge["pre"] == judge["post"]


def test_each_scheme_is_judged_at_the_rate_that_the_ranking_names() -> None:
    it = plan()
    best = {"pre": 2e-3, "post": 1e-3, "peri": 2e-3}
    rows = [row(run, 2.0 - (run.config.lr == best[run.scheme]) + run.config.seed / 1e5) for run in it.tune()]
    assert it.rates(rows) == best
    rows += [row(run, 1.0) for run in it.runnable(rows)]
    assert {own.scheme: own.lr for own in rank_schemes(rows, "pre")} == best
    assert it.runnable(rows) == []
    assert (it.size(rows), it.left(rows)) == (12 + 9, 0)


def test_judge_runs_go_seed_by_seed() -> None:
    it = plan()
    rows = [row(run, 1.0) for run in it.tune()]
    assert [run.config.seed for run in it.runnable(rows)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_one_rate_needs_no_tuning() -> None:
    it = plan(lrs=(5e-3,))
    assert it.tune() == []
    assert {(run.role, run.config.lr) for run in it.runnable([])} == {("judge", 5e-3)}
    assert it.size([]) == it.left([]) == 9


def test_a_scheme_whose_rates_all_fail_is_not_judged_and_does_not_hold_up_the_others() -> None:
    it = plan()
    rows = [row(run, None if run.scheme == "post" else 1.0) for run in it.tune()]
    assert {run.scheme for run in it.runnable(rows)} == {"pre", "peri"}
    assert it.size(rows) == 12 + 6
    assert it.left(rows) == 6


def test_a_rate_that_fails_once_gives_way_to_one_that_does_not() -> None:
    it = plan()
    rows = [row(run, None if (run.config.lr, run.config.seed) == (2e-3, 1001) else -run.config.lr) for run in it.tune()]
    assert set(it.rates(rows).values()) == {1e-3}


def test_more_rates_can_change_the_pick() -> None:
    before, after = plan(tune_seeds=1), plan(tune_seeds=1, lrs=(1e-3, 2e-3, 4e-3))
    rows = [row(run, -run.config.lr) for run in before.tune()]
    rows += [row(run, 0.0) for run in before.runnable(rows)]
    assert before.left(rows) == 0
    due = after.runnable(rows)
    assert {(run.role, run.config.lr) for run in due} == {("tune", 4e-3)}
    rows += [row(run, -run.config.lr) for run in due]
    assert {(run.role, run.config.lr) for run in after.runnable(rows)} == {("judge", 4e-3)}
    assert after.left(rows) == 9


@pytest.mark.parametrize("seeds", [2, 5])
def test_more_seeds_add_runs_and_change_none(seeds: int) -> None:
    before, after = plan(seeds=2), plan(seeds=seeds)
    assert [run.name for run in after.judge("pre", 1e-3)[:2]] == [run.name for run in before.judge("pre", 1e-3)]
    assert len(after.judge("pre", 1e-3)) == seeds
