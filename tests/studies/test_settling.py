"""What it would take to settle an open claim: numbers of runs by simulation and by hand, and their text."""

from __future__ import annotations

import math

import numpy as np
import pytest

from normlab.compare.statistics import paired_difference
from normlab.studies.evidence import Evidence
from normlab.studies.exact import fisher_exact, share_bounds
from normlab.studies.finding import Finding, combine_findings
from normlab.studies.rules import read_rule
from normlab.studies.settling import MOST_RUNS, counts_to_decide, pairs_to_decide, settling_text
from tests.studies.rows import evidence, row

NOISE = (0.02, -0.02, 0.01, -0.01)


def found_with(values, **rule) -> Finding:
    return read_rule(rule, "a test").decide(evidence(values))


def four(mean: float) -> dict[str, list[float | None]]:
    """Four pairs of two schemes whose differences have this mean, and the scatter of NOISE."""
    return {"a": [4.0 + mean + extra for extra in NOISE], "b": [4.0] * 4}


def test_so_many_pairs_show_the_difference_four_times_out_of_five():
    found = paired_difference(dict(enumerate(four(0.01)["a"])), dict.fromkeys(range(4), 4.0))
    pairs = pairs_to_decide(found, 0.0)
    assert pairs is not None
    draws = np.random.default_rng(0).normal(found.mean, found.sd, (2000, int(pairs)))

    def share(n: int) -> float:
        zeros = dict.fromkeys(range(n), 0.0)
        intervals = (paired_difference(dict(enumerate(draw[:n])), zeros) for draw in draws)
        return float(np.mean([not one.spans_zero for one in intervals]))

    # 2,000 draws know a share of 0.8 to 0.009; numbers of pairs grow by steps of one below 20.
    assert share(int(pairs)) > 0.8 - 3 * 0.009
    assert share(int(pairs) - 2) < 0.8


def test_the_nearest_end_of_a_range_counts():
    found = paired_difference(dict(enumerate(four(0.01)["a"])), dict.fromkeys(range(4), 4.0))
    assert pairs_to_decide(found, -1.0, 0.0) == pairs_to_decide(found, 0.0, None)
    assert pairs_to_decide(found, found.mean) == math.inf
    assert pairs_to_decide(found, None, None) is None
    alike = paired_difference({0: 1.0, 1: 1.0}, {0: 0.0, 1: 0.0})
    assert pairs_to_decide(alike, 0.0) is None


