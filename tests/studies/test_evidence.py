"""What a rule may take for a result: seeds, repeats, runs that failed, were killed or have no number."""

from __future__ import annotations

import math

import pytest

from normlab.errors import NormLabError
from normlab.studies.evidence import Evidence
from normlab.studies.exact import correlation_interval
from normlab.studies.finding import Finding
from normlab.studies.rules import read_rule
from tests.studies.rows import evidence, row, rows_of


def decide(kind: str, found: Evidence, **table) -> Finding:
    return read_rule({"kind": kind, **table}, "a test").decide(found)


def repeats(scheme: str, values: list[float | None], **more) -> dict:
    return {"scheme": scheme, "seed": 0, "state": "done", "arm": "main", "times": values} | more


# -- seeds and repeats -----------------------------------------------------------------------------------------------


def test_failed_rows_of_one_seed_are_counted_once_each():
    failed = [row("a", 0, None, run=f"a-{k}", reason="RuntimeError: no memory") for k in range(2)]
    found = Evidence({"main": [*failed, row("a", 1, 4.0)]}).sample("a", "main", "value")
    assert found.problems == ["a: 2 of 3 runs failed (RuntimeError: no memory)", "a: several rows have seed 0"]


def test_rows_of_one_seed_leave_a_claim_open():
    """Which of them is paired with another scheme's would be chance."""
    twice = [row("a", 0, 1.0, run="first"), row("a", 0, 9.0, run="second")]
    found = decide("bound", Evidence({"main": twice}), scheme="a", at_least=8.0, exact=True)
    assert found.verdict == "open"
    assert "a: several rows have seed 0" in found.notes
    assert (found.low, found.high) == (1.0, 9.0)


def test_a_missing_number_is_that_of_a_run_that_ended_well():
    rows = [row("a", 0, None), row("a", 1, 4.0, h=2.0), row("a", 2, 4.0)]
    found = Evidence({"main": rows}).sample("a", "main", "h")
    assert found.problems == ["a: 1 of 3 runs failed", "a: one run has no h"]


def test_repeats_and_seeds_do_not_share_a_name():
    rows = [repeats("a", [1.0, 2.0], seed=1), repeats("a", [7.0], seed=1000), repeats("a", [8.0], seed=1001)]
    found = Evidence({"main": rows}).sample("a", "main", "times")
    assert sorted(found.finished.values()) == [1.0, 2.0, 7.0, 8.0]


def test_a_repeat_without_a_number_is_named():
    found = Evidence({"main": [repeats("a", [1.0, None, 3.0])]}).sample("a", "main", "times")
    assert found.problems == ["a: one repeat has no times"]
    assert list(found.finished.values()) == [1.0, 3.0]


def test_repeats_are_not_called_seeds():
    rows = [repeats("a", [1.0, 1.1, 0.9]), repeats("b", [2.0, 2.1, 1.8])]
    found = Evidence({"main": rows, "other": rows})
    cases = {
        "difference": {"scheme": "a", "against": "b", "value": "times", "arms": ["main"]},
        "change": {"scheme": "a", "against": "b", "value": "times", "start": "other"},
        "order": {"tiers": [["a"], ["b"]], "value": "times", "arms": ["main"]},
    }
    for kind, table in cases.items():
        decided = decide(kind, found, **table)
        assert decided.seeds == 0, kind
        assert "seed" not in decided.ours + decided.power, kind
    assert decide("difference", found, **cases["difference"]).ours.endswith("3 repeats")


# -- killed runs -----------------------------------------------------------------------------------------------------


def test_killed_runs_count_for_nothing():
    killed = row("a", 7, None, state="interrupted")
    found = Evidence({"main": [*rows_of({"a": [4.0] * 5}), killed]})
    counted = decide("count", found, scheme="a", at_most=0.0)
    assert (counted.verdict, counted.runs) == ("reproduced", 5)
    bound = decide("bound", found, scheme="a", at_most=4.5, exact=True)
    assert (bound.verdict, bound.runs) == ("reproduced", 5)
    assert "a: one run was interrupted and is left out" in bound.notes


# -- ratios ----------------------------------------------------------------------------------------------------------


def test_a_value_without_a_ratio_is_a_problem():
    found = decide("bound", evidence({"a": [2.0, 0.0, -3.0], "b": [1.0] * 3}), scheme="a", against="b", at_least=1.5,
                   exact=True)  # fmt: skip
    assert (found.verdict, found.runs) == ("open", 1)
    assert "2 of 3 ratios of a to b do not exist: value is not positive" in found.notes
    none = decide("bound", evidence({"a": [-1.0], "b": [1.0]}), scheme="a", against="b", at_least=1.5)
    assert none.verdict == "open"
    assert "1 of 1 ratios of a to b do not exist: value is not positive" in none.notes


# -- ranks -----------------------------------------------------------------------------------------------------------


def test_intervals_of_rank_correlations_have_fiellers_variance():
    """Fieller, Hartley and Pearson (1957): var z = 1.06 / (n - 3)."""
    low, high = correlation_interval(0.3, 20, 0.95, of_ranks=True)
    half = 1.959964 * math.sqrt(1.06 / 20)
    assert math.atanh(high) - math.atanh(0.3) == pytest.approx(half, rel=1e-6)
    assert math.atanh(0.3) - math.atanh(low) == pytest.approx(half, rel=1e-6)
    rows = [row("a", k, float(k % 7), spread=float(k)) for k in range(23)]
    power = decide("correlation", Evidence({"main": rows}), x="spread", ranks=True).power
    assert f"of {math.tanh((1.959964 + 0.841621) * math.sqrt(1.06 / 20)):.2f} would" in power
    assert f"of {math.tanh((1.959964 + 0.841621) * math.sqrt(1.00 / 20)):.2f} would" not in power


# -- arms given with a scheme ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        ("change", {"scheme": "a@x", "against": "b", "start": "y"}),
        ("count", {"scheme": "a@x", "at_most": 0.0}),
        ("count", {"scheme": "a", "less_than": "b@x"}),
        ("correlation", {"x": "u", "only": ["a@x"]}),
        ("gap", {"scheme": "a@x", "against": "b", "cell": "c"}),
        ("trend", {"scheme": "a", "against": "b@x", "ways": ["grows"]}),
        ("rate", {"scheme": "a@x"}),
    ],
)
def test_rules_of_arms_by_pattern_refuse_an_arm_with_a_scheme(kind, table):
    with pytest.raises(NormLabError, match=f"[ab]@x.*{kind}.*arms = ") as error:
        read_rule({"kind": kind, **table}, "x.toml, rule")
    assert "\n" not in str(error.value)


def test_other_rules_take_an_arm_with_a_scheme():
    for kind, table in (("bound", {"scheme": "a@x", "at_most": 1.0}), ("order", {"tiers": [["a@x"], ["a@y"]]})):
        assert read_rule({"kind": kind, **table}, "x.toml, rule").schemes[0] == "a@x"
