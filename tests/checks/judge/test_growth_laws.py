"""Laws: planted exponents are recovered, intervals cover as often as they say, every synthetic profile is named."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from normlab.checks.judge import growth_laws
from normlab.checks.judge.thresholds import Thresholds
from normlab.checks.ladder_records import Ladder
from normlab.errors import NormLabError
from normlab.probes.profile import Profile
from tests.checks.synthetic import ladder, profile, slope


def test_the_fit_agrees_with_scipy():
    random = np.random.default_rng(0)
    depths = np.repeat([6.0, 12.0, 24.0, 48.0], 3)
    values = 2.0 * depths**0.7 * np.exp(0.1 * random.standard_normal(12))
    fit = growth_laws.power_law(list(depths), list(values))
    oracle = stats.linregress(np.log(depths), np.log(values))
    half = stats.t.ppf(0.975, 10) * oracle.stderr
    assert fit.exponent == pytest.approx(oracle.slope, rel=1e-12)
    assert (fit.low, fit.high) == pytest.approx((oracle.slope - half, oracle.slope + half), rel=1e-9)
    assert fit.at(100) == pytest.approx(math.exp(oracle.intercept) * 100**oracle.slope, rel=1e-12)


@given(st.floats(-3, 3), st.floats(-2, 2))
def test_a_law_without_noise_is_recovered_exactly(exponent, intercept):
    depths = [6, 12, 24, 48]
    fit = growth_laws.power_law(depths, [math.exp(intercept) * depth**exponent for depth in depths])
    assert fit.exponent == pytest.approx(exponent, abs=1e-12)
    assert fit.intercept == pytest.approx(intercept, abs=1e-11)


def test_planted_laws_lie_in_their_interval_as_often_as_it_says():
    depths, hits, runs = [6, 12, 24, 48] * 2, 0, 1000
    for seed in range(runs):
        noise = 0.2 * np.random.default_rng(seed).standard_normal(len(depths))
        fit = growth_laws.power_law(depths, [depth**0.5 * math.exp(x) for depth, x in zip(depths, noise, strict=True)])
        hits += fit.low <= 0.5 <= fit.high
    # 950 expected; the binomial's standard deviation is 6.9, four of them are 28.
    assert abs(hits - 950) <= 28


def test_two_points_give_an_exponent_without_an_interval():
    fit = growth_laws.power_law([12, 24], [1.0, 4.0])
    assert fit.exponent == pytest.approx(2.0)
    assert fit.low is None
    assert fit.high is None


def test_values_beyond_a_float_end_as_zero_or_infinite():
    fit = growth_laws.power_law([1, 10], [1.0, 1e300])
    assert fit.at(1000) == math.inf
    assert growth_laws.power_law([1, 10], [1.0, 1e-300]).at(1000) == 0.0


@pytest.mark.parametrize("values", [[1.0, 0.0], [1.0, -1.0], [1.0, math.inf], [1.0]])
def test_values_without_a_logarithm_are_refused(values):
    with pytest.raises(NormLabError, match="power law"):
        growth_laws.power_law([12, 24], values)
    with pytest.raises(NormLabError, match="two or more depths"):
        growth_laws.power_law([12, 12], [1.0, 2.0])


def test_an_exponential_is_straight_and_other_laws_bend():
    assert growth_laws.bend(profile(24, lambda k: math.exp(0.3 * k))) == pytest.approx(1.0)
    # Whatever its exponent, a power law has the least-squares slopes of log x over the two halves.
    lower, upper = (_slope_of_log(*half) for half in ((0.1, 0.5), (0.5, 0.9)))
    assert growth_laws.bend(profile(4000, lambda k: (1 + 5 * k) ** 0.7)) == pytest.approx(upper / lower, rel=1e-3)
    assert growth_laws.bend(Profile(boundaries=13)) is None


def test_a_random_walk_that_turns_into_a_line_does_not_explode():
    """From the fourth block on increments add up, in the deeper stack more than in the other."""

    def size(slope: float):
        return lambda k: 3.1 * math.sqrt(k + 0.01) + slope * max(0, k - 4)

    stacks = [profile(depth, size(s), seed=seed) for depth, s in ((16, 0.1), (32, 1.0)) for seed in range(3)]
    law = growth_laws.forward_law(Ladder(tuple(stacks)), "before")
    assert law.p.exponent > 1.2
    assert law.kappa_ratio > law.kappa_ratio_limit
    assert law.kappa_depth > Thresholds().kappa_depth
    assert law.name == "super-linear"


def _slope_of_log(start: float, end: float) -> float:
    middle, width = (start + end) / 2, end - start
    return 12 / width**3 * integrate.quad(lambda x: (x - middle) * math.log(x), start, end)[0]


def test_kappa_of_an_exponential_of_a_power_law_and_of_a_slow_drift():
    assert growth_laws.kappa(profile(24, lambda k: math.exp(0.3 * k))) == pytest.approx(0.3)
    # The power law's κL does not depend on the depth; its limit is the slope of p log x on 0.1 to 0.9, 2.4 p.
    small, large = (growth_laws.kappa(profile(depth, lambda k: (1 + 5 * k) ** 0.5)) for depth in (200, 400))
    assert large / small == pytest.approx(0.5, abs=0.01)
    assert large * 400 == pytest.approx(2.4 * 0.5, abs=0.05)
    drift = [growth_laws.kappa(profile(depth, lambda k: 1 + 0.026 * k)) for depth in (24, 48)]
    assert drift[1] / drift[0] == pytest.approx(0.82, abs=0.02)
    assert drift[1] * 48 == pytest.approx(0.78, abs=0.02)
    assert growth_laws.kappa(Profile(boundaries=13)) is None


def test_p_depth_is_the_slope_over_the_last_doubling_with_an_interval_over_seeds():
    fit = growth_laws.p_depth(ladder(lambda k: (1 + k) ** 0.5 if k < 30 else 1.0 * k), "after")
    assert fit.exponent == pytest.approx(math.log2(48 / math.sqrt(25)))
    assert fit.low is None
    noisy = growth_laws.p_depth(ladder(lambda k: 1.0 + k, noise=0.05, seeds=5), "before")
    assert noisy.n == 5
    assert noisy.low < math.log2(49 / 25) < noisy.high
    assert growth_laws.p_depth(ladder(depths=[12]), "before") is None


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize(
    ("rms", "name"),
    [
        (lambda k: 1.0, "bounded"),
        (lambda k: 7.0 - 0.001 * k, "bounded"),
        (lambda k: (1 + 0.5 * k) ** 0.5, "random walk"),
        (lambda k: (1 + 0.3 * k) ** 0.75, "linear"),
        (lambda k: 1 + 0.5 * k, "linear"),
        (lambda k: (1 + 0.5 * k) ** 2, "super-linear"),
        (lambda k: math.exp(0.1 * k), "exploding"),
        (lambda k: math.exp(0.4 * k), "exploding"),
        # Looks exponential to κ, and is the healthiest of all: a·L is of order one.
        (lambda k: 1 + 0.026 * k, "random walk"),
        (lambda k: (1 + k) ** -0.5, "shrinking"),
    ],
)
def test_synthetic_profiles_are_named(rms, name, noise, seeds):
    assert growth_laws.classify(ladder(rms, noise=noise, seeds=seeds)).name == name


@pytest.mark.parametrize(
    ("exponent", "seeds", "noise", "name", "doubtful"),
    [
        # One seed stands for half a unit of the exponent either way.
        (1.4, 1, 0.0, "linear", True),
        (1.8, 1, 0.0, "super-linear", False),
        (-0.4, 1, 0.0, "bounded", True),
        (-0.7, 1, 0.0, "shrinking", False),
        # Several have an interval of their own.
        (1.4, 3, 0.0, "super-linear", False),
        (1.4, 3, 0.2, "linear", True),
        (-0.4, 3, 0.0, "shrinking", False),
        (1.0, 1, 0.0, "linear", False),
    ],
)
def test_a_worse_class_needs_an_interval_that_excludes_the_milder_one(exponent, seeds, noise, name, doubtful):
    law = growth_laws.classify(ladder(lambda k: (0.01 + k) ** exponent, seeds=seeds, noise=noise))
    assert (law.name, law.doubtful) == (name, doubtful)


def in_common(depth: int, exponent: float, rest: float, step: int, rate: float = 0.0) -> Profile:
    """A state of size l^p e^{rate l}, of which l^rest is what tells tokens apart."""
    size, apart = (lambda k: (0.01 + k) ** exponent * math.exp(rate * k)), (lambda k: (0.01 + k) ** (2 * rest))
    return profile(depth, size, step=step, var_data=[apart(k) for k in range(depth + 1)])


@pytest.mark.parametrize(
    ("step", "exponent", "rest", "rate", "name"),
    [
        # As Llama is in its first steps, while it learns how often each token occurs.
        (30, 2.0, 0.2, 0.0, "common part"),
        (30, 2.0, 1.9, 0.0, "super-linear"),
        (30, 0.5, 0.2, 0.3, "common part"),
        # Before training nothing has been learnt: there is no excuse.
        (0, 2.0, 0.2, 0.0, "super-linear"),
        (0, 0.5, 0.2, 0.3, "exploding"),
        (30, 1.0, 0.2, 0.0, "linear"),
    ],
)
def test_growth_of_what_all_tokens_have_in_common_is_told_apart(step, exponent, rest, rate, name):
    law = growth_laws.classify(Ladder(tuple(in_common(depth, exponent, rest, step, rate) for depth in (24, 48))))
    assert law.name == name
    assert law.p_rest == pytest.approx(rest, abs=1e-3)


def test_a_slow_drift_fails_two_conditions_and_is_let_off_by_the_third():
    law = growth_laws.classify(ladder(lambda k: 1 + 0.026 * k))
    assert law.kappa_ratio > law.kappa_ratio_limit == 0.75
    assert law.kappa_depth > Thresholds().kappa_depth
    assert law.p.exponent < Thresholds().p_linear


def test_a_state_that_hardly_grows_inside_the_stack_does_not_explode():
    def jump_at_the_end(depth: int) -> Profile:
        return profile(depth, lambda k: math.exp(0.01 * k) * (depth**2 if k == depth else 1.0))

    law = growth_laws.classify(Ladder((jump_at_the_end(24), jump_at_the_end(48))))
    assert law.kappa_ratio == pytest.approx(1.0)
    assert law.kappa_depth == pytest.approx(0.48)
    assert law.name == "super-linear"


def test_depths_below_twelve_are_never_judged():
    assert growth_laws.classify(ladder(lambda k: math.exp(k), depths=(3, 6, 11))).name == "not judged"
    assert growth_laws.classify(ladder(lambda k: math.exp(k), depths=(6, 12))).name == "not judged"
    assert growth_laws.classify(ladder(lambda k: math.exp(k), depths=(12, 24))).name == "exploding"
    assert growth_laws.classify(ladder(lambda k: math.exp(k), depths=(46, 48))).name == "not judged"


@pytest.mark.parametrize("pair", [(12, 18), (12, 36), (12, 48)])
def test_other_ratios_than_two_keep_power_laws_and_exponentials_apart(pair):
    assert growth_laws.classify(ladder(lambda k: math.exp(0.3 * k), depths=pair)).name == "exploding"
    assert growth_laws.classify(ladder(lambda k: (1 + 5.0 * k) ** 1.5, depths=pair, seeds=3)).name == "super-linear"


@pytest.mark.parametrize("exploding", [0, 30])
def test_the_worse_of_two_snapshots_counts(exploding):
    good = ladder(steps=[30 - exploding]).profiles
    bad = ladder(lambda k: math.exp(0.4 * k), steps=[exploding]).profiles
    law = growth_laws.classify(Ladder((*good, *bad)))
    assert law.name == "exploding"
    assert law.step == exploding


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_one_value_that_is_not_finite_is_an_explosion_at_any_depth(poison):
    profiles = ladder().profiles
    spoilt = profile(6, lambda k: poison if k >= 4 else 1.0, step=30, seed=1)
    law = growth_laws.classify(Ladder((*profiles, spoilt)))
    assert law.name == "exploding"
    assert law.broken is spoilt
    assert spoilt.first_broken == 4
    assert growth_laws.classify(Ladder((Profile(boundaries=4, loss=poison),))).name == "exploding"


def test_gradients_are_extrapolated_by_their_power_law():
    law = growth_laws.classify_backward(ladder(gain=lambda depth: 0.5 * depth**0.8), 96)
    assert law.name == "power law"
    assert not law.measured
    assert law.value == pytest.approx(0.5 * 96**0.8)
    assert law.fit.exponent == pytest.approx(0.8)
    assert growth_laws.classify_backward(ladder(gain=lambda depth: 0.5 * depth**0.8)).value == pytest.approx(
        0.5 * 48**0.8
    )


@pytest.mark.parametrize(
    ("exponent", "name"),
    [(-3.0, "vanishing"), (-1.0, "power law"), (0.0, "power law"), (1.0, "power law"), (3.0, "exploding")],
)
def test_the_gradients_class_depends_on_the_target_depth(exponent, name):
    small = ladder(gain=lambda depth: (depth / 12) ** exponent, depths=(12, 24))
    assert growth_laws.classify_backward(small, 24).name == "power law"
    assert growth_laws.classify_backward(small, 192).name == name


def test_shallow_depths_do_not_bend_the_gradients_law():
    bent = ladder(gain=lambda depth: 1e6 if depth < 12 else depth**0.5)
    assert growth_laws.classify_backward(bent, 96).value == pytest.approx(96**0.5)


def test_lost_broken_and_missing_gradients():
    def law(*gradients: list[float], target: int | None = None) -> growth_laws.BackwardLaw:
        made = [profile(len(g) - 1, grad_h=g, seed=seed) for seed, g in enumerate(gradients)]
        return growth_laws.classify_backward(Ladder(tuple(made)), target)

    assert law([0.0, 0.0, 1.0]).name == "vanishing"
    assert law([1.0, math.nan, 1.0]).name == "exploding"
    assert law([0.0, 0.0, 1.0], target=96).name == "vanishing"
    assert growth_laws.classify_backward(ladder(depths=[12]), 96).name == "not judged"
    assert growth_laws.classify_backward(Ladder((Profile(boundaries=13),))).name == "not judged"


def test_how_far_the_gradient_moved():
    before, after = profile(12, grad_h=slope(12, 2.0)), profile(12, grad_h=slope(12, 1e-4), step=30)
    assert growth_laws.moved(Ladder((before, after))) == pytest.approx(2e4)
    assert growth_laws.moved(Ladder((before,))) is None
    assert growth_laws.moved(Ladder((before, profile(12, grad_h=[0.0, 0.0, *[1.0] * 11], step=30)))) == math.inf
    assert growth_laws.moved(Ladder((before, profile(12, grad_h=[math.nan] * 13, step=30)))) == math.inf
    assert growth_laws.moved(Ladder((before, profile(12, grad_h=slope(12, 2.0), step=30)))) == 1.0
    broken = profile(12, grad_h=[math.nan] * 13)
    assert growth_laws.moved(Ladder((broken, dataclasses.replace(broken, step=30)))) is None