def test_counts_that_would_decide():
    def decided(a: tuple[int, int], b: tuple[int, int]) -> bool:
        return fisher_exact(b, a) < 0.05

    runs = counts_to_decide([(0, 12), (2, 12)], decided)
    assert runs % 2 == 0

    def share(n: int) -> float:
        """How often 20,000 drawn counts of n runs, none against a true share of 2/12, are decided."""
        draws = np.random.default_rng(0).binomial(n, 2 / 12, 20_000)
        counts, often = np.unique(draws, return_counts=True)
        return sum(o for k, o in zip(counts.tolist(), often.tolist(), strict=True) if decided((0, n), (k, n))) / 20_000

    # 20,000 draws know a share of 0.8 to 0.003. Numbers of runs grow by steps of two at 40.
    assert share(int(runs) // 2) > 0.79
    assert share(int(runs) // 2 - 3) < 0.81
    assert counts_to_decide([(0, 12), (0, 12)], decided) == math.inf


def test_many_runs_of_one_scheme_and_near_shares_take_no_time():
    def decided(a: tuple[int, int], b: tuple[int, int]) -> bool:
        return fisher_exact(b, a) < 0.05 or fisher_exact(a, b) < 0.05

    assert counts_to_decide([(1, 3), (30, 80)], decided) == math.inf
    assert counts_to_decide([(10, 30), (12, 30)], decided) == math.inf
    assert counts_to_decide([(10, 2000), (1900, 2000)], decided) == math.inf


def test_a_share_near_its_bound_takes_many_runs_to_decide():
    def decided(count: tuple[int, int]) -> bool:
        return share_bounds(*count, 0.95)[0] > 0.4

    # 8 of 12 is a share of 0.67: the lower bound is above 0.4 with ten of 15 runs, but only three times out of five.
    assert decided((10, 15))
    assert counts_to_decide([(8, 12)], decided) == pytest.approx(27, abs=2)


@pytest.mark.parametrize("kind", ["difference", "bound", "order"])
def test_a_wider_gap_takes_fewer_runs(kind):
    tables = {
        "difference": {"scheme": "a", "against": "b"},
        "bound": {"scheme": "a", "against": "b", "at_most": 1.0},
        "order": {"tiers": [["a"], ["b"]]},
    }
    near, far = (found_with(four(mean), kind=kind, **tables[kind]) for mean in (-0.005, -0.01))
    assert near.verdict == far.verdict == "open"
    assert near.runs_to_decide > far.runs_to_decide > far.runs == 8


def test_an_order_is_refuted_by_one_pair_and_reproduced_by_all():
    values = {**four(-0.01), "c": [4.0 + 0.002 + extra for extra in reversed(NOISE)]}
    one, both = ({"kind": "order", "tiers": [["a"], tier]} for tier in (["b"], ["b", "c"]))
    assert found_with(values, **both).runs_to_decide / 12 > found_with(values, **one).runs_to_decide / 8
    # b is the other way round: its pair alone would refute the order.
    contrary = {"kind": "order", "tiers": [["b"], ["a", "c"]]}
    assert found_with(values, **contrary).runs_to_decide < math.inf


def test_a_correlation_needs_the_points_of_fishers_formula():
    x = np.random.default_rng(1).normal(size=(2, 20))
    runs = [
        row("a", seed, float(y), x=float(v)) for seed, (v, y) in enumerate(zip(x[0], 0.3 * x[0] + x[1], strict=True))
    ]
    rule = read_rule({"kind": "correlation", "x": "x"}, "a test")
    found = rule.decide(Evidence({"main": runs}))
    assert found.estimate is not None
    # Quantiles of 1.960 and 0.842 for an interval of 95 % and a chance of 0.8.
    assert found.runs_to_decide == pytest.approx((2.8016 / math.atanh(found.estimate)) ** 2 + 3, rel=1e-3)


@pytest.mark.parametrize(("slope", "least"), [(1.0, 0.5), (0.1, 1.0)])
def test_a_perfect_correlation_or_bound_has_no_number_of_points(slope, least):
    noise = [0.0] * 8 if slope == 1.0 else [1.0, -1.0] * 4
    runs = [row("a", seed, slope * seed + noise[seed], x=float(seed)) for seed in range(8)]
    found = read_rule({"kind": "correlation", "x": "x", "at_least": least}, "a test").decide(Evidence({"main": runs}))
    assert found.runs_to_decide == math.inf


def test_more_runs_do_not_mend_a_rate_at_the_edge_or_a_failed_run():
    values = four(-0.01)
    values["a"][0] = None
    failed = found_with(values, kind="difference", scheme="a", against="b")
    assert failed.verdict == "open"
    assert failed.runs_to_decide == math.inf
    assert settling_text(failed, []) == f"not by up to {MOST_RUNS} runs of each scheme like these"


def test_parts_that_are_decided_need_no_more_runs():
    done, undecided = Finding(verdict="reproduced", runs=6), Finding(verdict="open", runs=6, runs_to_decide=10.0)
    assert combine_findings([done, undecided]).runs_to_decide == 16
    unknown = Finding(verdict="open", runs=6)
    assert combine_findings([done, unknown]).runs_to_decide is None
    assert settling_text(unknown, []) == ""


def test_text_names_runs_time_and_device():
    found = Finding(verdict="open", runs=6, runs_to_decide=9.5)
    rows = [row("a", seed, 4.0, seconds=seconds, device="H200") for seed, seconds in enumerate((50.0, 60.0, 600.0))]
    assert settling_text(found, rows) == "about 4 more runs (16 minutes on H200), if means and scatter stay as they are"
    assert settling_text(found, []) == "about 4 more runs, if means and scatter stay as they are"
    assert settling_text(Finding(verdict="refuted", runs=6, runs_to_decide=9.0), rows) == ""
