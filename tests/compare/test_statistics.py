"""Statistics against scipy and against what each verdict promises."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from normlab.compare.statistics import (
    SchemeResult,
    Values,
    bonferroni_level,
    find_winner,
    minimum_detectable,
    paired_difference,
    rank_schemes,
    tune_outliers,
)
from normlab.compare.tuning import RateResults
from normlab.errors import NormLabError
from normlab.numerics.student_t import shifted_outside, t_interval, t_outside

# 3-digit losses of two schemes over five seeds, made up once.
A = {1: 4.161, 2: 4.155, 3: 4.172, 4: 4.149, 5: 4.168}
B = {1: 4.112, 2: 4.109, 3: 4.118, 4: 4.107, 5: 4.110}


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.975, 0.99, 0.9999])
def test_quantile_is_scipys(level: float) -> None:
    ours = [t_interval(level, df) for df in range(1, 201)]
    theirs = stats.t.isf((1.0 - level) / 2.0, np.arange(1, 201))
    np.testing.assert_allclose(ours, theirs, rtol=1e-10)


@pytest.mark.parametrize("df", [1, 2, 3, 10, 57, 200, 10_000])
def test_tail_is_scipys(df: int) -> None:
    points = np.array([0.0, 1e-3, 0.1, 1.0, 2.0, 5.0, 30.0])
    np.testing.assert_allclose([t_outside(t, df) for t in points], 2.0 * stats.t.sf(points, df), rtol=1e-10)


def test_tail_and_quantile_at_the_ends() -> None:
    assert t_outside(1e200, 3) == 0.0
    assert t_outside(0.0, 3) == 1.0
    # One degree of freedom is Cauchy's distribution, whose quantile is a tangent; scipy loses digits near 0 there.
    assert t_outside(1e-8, 1) == pytest.approx(1.0 - 2.0 / math.pi * 1e-8, rel=1e-15)
    assert t_interval(0.95, 1) == pytest.approx(math.tan(math.pi * 0.475), rel=1e-12)
    with pytest.raises(NormLabError, match="at least 1"):
        t_interval(0.95, 0)


def test_paired_interval_is_scipys() -> None:
    ours = paired_difference(B, A, level=0.9)
    theirs = stats.ttest_rel(list(B.values()), list(A.values()))
    interval = theirs.confidence_interval(0.9)
    assert (ours.low, ours.high) == pytest.approx((interval.low, interval.high), rel=1e-10)
    assert ours.p == pytest.approx(theirs.pvalue, rel=1e-9)
    assert ours.mean == pytest.approx(np.mean(list(B.values())) - np.mean(list(A.values())))
    assert ours.n == 5
    assert not ours.spans_zero


def test_pairs_follow_seeds_not_order() -> None:
    shuffled = {seed: A[seed] for seed in (4, 1, 5, 3, 2)}
    assert paired_difference(B, shuffled) == paired_difference(B, A)
    assert paired_difference(A, B).mean == -paired_difference(B, A).mean


def test_failed_runs_are_counted_and_left_out_of_the_pairs() -> None:
    broken = B | {2: None, 3: math.nan, 4: math.inf, 9: 1.0}
    difference = paired_difference(broken, A)
    assert (difference.n, difference.failed_a, difference.failed_b) == (2, 3, 0)
    assert difference.mean == pytest.approx(((B[1] - A[1]) + (B[5] - A[5])) / 2)


def test_one_pair_makes_no_claim() -> None:
    difference = paired_difference({1: 2.0}, {1: 3.0})
    assert difference.mean == -1.0
    assert (difference.low, difference.high, difference.sd, difference.p) == (None, None, None, None)
    assert difference.spans_zero


@pytest.mark.parametrize(("a", "b"), [({}, {}), ({1: 1.0}, {2: 1.0}), ({1: math.nan}, {1: 1.0})])
def test_no_pair_is_an_error(a: dict[int, float], b: dict[int, float]) -> None:
    with pytest.raises(NormLabError, match="no seed finished in both"):
        paired_difference(a, b)


def test_equal_runs_and_constant_differences() -> None:
    assert paired_difference(A, A).p == 1.0
    assert paired_difference(A, A).spans_zero
    shifted = paired_difference({1: 1.5, 2: 2.5}, {1: 1.0, 2: 2.0})
    # Pairs that happen to differ by the same number say nothing of the next one.
    assert (shifted.mean, shifted.sd, shifted.low, shifted.high, shifted.p) == (0.5, 0.0, None, None, None)
    assert shifted.spans_zero


def test_accuracies_that_differ_by_the_same_number_show_no_difference() -> None:
    values = {"pre": {1: 0.88, 2: 0.89}, "peri": {1: 0.90, 2: 0.91}, "post": {1: 0.58, 2: 0.69}}
    rows = [row | {"metric": "accuracy"} for scheme, own in values.items() for row in tuned(scheme, own)]
    found = {own.scheme: own for own in rank_schemes(rows, "pre")}
    assert found["peri"].verdict == "no difference shown"
    assert found["peri"].difference is not None
    assert found["peri"].difference.low is None


@pytest.mark.parametrize("level", [0.0, 1.0, 95, -1, math.nan])
def test_a_level_is_a_probability(level: float) -> None:
    with pytest.raises(NormLabError, match="between 0 and 1"):
        paired_difference(A, B, level)


@pytest.mark.parametrize("df", [1, 2, 4, 30, 500])
def test_shifted_tail_is_scipys(df: int) -> None:
    for shift in (0.0, 0.5, 3.0, 6.0):
        theirs = stats.nct.sf(2.5, df, shift) + stats.nct.cdf(-2.5, df, shift)
        assert shifted_outside(2.5, shift, df) == pytest.approx(theirs, rel=1e-8)


@pytest.mark.parametrize("n", [3, 5, 20])
@pytest.mark.parametrize("power", [0.3, 0.8, 0.95])
def test_minimum_detectable_has_its_power(n: int, power: float) -> None:
    shift = minimum_detectable(n, sd=0.02, power=power) / 0.02 * math.sqrt(n)
    critical = stats.t.isf(0.025, n - 1)
    reached = stats.nct.sf(critical, n - 1, shift) + stats.nct.cdf(-critical, n - 1, shift)
    assert reached == pytest.approx(power, abs=1e-8)


def test_minimum_detectable_at_its_ends() -> None:
    assert minimum_detectable(1, 0.1) == math.inf
    assert minimum_detectable(5, 0.0) == 0.0
    for wrong in ({"sd": -1.0}, {"sd": math.nan}, {"sd": 1.0, "power": 1.0}, {"sd": 1.0, "power": 0.01}):
        with pytest.raises(NormLabError):
            minimum_detectable(5, **wrong)


def runs(scheme: str, role: str, lr: float, values: Values) -> list[dict[str, Any]]:
    return [
        {"scheme": scheme, "label": scheme, "role": role, "lr": lr, "seed": seed, "value": value,
         "state": "done" if value is not None else "failed"}
        for seed, value in values.items()
    ]  # fmt: skip


def tuned(scheme: str, judge: Values, lr: float = 2e-3) -> list[dict[str, Any]]:
    """A scheme whose tune runs pick the middle of three rates, and its judge runs there."""
    grid = {lr / 2: 5.0, lr: 4.5, lr * 2: 4.8}
    tune = [row for rate, value in grid.items() for row in runs(scheme, "tune", rate, {101: value, 102: value})]
    return tune + runs(scheme, "judge", lr, judge)


def standing(rows: list[dict[str, Any]], scheme: str) -> SchemeResult:
    return next(own for own in rank_schemes(rows, "pre") if own.scheme == scheme)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ({seed: value - 0.05 - 0.001 * seed for seed, value in A.items()}, "better"),
        ({seed: value + 0.05 + 0.001 * seed for seed, value in A.items()}, "worse"),
        ({seed: value - 0.05 for seed, value in A.items()}, "no difference shown"),
        ({1: 4.3, 2: 4.0, 3: 4.2, 4: 4.1, 5: 4.2}, "no difference shown"),
        ({1: 4.0}, "one seed"),
        ({seed: value - 0.05 for seed, value in A.items()} | {3: None}, "unreliable"),
        (dict.fromkeys(A), "failed"),
        ({7: 4.0, 8: 4.0}, "no pairs"),
        ({}, "not judged"),
    ],
)
def test_every_verdict(values: dict[int, float | None], verdict: str) -> None:
    own = standing(tuned("pre", A) + tuned("new", values), "new")
    assert own.verdict == verdict
    assert own.lr == 2e-3
    assert own.failed == sum(value is None for value in values.values())


def test_the_baseline_stands_in_the_ranking_and_the_lowest_mean_leads() -> None:
    found = rank_schemes(tuned("pre", A) + tuned("new", B) + tuned("none", {1: None}), "pre")
    assert [(own.scheme, own.verdict) for own in found] == [("new", "better"), ("pre", "baseline"), ("none", "failed")]
    assert found[1].difference is None


def test_a_judge_run_that_failed_never_leads() -> None:
    found = rank_schemes(tuned("pre", A) + tuned("new", B | {1: None}), "pre")
    assert [own.scheme for own in found] == ["pre", "new"]
    assert found[1].difference is not None
    assert found[1].difference.failed_a == 1


def test_done_without_a_number_counts_as_failed() -> None:
    rows = tuned("pre", A) + tuned("new", B | {1: math.nan})
    assert standing(rows, "new").verdict == "unreliable"


def test_the_rate_is_picked_on_tune_rows_alone() -> None:
    rows = runs("pre", "tune", 1e-3, {101: 4.0, 102: 4.2}) + runs("pre", "tune", 2e-3, {101: 4.1, 102: 4.3})
    # Judged alone, the larger rate would look better.
    rows += runs("pre", "judge", 1e-3, {1: 4.5, 2: 4.5}) + runs("pre", "judge", 2e-3, {1: 3.0, 2: 3.0})
    own = standing(rows, "pre")
    assert (own.lr, own.mean, own.edge) == (1e-3, 4.5, "smallest")


def test_a_rate_as_good_as_an_end_of_the_grid_is_flagged() -> None:
    """Accuracies are counts: two rates may have the same one, and the lower rate is picked."""
    tuned = {1e-3: 3.2, 2e-3: 3.0, 4e-3: 3.0}
    rows = [one for lr, value in tuned.items() for one in runs("pre", "tune", lr, {101: value})]
    own = standing(rows, "pre")
    assert (own.lr, own.edge, own.edge_words) == (2e-3, "largest", "as good as the largest tried")


def test_of_two_equal_ends_the_picked_one_is_named() -> None:
    rows = [one for lr in (1e-3, 4e-3) for one in runs("pre", "tune", lr, {101: 3.0})]
    own = standing([*rows, *runs("pre", "tune", 2e-3, {101: 3.2})], "pre")
    assert (own.lr, own.edge, own.edge_words) == (1e-3, "smallest", "the smallest tried")


def test_equal_results_are_equal_in_any_order_of_seeds() -> None:
    values = (0.1, 0.2, 0.3)
    rows = runs("pre", "tune", 2e-3, dict(zip((101, 102, 103), values, strict=True)))
    rows += runs("pre", "tune", 4e-3, dict(zip((101, 102, 103), values[::-1], strict=True)))
    rows += runs("pre", "tune", 1e-3, dict.fromkeys((101, 102, 103), 0.9))
    own = standing(rows, "pre")
    assert (own.lr, own.edge) == (2e-3, "largest")
    assert len({results.score(own.metric) for lr, results in own.tune.items() if lr > 1e-3}) == 1


@pytest.mark.parametrize(("best", "edge"), [(1e-3, "smallest"), (2e-3, None), (4e-3, "largest")])
def test_an_end_of_the_grid_is_flagged(best: float, edge: str | None) -> None:
    rows = [row for lr in (1e-3, 2e-3, 4e-3) for row in runs("pre", "tune", lr, {101: 4.0 + (lr != best)})]
    assert standing(rows, "pre").edge == edge


def test_a_rate_that_broke_once_loses_to_one_that_held() -> None:
    rows = runs("pre", "tune", 1e-3, {101: 4.5, 102: 4.5}) + runs("pre", "tune", 2e-3, {101: 4.0, 102: None})
    own = standing(rows, "pre")
    assert (own.lr, {lr: at_rate.lost for lr, at_rate in own.tune.items()}) == (1e-3, {1e-3: 0, 2e-3: 1})


def test_a_rate_that_lacks_seeds_cannot_be_picked_yet() -> None:
    rows = runs("pre", "tune", 1e-3, {101: 4.5, 102: 4.5}) + runs("pre", "tune", 2e-3, {101: 4.0})
    assert standing(rows, "pre").lr == 1e-3


def test_tune_runs_that_all_failed() -> None:
    own = standing(runs("pre", "tune", 1e-3, {101: None}) + runs("pre", "tune", 2e-3, {101: None}), "pre")
    assert (own.lr, own.verdict, [at_rate.lost for at_rate in own.tune.values()]) == (None, "failed", [1, 1])


def test_without_tune_rows_a_single_rate_is_judged_and_several_are_not() -> None:
    single = runs("pre", "judge", 1e-3, A)
    assert standing(single, "pre").verdict == "baseline"
    assert standing(single + runs("pre", "judge", 2e-3, A), "pre").verdict == "not judged"


@pytest.mark.parametrize("n", [2, 3, 5, 9])
def test_a_tune_run_is_an_outsider_where_scipys_prediction_interval_ends(n: int) -> None:
    judged = np.random.default_rng(n).normal(4.0, 0.01, size=n).tolist()
    mean, spread = float(np.mean(judged)), float(np.std(judged, ddof=1))
    half = float(stats.t.isf(0.0005, n - 1)) * spread * math.sqrt(1 + 1 / n)
    for shift, expected in ((0.999, False), (1.001, True), (-0.999, False), (-1.001, True)):
        own = SchemeResult(
            scheme="post", label="post", verdict="worse", values=dict(enumerate(judged)), lr=1e-3,
            tune={1e-3: RateResults({1000: mean + shift * half, 1001: mean, 1002: None})},
        )  # fmt: skip
        assert tune_outliers(own) == ([mean + shift * half] if expected else [])


@pytest.mark.parametrize("values", [{}, {0: 4.0}, {0: 4.0, 1: None}, {0: 4.0, 1: 4.0}])
def test_without_a_spread_there_are_no_outsiders(values: dict[int, float | None]) -> None:
    tune = {1e-3: RateResults({1000: 7.0})}
    own = SchemeResult(scheme="post", label="post", verdict="worse", values=values, lr=1e-3, tune=tune)
    assert tune_outliers(own) == []


def test_a_standing_knows_what_picked_its_rate() -> None:
    rows = runs("pre", "tune", 1e-3, {101: 4.0, 102: 4.2}) + runs("pre", "tune", 2e-3, {101: 4.1, 102: None})
    assert standing(rows, "pre").tuned == {101: 4.0, 102: 4.2}


def test_a_seed_that_tuned_may_not_judge() -> None:
    rows = runs("pre", "tune", 1e-3, {1: 4.0}) + runs("pre", "judge", 1e-3, {1: 4.0, 2: 4.0})
    with pytest.raises(NormLabError, match="seed 1 both picked"):
        rank_schemes(rows, "pre")


def test_an_unknown_baseline_is_named() -> None:
    with pytest.raises(NormLabError, match="did you mean 'pre'"):
        rank_schemes(tuned("pre", A), "pree")


def test_intervals_widen_with_the_number_of_schemes() -> None:
    one = standing(tuned("pre", A) + tuned("new", B), "new").difference
    rows = tuned("pre", A) + tuned("new", B) + tuned("other", A) + tuned("none", {1: None})
    three = standing(rows, "new").difference
    assert one is not None
    assert three is not None
    assert one.level == 0.95
    assert three.level == bonferroni_level(0.95, 4) == pytest.approx(1 - 0.05 / 3)
    interval = stats.ttest_rel(list(B.values()), list(A.values())).confidence_interval(1 - 0.05 / 3)
    assert (three.low, three.high) == pytest.approx((interval.low, interval.high))


def test_a_winner_must_beat_everyone() -> None:
    close = {seed: value + 0.004 * (-1) ** seed for seed, value in B.items()}
    alone = rank_schemes(tuned("pre", A) + tuned("new", B), "pre")
    tied = rank_schemes(tuned("pre", A) + tuned("new", B) + tuned("near", close), "pre")
    found = find_winner(alone)
    assert found is not None
    assert found.scheme == "new"
    assert [own.verdict for own in tied].count("better") == 2
    assert find_winner(tied) is None
    assert find_winner(rank_schemes(tuned("pre", A), "pre")) is None


@pytest.mark.full
def test_joint_coverage_and_false_winners_hold_their_level() -> None:
    """Equal schemes: some interval misses zero in at most 10 % of comparisons, and fewer name a winner."""
    generator = np.random.default_rng(0)
    trials, missed, named = 400, 0, 0
    for _ in range(trials):
        noise = generator.normal(size=(4, 4))
        rows = [
            row
            for scheme, line in zip(("pre", "a", "b", "c"), noise, strict=True)
            for row in runs(scheme, "judge", 1e-3, dict(enumerate(line.tolist())))
        ]
        found = rank_schemes(rows, "pre", level=0.9)
        missed += any(own.verdict in ("better", "worse") for own in found)
        named += find_winner(found, level=0.9) is not None
    # Three standard errors of a share of 0.1 in 400 trials.
    assert missed / trials < 0.1 + 3 * math.sqrt(0.09 / trials)
    assert named / trials < 0.05 + 3 * math.sqrt(0.0475 / trials)
