"""Noise of cells: pooled spread, degrees of freedom, and correlation between branches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from normlab.ladders.statistics.estimators.noise import (
    ASSUMED_DF,
    ASSUMED_SEED_SD,
    BRANCH_CORRELATION,
    BRANCH_DF,
    BRANCH_ERROR,
    branch_correlation,
    effective_df,
    noise_model,
    pooled,
)
from normlab.ladders.statistics.simulated.ladders import USUAL, simulate, simulated_grid
from normlab.ladders.statistics.simulated.truths import TRUTHS


def test_independent_cells_pool_to_the_usual_variance() -> None:
    differences = [np.array([0.01, 0.02, 0.06]), np.array([0.0, 0.01, 0.02]), np.array([0.03, 0.03, 0.0])]
    found = pooled(differences, [0, 1, 2])
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
    found = pooled([np.array([0.01])] * 3, [0, 1, 2])
    assert (found.sd, found.df) == (pytest.approx(ASSUMED_SEED_SD), ASSUMED_DF)


def test_branches_share_the_seeds_of_both() -> None:
    groups, seeds = np.array([0, 0, 1]), np.array([3, 2, 2])
    model = noise_model(seeds, groups, pooled([np.array([0.0, 0.01, 0.02])] * 3, [0, 1, 2]))
    without_rung = model.covariance[0]
    sd_squared = without_rung[2, 2] * 2
    np.testing.assert_allclose(np.diag(without_rung), sd_squared / seeds)
    # Three seeds against the same two of them: the covariance is that of a shared seed over three.
    lower = BRANCH_CORRELATION - BRANCH_ERROR
    assert without_rung[0, 1] == pytest.approx(lower * sd_squared / 3)
    assert without_rung[0, 2] == 0.0


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
