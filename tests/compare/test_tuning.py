"""Runs that are stuck or interrupted: what they mean for the rate, the mean, the difference and the verdict."""

from __future__ import annotations

import math
from typing import Any

import pytest

from normlab.compare.bracket import Score
from normlab.compare.statistics import SchemeResult, find_winner, minimum_detectable, rank_schemes
from normlab.compare.tuning import RateResults, group_by_rate, pick_rate
from normlab.train.metrics import ACCURACY, LOSS

PRE = {0: 4.0, 1: 4.2, 2: 4.1, 3: 4.3}


def row(scheme: str, role: str, lr: float, seed: int, value: float | None, **more: Any) -> dict[str, Any]:
    known = {"scheme": scheme, "label": scheme, "role": role, "lr": lr, "seed": seed, "value": value}
    return known | {"state": "done" if value is not None else "failed"} | more


def judged(scheme: str, values: dict[int, float | None], stuck: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Judge runs at one rate; old rows have no field `stuck`."""
    return [
        row(scheme, "judge", 1e-3, seed, value, **({"stuck": True} if seed in stuck else {}))
        for seed, value in values.items()
    ]


def lower(by: float = 0.05) -> dict[int, float | None]:
    """Pre's results less about so much."""
    return {seed: value - by + 0.001 * (-1) ** seed for seed, value in PRE.items()}


def standing(rows: list[dict[str, Any]], scheme: str = "new") -> SchemeResult:
    return next(own for own in rank_schemes(rows, "pre") if own.scheme == scheme)


def test_a_stuck_run_is_counted_and_never_averaged() -> None:
    own = standing(judged("pre", {**PRE}) + judged("new", {**lower(), 2: 6.96}, stuck=(2,)))
    assert own.stuck == {2: 6.96}
    assert (own.lost, own.failed) == (1, 0)
    assert own.mean == pytest.approx((lower()[0] + lower()[1] + lower()[3]) / 3)  # type: ignore[operator]
    assert own.difference is not None
    assert (own.difference.n, own.difference.mean) == (3, pytest.approx(-0.05, abs=0.001))


def test_a_scheme_with_a_stuck_judge_run_is_not_called_better_and_does_not_win() -> None:
    whole = judged("pre", {**PRE}) + judged("new", lower())
    assert standing(whole).verdict == "better"
    stuck = judged("pre", {**PRE}) + judged("new", {**lower(), 2: 6.96}, stuck=(2,))
    found = rank_schemes(stuck, "pre")
    assert [(own.scheme, own.verdict) for own in found] == [("pre", "baseline"), ("new", "unreliable")]
    assert find_winner(found) is None


def test_a_scheme_whose_judge_runs_are_all_stuck_says_so() -> None:
    own = standing(judged("pre", {**PRE}) + judged("new", dict.fromkeys(PRE, 6.96), stuck=(0, 1, 2, 3)))
    assert (own.verdict, own.mean, own.difference) == ("stuck", None, None)
    assert len(own.stuck) == 4


def test_seeds_with_which_the_baseline_is_stuck_make_no_pair() -> None:
    rows = judged("pre", {**PRE, 1: 6.96}, stuck=(1,)) + judged("new", lower())
    own = standing(rows)
    assert own.difference is not None
    assert (own.difference.n, own.difference.failed_b) == (3, 1)
    assert standing(rows, "pre").mean == pytest.approx((4.0 + 4.1 + 4.3) / 3)


def test_what_could_be_shown_is_not_spoilt_by_a_stuck_run() -> None:
    whole = standing(judged("pre", {**PRE}) + judged("new", lower()))
    stuck = standing(judged("pre", {**PRE}) + judged("new", {**lower(), 2: 6.96}, stuck=(2,)))
    assert whole.detectable is not None
    assert stuck.detectable is not None
    assert stuck.difference is not None
    assert stuck.difference.sd is not None
    assert stuck.detectable == minimum_detectable(3, stuck.difference.sd, 0.95)
    # Counted as a result, 6.96 would have made this about 7.
    assert stuck.detectable < 0.02
    assert standing(judged("pre", {**PRE}) + judged("new", {0: 4.0})).detectable is None


def test_a_rate_with_a_stuck_run_ranks_below_every_other() -> None:
    rows = [row("new", "tune", 1e-3, 1000, 4.5), row("new", "tune", 2e-3, 1000, 4.0, stuck=True)]
    rows += [row("new", "tune", 5e-4, 1000, 9.0)]
    tune = group_by_rate(rows, "tune")
    assert pick_rate(tune, LOSS) == 1e-3
    assert tune[2e-3] == RateResults({1000: None}, {1000: 4.0})
    assert tune[2e-3].score(LOSS) == Score(1, math.inf)
    assert tune[1e-3].score(LOSS) == Score(0, 4.5)
    assert standing(rows + judged("pre", {**PRE})).tune[2e-3].stuck == {1000: 4.0}


def test_scores_of_accuracies_fall_as_they_rise() -> None:
    rows = [row("new", "tune", 1e-3, seed, value) for seed, value in ((1000, 0.5), (1001, 0.7), (1002, None))]
    assert group_by_rate(rows, "tune")[1e-3].score(ACCURACY) == Score(1, pytest.approx(-0.6))


def test_a_run_that_was_stopped_because_it_was_stuck_is_stuck_and_not_failed() -> None:
    rows = judged("pre", {**PRE}) + judged("new", {**lower(), 2: None}, stuck=(2,))
    own = standing(rows)
    assert (own.stuck, own.failed, own.lost, own.verdict) == ({2: None}, 0, 1, "unreliable")
    stopped = [row("new", "tune", lr, 1000, None, stuck=True) for lr in (1e-3, 2e-3)]
    assert pick_rate(group_by_rate(stopped, "tune"), LOSS) == 1e-3
    assert group_by_rate(stopped, "tune")[1e-3].score(LOSS) == Score(1, math.inf)


def test_where_every_rate_is_stuck_the_one_that_came_furthest_is_judged() -> None:
    losses = {5e-4: 6.95, 1e-3: 6.90, 2e-3: 6.97}
    rows = [row("new", "tune", lr, 1000, value, stuck=True) for lr, value in losses.items()]
    rows.append(row("new", "tune", 4e-3, 1000, None))
    assert pick_rate(group_by_rate(rows, "tune"), LOSS) == 1e-3
    # One seed that trains beats all that do not.
    rows.append(row("new", "tune", 2.5e-4, 1000, 9.0))
    assert pick_rate(group_by_rate(rows, "tune"), LOSS) == 2.5e-4


def test_an_interrupted_run_is_charged_to_nobody() -> None:
    killed = {"state": "interrupted", "value": None}
    rows = judged("pre", {**PRE}) + judged("new", lower())
    rows = [one | killed if (one["scheme"], one["seed"]) == ("new", 1) else one for one in rows]
    rows.append(row("new", "tune", 1e-3, 1000, None, state="interrupted"))
    own = standing(rows)
    assert (own.verdict, own.interrupted, own.failed) == ("better", 2, 0)
    assert not any(at_rate.lost for at_rate in own.tune.values())
    assert list(own.values) == [0, 2, 3]
