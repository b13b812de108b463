"""Mixtures of normals: quantiles against closed forms, the distribution function and samples."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from normlab.ladders.statistics.estimators.mixture import Mixture

THREE = Mixture(np.array([0.2, 0.5, 0.3]), np.array([-0.05, 0.0, 0.04]), np.array([0.01, 0.002, 0.03]))


@pytest.mark.parametrize("probability", [0.005, 0.025, 0.5, 0.8, 0.975])
def test_one_component_has_the_normal_quantile(probability: float) -> None:
    own = Mixture(np.ones(1), np.array([0.02]), np.array([0.005]))
    # The table's absolute error of 1.2e-7 over the density of the standard normal there.
    slack = 0.005 * 1.2e-7 / stats.norm.pdf(stats.norm.ppf(probability))
    assert own.quantile(probability) == pytest.approx(stats.norm.ppf(probability, 0.02, 0.005), abs=2 * slack + 1e-11)


@pytest.mark.parametrize("probability", [0.01, 0.025, 0.3, 0.5, 0.9, 0.975])
def test_quantile_inverts_the_distribution_function(probability: float) -> None:
    assert THREE.below(THREE.quantile(probability)) == pytest.approx(probability, abs=1e-6)


def test_interval_agrees_with_samples() -> None:
    rng, n = np.random.default_rng(0), 400_000
    component = rng.choice(3, size=n, p=THREE.weights)
    draws = rng.normal(THREE.means[component], THREE.sds[component])
    found = THREE.interval(0.95)
    # Five standard errors of a share of 2.5 % among the draws.
    slack = 5.0 * np.sqrt(0.025 * 0.975 / n)
    assert np.mean(draws < found.low) == pytest.approx(0.025, abs=slack)
    assert np.mean(draws > found.high) == pytest.approx(0.025, abs=slack)
    assert found.mean == pytest.approx(draws.mean(), abs=5.0 * THREE.sd / np.sqrt(n))


def test_far_components_do_not_trap_the_search() -> None:
    own = Mixture(np.array([0.5, 0.5]), np.array([-1.0, 1.0]), np.array([1e-6, 1e-6]))
    found = own.interval(0.95)
    assert found.low == pytest.approx(-1.0, abs=1e-5)
    assert found.high == pytest.approx(1.0, abs=1e-5)


def test_a_truncated_interval_is_that_of_the_truncated_normal() -> None:
    own = Mixture(np.ones(1), np.array([2.0]), np.array([1.5]))
    truth = stats.truncnorm((0.0 - 2.0) / 1.5, (2.5 - 2.0) / 1.5, 2.0, 1.5)
    found = own.interval_within(0.0, 2.5, 0.95, 0.05)
    assert found is not None
    # The distribution function is a table with an absolute error of 1.2e-7; the density is at least 0.1 here.
    assert (found.low, found.high) == pytest.approx(truth.ppf([0.025, 0.975]), abs=1e-5)
    assert found.mean == pytest.approx(truth.mean(), abs=1e-5)


def test_a_truncated_mixture_agrees_with_samples_and_needs_mass() -> None:
    rng, n = np.random.default_rng(1), 400_000
    component = rng.choice(3, size=n, p=THREE.weights)
    draws = rng.normal(THREE.means[component], THREE.sds[component])
    kept = draws[(draws > -0.01) & (draws < 0.03)]
    found = THREE.interval_within(-0.01, 0.03, 0.9, 0.05)
    assert found is not None
    slack = 5.0 * np.sqrt(0.05 * 0.95 / len(kept))
    assert np.mean(kept < found.low) == pytest.approx(0.05, abs=slack)
    assert np.mean(kept > found.high) == pytest.approx(0.05, abs=slack)
    assert found.mean == pytest.approx(kept.mean(), abs=5.0 * kept.std() / np.sqrt(len(kept)))
    assert THREE.interval_within(0.2, 0.3, 0.9, 0.05) is None
