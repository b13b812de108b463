"""Noise of cells: pooled spread, degrees of freedom, and correlation between branches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from normlab.ladders.statistics.estimators.noise import (
    ASSUMED_DF,
    ASSUMED_SEED_SD,
    BRANCH_CORRELATION,
    BRANCH_DF,
    BRANCH_ERROR,
    CONSTANT_WEIGHT,
    SeedNoise,
    branch_correlation,
    effective_df,
    exponent_over_tokens,
    noise_model,
    pooled,
)
from normlab.ladders.statistics.simulated.ladders import EARLY, USUAL, Noise, simulate, simulated_grid
from normlab.ladders.statistics.simulated.truths import TRUTHS


def test_independent_cells_pool_to_the_usual_variance() -> None:
    differences = [np.array([0.01, 0.02, 0.06]), np.array([0.0, 0.01, 0.02]), np.array([0.03, 0.03, 0.0])]
    found = pooled(differences, [0, 1, 2], [100, 100, 100])
    expected = np.mean([own.var(ddof=1) for own in differences])
    assert found.sd == pytest.approx(np.sqrt(expected))
    assert found.df == 6.0


def test_effective_degrees_of_freedom_match_the_spread_of_the_pooled_variance() -> None:
    """Var(s²) = 2σ⁴/df: for branches of a trunk df is less than the number of pairs suggests."""
    ladder = simulated_grid()
    gaps, _ = simulate(ladder, TRUTHS[0], USUAL, 3, 20_000, np.random.default_rng(0))
    variances = gaps.var(axis=-1, ddof=1).mean(axis=1)
    measured = 2.0 * variances.mean() ** 2 / variances.var()
    assert effective_df([3] * 12, ladder.group.tolist()) == pytest.approx(measured, rel=0.05)


def test_few_pairs_lean_on_the_assumed_noise() -> None:
    found = pooled([np.array([0.01])] * 3, [0, 1, 2], [100, 200, 300])
    assert (found.sd, found.df) == (pytest.approx(ASSUMED_SEED_SD), ASSUMED_DF)


def test_branches_share_the_seeds_of_both() -> None:
    groups, seeds = np.array([0, 0, 1]), np.array([3, 2, 2])
    tokens = np.array([100.0, 200.0, 100.0])
    model = noise_model(seeds, groups, tokens, pooled([np.array([0.0, 0.01, 0.02])] * 3, [0, 1, 2], [100] * 3))
    without_rung = model.covariance[0]
    sd_squared = without_rung[2, 2] * 2
    np.testing.assert_allclose(np.diag(without_rung), sd_squared / seeds)
    # Three seeds against the same two of them: the covariance is that of a shared seed over three.
    lower = BRANCH_CORRELATION - BRANCH_ERROR
    assert without_rung[0, 1] == pytest.approx(lower * sd_squared / 3)
    assert without_rung[0, 2] == 0.0


def test_the_power_of_tokens_is_the_mean_of_its_posterior() -> None:
    """Against the posterior by quadrature, with sd integrated out by a second quadrature over ln sd."""
    rng, tokens = np.random.default_rng(5), [30, 60, 120, 30, 60, 120]
    x = np.log(tokens) - np.mean(np.log(tokens))
    differences = [rng.normal(0.0, 0.01 * np.exp(-1.2 * own), 3) for own in x]
    squares = np.array([((own - own.mean()) ** 2).sum() for own in differences])
    mean, sd = exponent_over_tokens(differences, x)

    def likelihood(exponent: float) -> float:
        log_sds = np.linspace(-9.0, -1.0, 4001)[:, None] + exponent * x
        log_density = (-2.0 * log_sds - squares / (2.0 * np.exp(2.0 * log_sds))).sum(axis=1)
        return float(np.exp(log_density - 50.0).sum())

    exponents = np.linspace(-3.0, 3.0, 1201)
    slab = np.array([likelihood(own) for own in exponents]) * stats.norm.pdf(exponents) / 200.0
    slab *= 1.0 - CONSTANT_WEIGHT
    spike = CONSTANT_WEIGHT * likelihood(0.0)
    total = slab.sum() + spike
    expected = (slab @ exponents) / total
    assert mean == pytest.approx(expected, abs=1e-3)
    assert sd == pytest.approx(np.sqrt(slab @ exponents**2 / total - expected**2), abs=1e-3)


@pytest.mark.parametrize(
    ("noise", "true"), [(USUAL, 0.0), (EARLY, -np.log(6.0) / np.log(4.0))], ids=["constant", "falls"]
)
def test_the_power_of_tokens_is_found_and_leaves_constant_noise_alone(noise: Noise, true: float) -> None:
    ladder = simulated_grid()
    gaps, _ = simulate(ladder, TRUTHS[0], noise, 3, 300, np.random.default_rng(1))
    found = [pooled(list(own), ladder.group.tolist(), ladder.cells.tokens.tolist()) for own in gaps]
    exponents = np.array([own.exponent for own in found])
    # Half of the prior weight lies at zero: the estimates are drawn towards it.
    assert exponents.mean() == pytest.approx(true, abs=0.1)
    top = np.array([float(own.sds(np.array(ladder.cells.tokens[-1]))) for own in found])
    assert np.median(top) == pytest.approx(noise.paired_sd, rel=0.15)


def test_where_the_power_is_uncertain_there_are_fewer_degrees_of_freedom() -> None:
    noise = SeedNoise(0.01, 10.0, exponent=-1.0, exponent_error=0.3, centre=float(np.log(60.0)))
    tokens = np.array([30.0, 60.0, 120.0])
    np.testing.assert_allclose(noise.sds(tokens), [0.02, 0.01, 0.005])
    off = (0.3 * np.log(2.0)) ** 2
    np.testing.assert_allclose(1.0 / (2.0 * noise.dfs(tokens)), [0.05 + off, 0.05, 0.05 + off])


def test_budgets_with_one_seed_have_the_scatter_of_the_nearest_with_several() -> None:
    """Only 30 and 60 are known: the power is a guess that was carried on to a hundred times as many tokens."""
    rng, tokens = np.random.default_rng(0), [15, 30, 60, 600, 6000]
    differences = [rng.normal(0.0, 0.01, seeds) for seeds in (1, 4, 4, 1, 1)]
    differences[1] *= 3.0
    found = pooled(differences, [0, 1, 2, 3, 4], tokens)
    assert found.exponent < 0.0
    for own in (found.sds(np.array(tokens)), found.dfs(np.array(tokens))):
        assert own[0] == own[1]
        assert own[2] == own[3] == own[4]


def test_several_seeds_at_one_budget_alone_have_no_power() -> None:
    rng = np.random.default_rng(0)
    differences = [rng.normal(0.0, 0.01, seeds) for seeds in (1, 5, 5, 1)]
    found = pooled(differences, [0, 1, 2, 3], [30, 60, 60, 120_000])
    assert (found.exponent, found.exponent_error) == (0.0, 0.0)
    np.testing.assert_allclose(found.dfs(np.array([30.0, 120_000.0])), 8.0)


def test_the_smallest_scatter_is_not_multiplied_by_the_power_of_tokens() -> None:
    """Seeds differ at the largest budget alone, by 0.03: the scatter there is no more than that."""
    differences = [*[np.array([0.01, 0.01, 0.01])] * 3, np.array([0.0, 0.0, 0.03])]
    tokens = [10**6, 10**8, 10**10, 10**12]
    found = pooled(differences, [0, 1, 2, 3], tokens)
    assert 0.005 < found.sds(np.array(tokens))[-1] < 0.03


def test_seeds_that_agree_exactly_and_one_budget_have_no_power() -> None:
    same, apart = [np.array([0.01, 0.01, 0.01])] * 4, [np.array([0.0, 0.01, 0.05])] * 4
    assert exponent_over_tokens(same, np.array([-1.0, 0.0, 0.0, 1.0])) == (0.0, 0.0)
    assert exponent_over_tokens(apart, np.zeros(4)) == (0.0, 0.0)
    assert np.isfinite(pooled(same, [0, 1, 2, 3], [30, 60, 60, 120]).sd)


@pytest.mark.parametrize("true", [0.5, 0.9])
def test_branch_correlation_moves_from_the_expected_to_the_true_one(true: float) -> None:
    ladder, noise = simulated_grid(), replace(USUAL, branch=true)
    gaps, _ = simulate(ladder, TRUTHS[0], noise, 3, 500, np.random.default_rng(0))
    found = np.mean([branch_correlation(list(own), ladder.group.tolist()) for own in gaps])
    # Four trunks of three seeds have 8 degrees of freedom: a ratio of sums is biased a little.
    assert found == pytest.approx((8.0 * true + BRANCH_DF * BRANCH_CORRELATION) / (8.0 + BRANCH_DF), abs=0.03)


def test_branch_correlation_without_pairs_is_the_expected_one() -> None:
    assert branch_correlation([np.array([0.01, 0.02])] * 2, [0, 1]) == BRANCH_CORRELATION
    assert branch_correlation([np.array([0.01])] * 2, [0, 0]) == BRANCH_CORRELATION
