"""Every rule: reproduced, refuted and open by numbers worked out by hand, and no failure averaged in silence."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from normlab.compare.statistics import minimum_detectable, paired_difference
from normlab.errors import NormLabError
from normlab.studies.evidence import Evidence
from normlab.studies.exact import at_least, correlation_interval, fisher_exact, pearson, rank_values, share_bounds
from normlab.studies.finding import Finding, interval_verdict
from normlab.studies.rules import read_rule
from normlab.studies.values import row_number, row_numbers
from tests.studies.rows import evidence, row, rows_of

BASE = [4.0, 4.1, 3.9]


def shifted(by: float, noise=(0.001, -0.001, 0.0)) -> list[float]:
    return [value + by + extra for value, extra in zip(BASE, noise, strict=True)]


def rule(kind: str, **table):
    return read_rule({"kind": kind, **table}, "a test")


def verdict(kind: str, found: Evidence, **table) -> str:
    return rule(kind, **table).decide(found).verdict


# -- difference ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("by", "expected"), [(-0.1, "reproduced"), (0.1, "refuted"), (0.0, "open")])
def test_difference(by, expected):
    found = evidence({"a": shifted(by), "b": BASE})
    assert verdict("difference", found, scheme="a", against="b") == expected
    mirrored = {"reproduced": "refuted", "refuted": "reproduced", "open": "open"}[expected]
    assert verdict("difference", found, scheme="a", against="b", direction="above") == mirrored


def test_a_difference_is_the_paired_interval_against_the_threshold():
    found = rule("difference", scheme="a", against="b", by=0.05).decide(evidence({"a": shifted(-0.1), "b": BASE}))
    expected = paired_difference(dict(enumerate(shifted(-0.1))), dict(enumerate(BASE)), 0.95)
    assert (found.estimate, found.low, found.high) == (expected.mean, expected.low, expected.high)
    assert found.claimed == (None, -0.05)
    assert found.seeds == 3
    assert "would be shown four times out of five" in found.power
    # -0.1 ± 0.0025 is below -0.05, above -0.2, and neither side of -0.1.
    pairs = {"a": shifted(-0.1), "b": BASE}
    thresholds = {0.05: "reproduced", 0.2: "refuted", 0.1: "open"}
    for by, expected in thresholds.items():
        assert verdict("difference", evidence(pairs), scheme="a", against="b", by=by) == expected


def test_within():
    options = {"scheme": "a", "against": "b", "direction": "within", "by": 0.05}
    assert verdict("difference", evidence({"a": shifted(0.01), "b": BASE}), **options) == "reproduced"
    assert verdict("difference", evidence({"a": shifted(0.10), "b": BASE}), **options) == "refuted"
    assert verdict("difference", evidence({"a": shifted(0.05), "b": BASE}), **options) == "open"


@pytest.mark.parametrize("spoilt", [{"diverged": 7}, {"stuck": True}, {}])
def test_a_failure_leaves_a_difference_open_and_is_named(spoilt):
    rows = rows_of({"a": shifted(-0.5), "b": BASE})
    bad = row("a", 3, 6.9 if spoilt.get("stuck") else None, **spoilt)
    found = rule("difference", scheme="a", against="b").decide(Evidence({"main": [*rows, bad, row("b", 3, 4.0)]}))
    assert found.verdict == "open"
    assert any("a: 1 of 4 runs" in note for note in found.notes)


def test_seeds_of_one_side_alone_are_noted():
    short = evidence({"a": [*shifted(-0.1), 2.0, 2.0], "b": BASE})
    found = rule("difference", scheme="a", against="b").decide(short)
    # Of five seeds two have no pair: the interval is that of three, and says of which.
    assert (found.verdict, found.seeds, found.estimate) == ("reproduced", 3, pytest.approx(-0.1))
    assert found.notes == ("a: seeds 3 and 4 have no partner in b and are left out",)
    ordered = rule("order", tiers=[["b"], ["a"]]).decide(short)
    assert found.notes[0] in ordered.notes
    ratio = rule("bound", scheme="b", against="a", at_least=1.0).decide(short)
    assert ratio.notes == found.notes
    assert rule("difference", scheme="a", against="b").decide(evidence({"a": shifted(-0.1), "b": BASE})).notes == ()


def test_notes_name_their_arm_where_there_are_several():
    short = evidence({"a": [*shifted(-0.1), 2.0], "b": BASE}).rows["main"]
    found = Evidence({"wide": short, "deep": evidence({"a": shifted(-0.1), "b": BASE}).rows["main"]})
    told = ("wide: a: seed 3 has no partner in b and is left out",)
    assert rule("difference", scheme="a", against="b").decide(found).notes == told
    assert told[0] in rule("order", tiers=[["a"], ["b"]]).decide(found).notes
    assert rule("bound", scheme="a", against="b", at_most=1.0).decide(found).notes == told


def test_one_divisor_of_all_seeds_is_noted():
    found = rule("bound", scheme="a", against="b", at_least=1.0).decide(evidence({"a": [2.0, 2.1, 1.9], "b": [1.0]}))
    assert found.verdict == "reproduced"
    assert found.notes == ("b: its one seed divides all 3 of a",)
    (one, other) = evidence({"a": [2.0], "b": [1.0]}).rows["main"]
    apart = Evidence({"main": [one, {**other, "seed": 5}]})
    found = rule("bound", scheme="a", against="b", at_least=1.0, exact=True).decide(apart)
    assert (found.verdict, found.notes) == ("reproduced", ("b: its one seed divides another of a",))


def test_one_seed_is_open():
    assert verdict("difference", evidence({"a": [3.0], "b": [4.0]}), scheme="a", against="b") == "open"


def tuned(losses: dict[float, float], **options) -> Finding:
    """The finding on a scheme whose tune runs had these losses by rate, and which was judged at 2e-3."""
    tune = [row("a", 1000, value, lr=lr, role="tune") for lr, value in losses.items()]
    judge = [row | {"size": 1.0 + 0.01 * row["seed"]} for row in rows_of({"a": shifted(-0.1)}, lr=2e-3)]
    other = rows_of({"b": BASE}, size=2.0)
    return rule("difference", scheme="a", against="b", **options).decide(Evidence({"main": tune + judge + other}))


def test_the_rate_is_the_one_that_was_picked():
    assert tuned({1e-3: 5.0, 2e-3: 3.0, 4e-3: 4.0}).verdict == "reproduced"


def test_a_rate_that_is_not_bracketed_leaves_a_claim_on_losses_open():
    found = tuned({1e-3: 5.0, 2e-3: 3.0})
    assert (found.verdict, found.estimate) == ("open", pytest.approx(-0.1))
    assert "the best rate of a is the largest tried (0.002): add a larger one to lrs" in found.notes
    # What is no loss is shown at the best of the rates tried, and that it is the last one is told.
    found = tuned({1e-3: 5.0, 2e-3: 3.0}, value="size")
    assert found.verdict == "reproduced"
    assert any("largest tried" in note for note in found.notes)


def test_a_rate_below_one_that_did_not_train_is_noted():
    rows = [row("a", 1000, loss, lr=lr, role="tune") for lr, loss in ((1e-3, 4.0), (2e-3, 3.0), (4e-3, None))]
    rows += rows_of({"a": [3.0, 3.1, 3.2]}, lr=2e-3) + rows_of({"b": [4.0, 4.2, 4.1]})
    found = rule("difference", scheme="a", against="b").decide(Evidence({"main": rows}))
    assert found.verdict == "reproduced"
    assert "a: at 0.004, the next rate above the best, 1 of one run did not train" in found.notes


def test_every_arm_must_agree_and_intervals_are_widened():
    arms = {"short": rows_of({"a": shifted(-0.1), "b": BASE}), "long": rows_of({"a": shifted(0.1), "b": BASE})}
    assert verdict("difference", Evidence(arms), scheme="a", against="b") == "refuted"
    assert verdict("difference", Evidence(arms), scheme="a", against="b", arms=["sh*"]) == "reproduced"
    twice = Evidence({"one": arms["short"], "two": arms["short"]})
    found = rule("difference", scheme="a", against="b").decide(twice)
    expected = paired_difference(dict(enumerate(shifted(-0.1))), dict(enumerate(BASE)), 0.975)
    assert found.verdict == "reproduced"
    assert [part.low for part in found.parts] == [expected.low] * 2


def test_schemes_of_two_arms():
    found = Evidence({"decay": rows_of({"a": BASE}), "none": rows_of({"a": shifted(0.5)})})
    assert verdict("difference", found, scheme="a@none", against="a@decay", direction="above", arms=["none"]) == (
        "reproduced"
    )


# -- order -----------------------------------------------------------------------------------------------------------


def test_order():
    found = evidence({"a": shifted(-0.4), "b": shifted(-0.2, (0.002, 0.0, -0.002)), "c": BASE})
    assert verdict("order", found, tiers=[["a"], ["b"], ["c"]]) == "reproduced"
    assert verdict("order", found, tiers=[["a"], ["c"], ["b"]]) == "refuted"
    assert verdict("order", found, tiers=[["a"], ["c", "b"]]) == "reproduced"
    assert verdict("order", found, tiers=[["c"], ["b"], ["a"]], better="higher") == "reproduced"


def test_order_states_its_power_as_a_range_over_pairs():
    values = {"a": BASE, "b": shifted(0.1), "c": shifted(0.1, noise=(0.02, -0.02, 0.0))}
    text = rule("order", tiers=[["a"], ["b", "c"]]).decide(evidence(values)).power
    pairs = [paired_difference(dict(enumerate(BASE)), dict(enumerate(values[name])), 0.975) for name in ("b", "c")]
    ends = [f"{minimum_detectable(3, pair.sd, 0.975):.2g}" for pair in pairs]
    assert text == f"true differences of {ends[0]} to {ends[1]}, by pair, would be shown four times out of five"
    assert rule("order", tiers=[["a"], ["b"]]).decide(evidence(values)).power.startswith("true differences of 0.0")


def test_order_is_open_where_neighbours_are_alike():
    found = evidence({"a": shifted(-0.4), "b": shifted(0.0, (0.01, -0.01, 0.0)), "c": BASE})
    assert verdict("order", found, tiers=[["a"], ["b"], ["c"]]) == "open"
    assert verdict("order", found, tiers=[["b"], ["c"], ["a"]]) == "refuted"


# -- bound -----------------------------------------------------------------------------------------------------------


def test_bound():
    found = evidence({"a": [1.0, 1.1, 0.9]}, peak_bytes=5)
    # Mean 1, deviation 0.1, t(0.95, 2) = 4.303: ± 0.248.
    for limit, expected in ((1.25, "reproduced"), (1.2, "open"), (0.75, "refuted")):
        assert verdict("bound", found, scheme="a", at_most=limit) == expected
    assert verdict("bound", found, scheme="a", at_least=0.75) == "reproduced"
    assert verdict("bound", found, scheme="a", value="peak_bytes", at_most=5.0, exact=True) == "reproduced"
    assert verdict("bound", found, scheme="a", value="peak_bytes", at_most=4.0, exact=True) == "refuted"
    assert verdict("bound", found, scheme="a", value="nothing", at_most=4.0) == "open"


def test_a_ratio_is_geometric():
    found = rule("bound", scheme="a", against="b", at_most=3.0).decide(evidence({"a": [2.0, 8.0], "b": [1.0, 2.0]}))
    assert found.estimate == pytest.approx(math.sqrt(2.0 * 4.0))
    found = evidence({"a": [2.0, 2.02, 1.98], "b": [1.0, 1.0, 1.0]})
    assert verdict("bound", found, scheme="a", against="b", at_least=1.9, at_most=2.1) == "reproduced"


def test_a_positive_number_may_be_decided_by_its_logarithm():
    values: dict[str, list[float | None]] = {"a": [1.84, 0.71, 1.37]}
    plain, logged = (rule("bound", scheme="a", at_most=0.01, logarithm=log).decide(evidence(values))
                     for log in (False, True))  # fmt: skip
    assert plain.low < 0.0
    assert (plain.verdict, logged.verdict) == ("open", "refuted")
    logs = np.log(values["a"])
    half = 4.302653 * logs.std(ddof=1) / math.sqrt(3)
    assert (logged.low, logged.high) == pytest.approx(tuple(np.exp([logs.mean() - half, logs.mean() + half])), rel=1e-5)
    zero = rule("bound", scheme="a", at_most=0.01, logarithm=True).decide(evidence({"a": [0.0, 0.1, 0.2]}))
    assert zero.verdict == "open"
    assert "1 of 3 numbers of a are not positive: they have no logarithm" in zero.notes
    with pytest.raises(NormLabError, match="the bound of a logarithm or a ratio is positive"):
        rule("bound", scheme="a", at_most=0.0, logarithm=True)
    with pytest.raises(NormLabError, match="exact has no interval"):
        rule("bound", scheme="a", at_most=1.0, logarithm=True, exact=True)


def test_repeats_of_a_benchmark_are_observations():
    made = {"seed": 0, "state": "done", "arm": "main"}
    found = Evidence({"main": [{**made, "scheme": "a", "paired": [0.99, 0.995, 0.985, 0.991]}]})
    decided = rule("bound", scheme="a", value="paired", at_least=0.98).decide(found)
    assert (decided.verdict, decided.runs, decided.seeds) == ("reproduced", 4, 0)
    assert decided.ours.endswith("4 repeats")


# -- count -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("events", "runs"), list(product((0, 1, 3, 7), (7, 12))))
def test_bounds_of_a_share_are_exact(events, runs):
    low, high = share_bounds(events, runs, 0.95)
    # Clopper and Pearson: at each end what was seen, or more extreme, has probability 1 - level.
    assert events == 0 or at_least(events, runs, low) == pytest.approx(0.05)
    assert events == runs or 1.0 - at_least(events + 1, runs, high) == pytest.approx(0.05)
    assert 0.0 <= low <= events / runs <= high <= 1.0


def test_never():
    for runs, expected in ((3, "open"), (5, "reproduced")):
        found = evidence({"a": [4.0] * runs})
        assert verdict("count", found, scheme="a", at_most=0.0) == expected
    spoilt = Evidence({"main": [*rows_of({"a": [4.0] * 9}), row("a", 9, None, diverged=3)]})
    assert verdict("count", spoilt, scheme="a", at_most=0.0) == "refuted"
    assert verdict("count", spoilt, scheme="a", what=["stuck"], at_most=0.0) == "reproduced"
    assert verdict("count", spoilt, scheme="a", what=[], above=3.9, at_least=1.0) == "refuted"


def test_counting_covers_all_rates_and_roles():
    tune = [row("a", 1000, None, lr=lr, role="tune", diverged=2) for lr in (1e-3, 2e-3)]
    found = rule("count", scheme="a", at_most=0.0).decide(Evidence({"main": tune + rows_of({"a": BASE})}))
    assert found.estimate == pytest.approx(2 / 5)
    assert verdict("count", Evidence({"main": tune}), scheme="a", lrs=[2e-3], at_least=1.0, margin=0.96) == "reproduced"


def test_events_are_named_by_rate():
    rows = [row("a", seed, 3.0, lr=lr, stuck=lr > 2e-3) for lr in (1e-3, 2e-3, 4e-3) for seed in range(3)]
    found = rule("count", scheme="a", at_most=0.0).decide(Evidence({"main": rows}))
    assert "a by rate: 0 of 3 at 0.001, 0 of 3 at 0.002, 3 of 3 at 0.004" in found.notes
    calm = rule("count", scheme="a", at_most=0.0).decide(Evidence({"main": rows[:6]}))
    assert calm.notes == ()


def test_rows_without_rates_are_counted():
    rows = [{key: value for key, value in row("a", seed, 3.0, stuck=True).items() if key != "lr"} for seed in range(3)]
    found = rule("count", scheme="a", at_most=0.0).decide(Evidence({"main": rows}))
    assert (found.verdict, found.notes) == ("refuted", ())


def test_fewer_than_another_by_fishers_test():
    # 0 of 5 against 5 of 5: 1 / C(10, 5).
    assert fisher_exact((5, 5), (0, 5)) == pytest.approx(1 / 252)
    # 3 of 4 against 1 of 4, the lady who tasted tea: 17 / 70.
    assert fisher_exact((3, 4), (1, 4)) == pytest.approx(17 / 70)
    rows = rows_of({"a": [4.0] * 5, "b": [None] * 5}, diverged=None)
    assert verdict("count", Evidence({"main": rows}), scheme="a", less_than="b") == "reproduced"
    assert verdict("count", Evidence({"main": rows}), scheme="b", less_than="a") == "refuted"
    few = rows_of({"a": [4.0] * 2, "b": [None] * 2})
    assert verdict("count", Evidence({"main": few}), scheme="a", less_than="b") == "open"


# -- correlation -----------------------------------------------------------------------------------------------------


def test_correlation():
    made = np.random.default_rng(0)
    x = made.normal(size=40)
    y = 4.0 + x + 0.5 * made.normal(size=40)
    rows = [row("a", k, float(v), spread=float(u)) for k, (u, v) in enumerate(zip(x, y, strict=True))]
    found = rule("correlation", x="spread").decide(Evidence({"main": rows}))
    r = np.corrcoef(x, y)[0, 1]
    assert found.estimate == pytest.approx(r)
    assert math.atanh(found.high) - math.atanh(r) == pytest.approx(1.959964 / math.sqrt(37), rel=1e-5)
    assert found.verdict == "reproduced"
    assert verdict("correlation", Evidence({"main": rows}), x="spread", sign="negative") == "refuted"
    assert verdict("correlation", Evidence({"main": rows[:4]}), x="spread") == "open"
    assert verdict("correlation", Evidence({"main": rows}), x="spread", ranks=True) == "reproduced"


def test_a_correlation_between_schemes_alone_is_none_within():
    made = np.random.default_rng(1)
    rows = [row(name, k, level + 0.1 * float(made.normal()), spread=level + 0.1 * float(made.normal()))
            for name, level in (("a", 1.0), ("b", 2.0)) for k in range(20)]  # fmt: skip
    assert verdict("correlation", Evidence({"main": rows}), x="spread") == "reproduced"
    assert verdict("correlation", Evidence({"main": rows}), x="spread", within=["scheme"]) == "open"


def test_what_all_schemes_of_a_seed_share_does_not_count_across_seeds():
    made = np.random.default_rng(2)
    shared = made.normal(size=8)
    rows = [row(name, k, 4.0 + shared[k] + 0.1 * float(made.normal()), spread=shared[k] + 0.1 * float(made.normal()))
            for name in "abc" for k in range(8)]  # fmt: skip
    options = {"x": "spread", "within": ["scheme"]}
    assert verdict("correlation", Evidence({"main": rows}), **options) == "reproduced"
    found = rule("correlation", **options, across=["arm", "seed"]).decide(Evidence({"main": rows}))
    assert found.verdict == "open"
    # Of 24 runs go 3 means of schemes and 8 of seeds, of which one follows from the others, and two for a correlation.
    half = math.atanh(found.high) - math.atanh(found.estimate)
    assert half == pytest.approx(1.959964 / math.sqrt(12), rel=1e-5)


def test_intervals_of_correlations_cover():
    made, inside = np.random.default_rng(2), 0
    for _ in range(400):
        x = made.normal(size=12)
        y = 0.6 * x + 0.8 * made.normal(size=12)
        low, high = correlation_interval(pearson(x.tolist(), y.tolist()), 12 - 3, 0.9)
        inside += low <= 0.6 <= high
    # 360 of 400 expected; four standard deviations are 24.
    assert abs(inside - 360) <= 24


def test_ranks_share_ties():
    assert rank_values([3.0, 1.0, 3.0]) == [2.5, 1.0, 2.5]


# -- values, and what is refused -------------------------------------------------------------------------------------


def test_paths():
    made = {"profiles": [{"rms": [1.0, 2.0]}, {"rms": [1.0, 2.0, 4.0 * math.sqrt(2.0), 6.0, None]}],
            "verdicts": [{"name": "gain", "value": 3}, {"subject": "a", "quantity": "b", "measured": 7}]}  # fmt: skip
    assert row_number(made, "profiles.-1.rms.1") == 2.0
    assert row_number(made, "profiles.0.rms.max") == 2.0
    assert row_number(made, "verdicts.gain.value") == 3.0
    assert row_number(made, "verdicts.a: b.measured") == 7.0
    assert row_number(made, "verdicts.other.value") is None
    assert row_number(made, "profiles.9.rms.1") is None
    assert row_numbers(made, "profiles.0.rms") == [1.0, 2.0]
    assert row_number(made, "profiles.1.rms.3 / profiles.0.rms.1") == 3.0
    assert row_number(made, "profiles.1.rms.3 / nothing") is None
    with pytest.raises(NormLabError, match="name a place in it"):
        row_number(made, "profiles.0.rms")


def test_growth_is_an_exponent():
    made = {"rms": [1.0, *(3.0 * k**1.5 for k in range(1, 20))]}
    assert row_number(made, "rms.growth") == pytest.approx(1.5)


def test_sides():
    assert interval_verdict(1.0, 2.0, (0.5, 2.5)) == "reproduced"
    assert interval_verdict(1.0, 2.0, (2.5, None)) == "refuted"
    assert interval_verdict(1.0, 2.0, (1.5, None)) == "open"
    assert interval_verdict(None, None, (1.5, None)) == "open"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "no kind"),
        ({"kind": "diference"}, "did you mean 'difference'"),
        ({"kind": "difference", "scheme": "a"}, "needs 'against'"),
        ({"kind": "difference", "scheme": "a", "against": "b", "by": "x"}, "must be a number"),
        ({"kind": "difference", "scheme": "a", "against": "b", "byy": 1.0}, "did you mean 'by'"),
        ({"kind": "difference", "scheme": "a", "against": "b", "level": 1.5}, "level"),
        ({"kind": "difference", "scheme": "a", "against": "b", "direction": "up"}, "one of 'below'"),
        ({"kind": "bound", "scheme": "a"}, "at_most, at_least or both"),
        ({"kind": "count", "scheme": "a"}, "one of at_most"),
        ({"kind": "order", "tiers": [["a"]]}, "at least two"),
    ],
)
def test_rules_that_say_nothing_are_refused_in_one_line(table, words):
    with pytest.raises(NormLabError, match=words) as error:
        read_rule(table, "x.toml, rule")
    assert "\n" not in str(error.value)
