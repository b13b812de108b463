"""Plans whose rates are searched: the next runs follow from the rows alone, for every scheme in the same way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from normlab.compare.plan import Plan, PlannedRun
from normlab.compare.statistics import rank_schemes
from tests.compare import small
from tests.compare.test_plan import row

Rows = list[dict[str, Any]]
BEST = {"pre": 4e-3, "post": 1.1e-3, "peri": 3e-2}


def plan(**changes: Any) -> Plan:
    known = {"schemes": ("pre", "post", "peri"), "lrs": "auto", "seeds": 2}
    return Plan(small.configuration("text", **(known | changes)))


def valley(run: PlannedRun) -> dict[str, Any]:
    """Losses whose best rate is another one for each scheme."""
    distance = math.log(run.config.lr / BEST[run.scheme])
    return row(run, 3.0 + distance**2 + run.config.seed / 1e6)


def carry_out(it: Plan, do: Callable[[PlannedRun], dict[str, Any]] = valley) -> Rows:
    rows: Rows = []
    while due := it.runnable(rows):
        rows.append(do(due[0]))
    return rows


def test_every_scheme_starts_with_the_same_three_rates() -> None:
    it = plan()
    # Two blocks of width 16: 1e-3 (85M / 6144)^0.2 = 6.7e-3, rounded to 1e-3 times a power of 2.
    expected = [(scheme, lr) for scheme in BEST for lr in (4e-3, 8e-3, 1.6e-2)]
    assert [(run.scheme, run.config.lr) for run in it.runnable([])] == expected
    assert it.config.to_dict()["lrs"] == "auto"


def test_the_size_that_a_rate_is_carried_over_from_sets_the_start() -> None:
    wide = {"base_dim": 16, "model": small.DecoderConfig(depth=2, dim=256, heads=32)}
    assert plan(of_base=wide).config.first_rates == plan().config.first_rates
    deep = {"base_depth": 2, "model": small.DecoderConfig(depth=64, dim=16, heads=2)}
    assert plan(of_base=deep).config.first_rates == plan().config.first_rates


def test_each_scheme_is_judged_at_a_rate_inside_those_that_it_was_tried_with() -> None:
    it = plan()
    rows = carry_out(it)
    for own in rank_schemes(rows, "pre"):
        tried = list(own.tune)
        assert own.edge is None
        assert own.lr is not None
        assert abs(math.log2(own.lr / BEST[own.scheme])) < 0.26
        assert min(tried) < own.lr < max(tried)
        assert it.rates(rows)[own.scheme] == own.lr
    assert (it.left(rows), it.is_open(rows)) == (0, False)
    assert it.size(rows) == len(rows)


def test_a_list_is_widened_before_anything_is_judged_at_an_end_of_it() -> None:
    """Judged at an end, a scheme would be judged again at the next rate."""
    listed = (4e-3, 5.66e-3, 8e-3)
    fixed, widened = (plan(lrs=listed, widen_rates=widen) for widen in (False, True))
    assert widened.runnable([]) == fixed.runnable([])
    assert [own.edge for own in rank_schemes(carry_out(fixed), "pre")].count(None) == 0
    rows = carry_out(widened)
    for own in rank_schemes(rows, "pre"):
        assert own.edge is None
        assert own.lr is not None
        assert abs(math.log2(own.lr / BEST[own.scheme])) < 0.26
        assert widened.rates(rows)[own.scheme] == own.lr
    assert len([one for one in rows if one["role"] == "judge"]) == 2 * len(BEST)
    tried = sorted({one["lr"] for one in rows if one["scheme"] == "pre"})
    assert tried == [2.83e-3, 4e-3, 5.66e-3, 8e-3]
    assert (widened.left(rows), widened.is_open(rows), widened.size(rows)) == (0, False, len(rows))
    assert widened.is_open(rows[:3])


def test_rates_of_all_schemes_come_from_one_grid() -> None:
    tried = {one["lr"] for one in carry_out(plan()) if one["role"] == "tune"}
    steps = [2.0 * math.log2(lr / 1e-3) for lr in tried]
    assert all(abs(step - round(step)) < 0.01 for step in steps)


def test_the_order_in_which_runs_end_changes_nothing() -> None:
    forwards = carry_out(plan())
    backwards: Rows = []
    it = plan()
    while due := it.runnable(backwards):
        backwards.append(valley(due[-1]))
    assert {one["run"] for one in forwards} == {one["run"] for one in backwards}
    assert it.rates(backwards) == it.rates(forwards)


def test_a_plan_made_anew_from_the_rows_so_far_goes_on_with_the_same_runs() -> None:
    it, rows = plan(), []
    while due := it.runnable(rows):
        assert [run.name for run in plan().runnable(rows)] == [run.name for run in due]
        rows.append(valley(due[0]))


def test_the_size_is_a_lower_bound_until_every_rate_is_known() -> None:
    it, rows, sizes = plan(), [], []
    while due := it.runnable(rows):
        sizes.append(it.size(rows))
        assert it.left(rows) == sizes[-1] - len(rows)
        assert it.is_open(rows) == (len(it.rates(rows)) < 3)
        rows.append(valley(due[0]))
    assert sizes == sorted(sizes)
    assert sizes[0] == 9 + 6
    assert sizes[-1] == len(rows)


def test_tune_seeds_all_count() -> None:
    it = plan(tune_seeds=2)
    assert len(it.runnable([])) == 3 * 3 * 2
    # Half of the seeds say nothing yet.
    first = [valley(run) for run in it.runnable([]) if run.config.seed == 1000]
    assert {run.config.seed for run in it.runnable(first)} == {1001}
    rows = carry_out(it)
    assert {len(own.tuned) for own in rank_schemes(rows, "pre")} == {2}


def test_runs_that_fail_or_are_stuck_are_worse_than_any_loss() -> None:
    def do(run: PlannedRun) -> dict[str, Any]:
        high = run.config.lr > 3e-3 and run.role == "tune"
        return valley(run) | ({"state": "failed", "value": None} if run.scheme == "pre" and high else {}) | (
            {"stuck": True} if run.scheme == "peri" and high else {}
        )  # fmt: skip

    it = plan()
    rows = carry_out(it, do)
    rates = it.rates(rows)
    # The best of those that train, with one that does not above it.
    assert (rates["pre"], rates["peri"]) == (2.83e-3, 2.83e-3)
    assert {own.scheme: own.edge for own in rank_schemes(rows, "pre")} == dict.fromkeys(BEST)


def test_a_scheme_that_never_trains_ends_at_the_limits_and_is_not_judged() -> None:
    it = plan()
    rows = carry_out(it, lambda run: valley(run) | ({"state": "failed", "value": None} if run.scheme == "pre" else {}))
    tried = [one["lr"] for one in rows if one["scheme"] == "pre"]
    assert len(tried) == 9
    assert it.rates(rows)["pre"] is None
    assert (it.left(rows), it.is_open(rows)) == (0, False)


def test_an_interrupted_run_has_not_ended() -> None:
    it = plan()
    first = it.runnable([])[0]
    rows = [row(first, None) | {"state": "interrupted"}]
    assert first.name in {run.name for run in it.runnable(rows)}
    assert it.left(rows) == it.left([])
