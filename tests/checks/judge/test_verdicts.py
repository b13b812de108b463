"""Verdicts: each rule on both sides of its threshold, with the blocks it names."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest

from normlab.checks.judge.ladder_verdicts import Thresholds, Verdict, judge_ladder, level
from normlab.checks.judge.remedies import remedies
from normlab.checks.ladder_records import Ladder
from normlab.errors import NormLabError
from normlab.probes.profile import Profile
from tests.checks.synthetic import ladder, profile, slope

DEPTH = 12


def verdict(name: str, *profiles: Profile, **options) -> Verdict:
    return next(found for found in judge_ladder(Ladder(profiles), **options) if found.name == name)


def stack(step: int = 0, **series) -> Profile:
    """A healthy stack of twelve blocks with some series replaced."""
    return profile(DEPTH, step=step, grad_h=[1.0] * (DEPTH + 1), **series)


def flat(value: float, **at: float) -> list[float | None]:
    """The same number for each block, but for some: flat(1, b3=50)."""
    series: list[float | None] = [value] * DEPTH
    for place, other in at.items():
        series[int(place[1:])] = other
    return series


def states(value: float, **at: float) -> list[float | None]:
    return [value, *flat(value, **at)]


def test_a_healthy_stack_has_no_findings():
    found = judge_ladder(ladder(lambda k: (1 + 0.5 * k) ** 0.5))
    assert level(found) == "ok"
    assert {item.name: item.finding for item in found[:3]} == {
        "forward": "random walk",
        "backward": "power law",
        "unsteady": "fine",
    }
    assert remedies(found) == []


def test_a_profile_with_nothing_in_it_is_not_judged_and_does_not_raise():
    found = judge_ladder(Ladder((Profile(boundaries=2),)))
    assert {item.finding for item in found} == {"not measured", "not judged"}
    assert level(found) == "ok"


def test_verdicts_are_json():
    broken = stack(30, cos=states(0.99), max_abs=states(math.inf), logit_max=flat(200.0))
    found = judge_ladder(Ladder((stack(), dataclasses.replace(broken, grad_h=[math.nan] * 13))))
    text = json.dumps([item.to_dict() for item in found], allow_nan=False)
    assert [Verdict(**item | {"layers": tuple(item["layers"])}) for item in json.loads(text)] == found


@pytest.mark.parametrize(
    ("rms", "finding", "grade"),
    [
        (lambda k: 1.0, "bounded", "ok"),
        (lambda k: 1 + 0.5 * k, "linear", "ok"),
        (lambda k: (1 + 0.5 * k) ** 2, "super-linear", "warn"),
        (lambda k: (1 + k) ** -0.5, "shrinking", "warn"),
        (lambda k: math.exp(0.4 * k), "exploding", "fail"),
    ],
)
def test_forward_levels(rms, finding, grade):
    found = judge_ladder(ladder(rms, seeds=3))[0]
    assert (found.finding, found.level) == (finding, grade)
    assert "1.2 is the limit" in found.words
    assert "growth rate × depth" in found.words
    assert f"L^{found.value:.2f}" in found.words


def test_growth_that_is_no_finding_says_why():
    one = judge_ladder(ladder(lambda k: (0.01 + k) ** 1.4))[0]
    assert (one.finding, one.level, one.layers) == ("linear", "ok", ())
    # One seed counts as p ± 0.5: what is sure of 1.40 is below the limit that stands beside it.
    assert "of which L^0.90 is sure from 24 to 48 blocks (1.2 is the limit); one seed: --seeds 3 tells" in one.words
    several = judge_ladder(ladder(lambda k: (0.01 + k) ** 1.4, seeds=3, noise=0.2))[0]
    assert several.level == "ok"
    sure = float(re.search(r"of which L\^(-?[\d.]+) is sure", several.words)[1])
    assert sure <= 1.2 < several.value
    apart = [profile(depth, lambda k: (1.0 + k) ** 2, step=30, var_data=[1.0] * (depth + 1)) for depth in (24, 48)]
    common = judge_ladder(Ladder(tuple(apart)))[0]
    assert (common.finding, common.level) == ("common part", "ok")
    assert "RMS ∝ L^0.00 from 24 to 48 blocks (1.2 is the limit) without the part that all tokens" in common.words


def test_steady_growth_blames_all_blocks_and_a_jump_its_block():
    steady = judge_ladder(ladder(lambda k: math.exp(0.4 * k)))[0]
    assert steady.layers == tuple(range(48))
    assert steady.words.endswith("; all blocks")
    jump = judge_ladder(ladder(lambda k: math.exp(0.4 * k) * (1e4 if k > 17 else 1.0)))[0]
    assert jump.layers == (17,)
    assert jump.words.endswith("; block 17")
    # Every block loses a third of the gradient and the last one half: that one is not why the gradient vanishes.
    fading = profile(24, grad_h=[0.66 ** (24 - k) * (0.5 if k < 24 else 0.66) for k in range(25)])
    assert judge_ladder(Ladder((fading,)))[1].layers == tuple(range(24))


def test_seeds_near_the_limit_show_their_spread():
    assert "seeds" in judge_ladder(ladder(lambda k: 1 + 0.5 * k, noise=0.02, seeds=3))[0].words


def test_a_nan_is_named_with_its_block_and_its_module():
    spoilt = profile(DEPTH, lambda k: math.nan if k >= 5 else 1.0, step=7, nan_first="layers.4.mlp (step 7)")
    found = verdict("forward", stack(), spoilt)
    assert (found.finding, found.level, found.layers) == ("exploding", "fail", (4,))
    assert "layers.4.mlp (step 7)" in found.words
    assert found.words.endswith("; block 4")
    entry = verdict("forward", stack(broken=states(0.1)))
    assert entry.layers == (-1,)
    assert entry.words.endswith("; the entry")


@pytest.mark.parametrize(
    ("gain", "finding"), [(0.011, "power law"), (0.009, "vanishing"), (999.0, "power law"), (1001.0, "exploding")]
)
def test_backward_at_a_measured_depth(gain, finding):
    found = verdict("backward", profile(DEPTH, grad_h=slope(DEPTH, gain)))
    assert found.finding == finding
    assert found.level == ("ok" if finding == "power law" else "fail")
    assert found.value == pytest.approx(gain)
    assert "0.01 to 1000" in found.words
    assert "no exponent" in found.words


def test_a_gradient_that_is_zero_is_not_one_that_was_not_measured():
    zero = profile(DEPTH, grad_h=[0.0] * (DEPTH + 1))
    found = verdict("backward", zero)
    assert (found.level, found.finding, found.value) == ("fail", "vanishing", 0.0)
    assert "measured and is exactly zero" in found.words
    # A head that starts at zero passes no gradient before its first step.
    assert verdict("backward", zero, profile(DEPTH, grad_h=slope(DEPTH, 1.0), step=30)).level == "ok"
    missing = verdict("backward", profile(DEPTH))
    assert (missing.level, missing.finding) == ("ok", "not judged")


def test_backward_states_its_exponent_and_extrapolates_to_the_target():
    found = judge_ladder(ladder(gain=lambda depth: (depth / 12) ** -1.5), target=480)[1]
    assert found.finding == "vanishing"
    assert "extrapolated" in found.words
    assert "L^-1.50" in found.words


def test_the_block_that_loses_the_gradient_is_named():
    gradient = [1e-4 if place <= 7 else 1.0 for place in range(DEPTH + 1)]
    assert verdict("backward", profile(DEPTH, grad_h=gradient)).layers == (7,)
    # Small embeddings make the first block's gain large: that is not why G is.
    steep = [1e6, *slope(DEPTH, 1e4)[1:]]
    assert verdict("backward", profile(DEPTH, grad_h=steep)).layers == tuple(range(DEPTH))
    broken = [math.nan if place <= 3 else 1.0 for place in range(DEPTH + 1)]
    found = verdict("backward", profile(DEPTH, grad_h=broken))
    assert (found.finding, found.layers, found.value) == ("exploding", (3,), None)
    assert "a gradient is not finite at 12 blocks" in found.words


@pytest.mark.parametrize(
    ("gain", "finding"), [(9.0, "fine"), (11.0, "unsteady"), (1 / 9, "fine"), (1 / 11, "unsteady")]
)
def test_a_gradient_that_moved_during_the_burst_is_unsteady(gain, finding):
    found = verdict("unsteady", stack(), profile(DEPTH, grad_h=slope(DEPTH, gain), step=30))
    assert found.finding == finding


@pytest.mark.parametrize("step", [0, 30])
def test_collapse_fails_after_the_burst_and_warns_before(step):
    cosines = [0.1 * min(place, 9) + (0.06 if place >= 9 else 0.0) for place in range(DEPTH + 1)]
    found = verdict("collapse", stack(step, cos=cosines, erank=states(30.0)))
    assert (found.finding, found.level, found.threshold) == ("collapse", "fail" if step else "warn", 0.95)
    assert found.words.endswith("; blocks 8-11")
    assert verdict("collapse", stack(step, cos=states(0.94), erank=states(2.1))).finding == "fine"
    by_rank = verdict("collapse", stack(step, cos=states(0.5), erank=states(10.0, b11=1.9)))
    assert (by_rank.finding, by_rank.value, by_rank.layers) == ("collapse", 1.9, (11,))


@pytest.mark.parametrize(
    ("loss", "cosine", "finding"), [(4.1, 0.76, "collapse"), (3.9, 0.76, "fine"), (4.1, 0.74, "fine")]
)
def test_tokens_that_came_together_and_a_loss_that_is_stuck_are_a_collapse(loss, cosine, finding):
    before, after = stack(cos=states(0.5)), stack(30, cos=states(cosine), loss=loss)
    found = verdict("collapse", before, after, unigram=4.0)
    assert (found.finding, found.level) == (finding, "ok" if finding == "fine" else "fail")
    assert verdict("collapse", before, after).finding == "fine"
    # What all tokens share may grow as it likes.
    apart = [dataclasses.replace(look, cos_rest=states(0.3)) for look in (before, after)]
    assert verdict("collapse", *apart, unigram=4.0).finding == "fine"


@pytest.mark.parametrize(
    ("rest", "finding"),
    [
        ({"cos_rest": 0.2, "erank_rest": 30.0, "var_data": 0.01}, "common direction"),
        ({"cos_rest": 0.96, "erank_rest": 30.0, "var_data": 0.01}, "collapse"),
        ({"cos_rest": 0.2, "erank_rest": 1.9, "var_data": 0.01}, "collapse"),
        ({"cos_rest": 0.2, "erank_rest": 30.0, "var_data": 0.0038**2}, "collapse"),
        ({"cos_rest": 0.2, "erank_rest": 30.0, "var_data": 0.0040**2}, "common direction"),
        # One sequence has no cosine without its mean.
        ({"erank_rest": 30.0, "var_data": 0.01}, "common direction"),
        ({"erank_rest": 1.5, "var_data": 0.01}, "collapse"),
        ({"var_data": 0.01}, "collapse"),
    ],
)
def test_a_part_that_all_tokens_share_is_no_collapse(rest, finding):
    after = stack(30, cos=states(0.99), erank=states(1.2), **{name: states(value) for name, value in rest.items()})
    found = verdict("collapse", after, unigram=4.0)
    assert (found.finding, found.level) == (finding, "fail" if finding == "collapse" else "ok")
    assert bool(found.layers) is (finding == "collapse")
    assert (len(rest) == 1) or ("without the mean of all tokens" in found.words) or ("of their size" in found.words)


@pytest.mark.parametrize(("loss", "grade"), [(4.1, "fail"), (3.95, "fail"), (3.9, "warn")])
def test_tokens_that_are_the_same_to_a_model_that_learns_are_a_warning(loss, grade):
    after = stack(30, cos=states(0.9999), erank=states(1.0), loss=loss)
    found = verdict("collapse", after, unigram=4.0)
    assert (found.finding, found.level) == ("collapse", grade)
    assert ("though the model learns" in found.words) is (grade == "warn")
    assert verdict("collapse", after).level == "fail"
    # Where the entropy of the data is not known, half of the first loss does.
    assert verdict("collapse", stack(loss=2.1 * loss), after).level == "warn"
    assert verdict("collapse", stack(loss=1.9 * loss), after).level == "fail"


def test_dead_depth_needs_both_conditions():
    def found(first: float, last: float) -> Verdict:
        return verdict("dead depth", stack(ang=[first] * 4 + [0.1] * 4 + [last] * 4))

    dead = found(0.5, 0.01)
    assert (dead.finding, dead.level, dead.layers) == ("dead depth", "warn", (8, 9, 10, 11))
    assert found(0.1, 0.01).finding == "fine"
    assert found(1.0, 0.03).finding == "fine"
    assert found(0.0, 0.0).finding == "fine"


@pytest.mark.parametrize(
    ("name", "series", "value", "grade"),
    [
        ("attention", "attn_entropy_low_share", 0.1, "ok"),
        ("attention", "attn_entropy_low_share", 0.25, "warn"),
        ("attention logits", "logit_max", 50.0, "ok"),
        ("attention logits", "logit_max", 51.0, "warn"),
        ("attention logits", "logit_max", 101.0, "fail"),
        ("bf16 absorption", "absorb_bf16", 0.09, "ok"),
        ("bf16 absorption", "absorb_bf16", 0.11, "warn"),
        ("bf16 absorption", "absorb_bf16", 0.51, "fail"),
        ("update ratio", "upd_ratio", 0.9e-4, "warn"),
        ("update ratio", "upd_ratio", 1.1e-4, "ok"),
        ("update ratio", "upd_ratio", 0.9e-2, "ok"),
        ("update ratio", "upd_ratio", 1.1e-2, "warn"),
        ("update ratio", "upd_ratio", 0.0, "warn"),
    ],
)
def test_limits_of_a_block(name, series, value, grade):
    usual = 1e-3
    found = verdict(name, stack(30, **{series: flat(usual, b3=value, b5=value, b6=value)}))
    assert found.level == grade
    assert found.layers == (() if grade == "ok" else (3, 5, 6))
    assert found.value == value
    assert f"{found.threshold:g}" in found.words
    assert grade == "ok" or found.words.endswith("; blocks 3, 5-6")


def test_the_first_step_of_adam_says_nothing_of_its_updates():
    found = verdict("update ratio", stack(0, upd_ratio=flat(0.5)))
    assert (found.finding, found.level) == ("not measured", "ok")
    assert "Adam's first step" in found.words


def test_limits_of_a_state():
    near = verdict("headroom", stack(max_abs=states(1.0, b2=65504 / 2**3.9)))
    assert (near.level, near.layers, near.threshold) == ("warn", (2,), 4.0)
    assert near.value == pytest.approx(3.9)
    over = verdict("headroom", stack(max_abs=states(65504 * 2**0.7)))
    assert "0.7 bits above the largest fp16 number (4 below it is the least)" in over.words
    assert verdict("headroom", stack(max_abs=states(65504 / 2**4.1))).level == "ok"
    assert verdict("headroom", stack(max_abs=states(0.0))).finding == "not measured"
    assert verdict("outliers", stack(outlier_ratio=states(99.0))).level == "ok"
    assert verdict("outliers", stack(outlier_ratio=states(5.0, b7=101.0))).layers == (7,)


@pytest.mark.parametrize("place", [1, 5, DEPTH - 1])
def test_one_block_that_adds_far_more_than_its_neighbours_is_uneven(place):
    found = verdict("uneven", stack(branch_rms=flat(0.3, **{f"b{place}": 15.0})))
    assert (found.finding, found.level, found.layers) == ("uneven", "warn", (place,))
    assert found.value == pytest.approx(50.0)


def test_laws_of_depth_are_not_uneven():
    for law in (
        lambda k: 5.0**k,
        lambda k: math.exp(-0.4 * k),
        lambda k: 1 / (1 + k),
        lambda k: (1 + k) ** -0.5,
        lambda k: 0.0,
    ):
        assert verdict("uneven", stack(branch_rms=[law(k) for k in range(DEPTH)])).level == "ok"
    # Small embeddings make the first block's gradient gain large, and that alone.
    assert verdict("uneven", profile(DEPTH, grad_h=[100.0, *[1.0] * DEPTH])).level == "ok"


def test_the_worse_snapshot_counts_and_seeds_are_averaged():
    assert verdict("attention logits", stack(logit_max=flat(60.0)), stack(30, logit_max=flat(1.0))).level == "warn"
    # What only the first look measured is not hidden by the second.
    assert verdict("attention logits", stack(logit_max=flat(1.0)), stack(30)).finding == "fine"
    seeds = [dataclasses.replace(stack(logit_max=flat(value)), seed=seed) for seed, value in enumerate((40.0, 70.0))]
    assert verdict("attention logits", *seeds).value == 55.0


def test_thresholds_can_be_set_and_must_be_in_order():
    strict = Thresholds(logit_warn=10.0)
    assert verdict("attention logits", stack(logit_max=flat(20.0)), thresholds=strict).threshold == 10.0
    with pytest.raises(NormLabError, match="logit_warn <= logit_fail"):
        Thresholds(logit_warn=200.0)
    assert all(spec.default is not dataclasses.MISSING for spec in dataclasses.fields(Thresholds))


def test_what_is_known_of_schemes_without_a_scheme():
    """Ladders shaped like those measured with a norm after every addition, and with no norm at all."""
    post = ladder(steps=[0], gain=lambda depth: 1.5).profiles
    dead = [
        dataclasses.replace(p, step=30, grad_h=slope(p.depth, 1e-3 ** (p.depth / 12)), cos=[1.0] * p.boundaries)
        for p in post
    ]
    findings = {item.finding for item in judge_ladder(Ladder((*post, *dead)))}
    assert {"bounded", "vanishing", "unsteady", "collapse"} <= findings
    free = judge_ladder(ladder(lambda k: math.exp(0.38 * k), gain=lambda depth: math.exp(0.9 * depth)))
    assert [item.finding for item in free[:3]] == ["exploding", "exploding", "fine"]


def test_a_gradient_is_blamed_on_blocks_of_the_stack_that_it_was_measured_in():
    """The middle block multiplies the gradient: block 6 of the design, block 12 of a stack twice as deep."""

    def jump(depth: int) -> Profile:
        return profile(depth, grad_h=[1e4 if place <= depth // 2 else 1.0 for place in range(depth + 1)])

    found = verdict("backward", jump(12), jump(24), target=12)
    assert (found.finding, found.layers, found.depth) == ("exploding", (6,), 12)
    assert found.words.endswith("; block 6")
    beyond = verdict("backward", jump(12), jump(24), target=48)
    assert (beyond.layers, beyond.depth) == ((12,), 24)
