"""The smooth estimator: its covariance, its posterior against a dense Gaussian process, and exact lines."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from scipy import integrate, stats

from normlab.ladders.statistics.answer import Place
from normlab.ladders.statistics.estimators.fit import Sample, estimate
from normlab.ladders.statistics.estimators.gaussian import GaussianModel, NoiseModel, Prior
from normlab.ladders.statistics.estimators.layout import layout_of
from normlab.ladders.statistics.estimators.noise import SeedNoise, noise_model
from normlab.ladders.statistics.estimators.simple_law import simple_law_prior
from normlab.ladders.statistics.estimators.smooth import integrated_wiener, smooth_prior
from normlab.ladders.statistics.simulated.calibration import as_places
from normlab.ladders.statistics.simulated.ladders import SimulatedLadder, simulated_grid, simulated_path


def _sample(ladder: SimulatedLadder, means: np.ndarray, sd: float = 0.007) -> Sample:
    places = tuple(as_places(ladder.cells))
    return Sample(places, means, np.full(len(places), 3), ladder.group, SeedNoise(sd, 10.0))


def _product(first: float, second: float, t: float) -> float:
    return (first - t) * (second - t)


def test_integrated_wiener_process_is_the_double_integral() -> None:
    x = np.array([-2.0, -1.3, 0.0, 0.8])
    found = integrated_wiener(x, cells=3)
    for i, first in enumerate(x + 2.0):
        for j, second in enumerate(x + 2.0):
            inner = partial(_product, first, second)
            expected = integrate.quad(inner, 0.0, min(first, second))[0]
            assert found[i, j] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("ladder", [simulated_path(), simulated_grid(3, 2)], ids=["path", "grid"])
@pytest.mark.parametrize("exponent", [0.0, -1.2])
def test_posterior_is_the_dense_gaussian_process(ladder: SimulatedLadder, exponent: float) -> None:
    """The whole posterior, by scipy's densities and one conditional distribution for each hyperparameter."""
    rng = np.random.default_rng(3)
    even = _sample(ladder, rng.normal(-0.02, 0.03, len(ladder.group)))
    sample = replace(even, noise=SeedNoise(0.007, 10.0, exponent=exponent, centre=float(np.log(59e6))))
    places = as_places(ladder.beyond["10x"])
    found = estimate(sample, places)[0]
    prior = smooth_prior(layout_of(sample.places, places, max(-exponent, 0.0)))
    noise = noise_model(sample.seeds, sample.groups, sample.tokens, sample.noise)
    cells = len(sample.means)
    log_weights, means, variances = [], [], []
    for h, covariance in enumerate(prior.covariance):
        for v, extra in enumerate(noise.covariance):
            total = covariance[:cells, :cells] + extra
            evidence = stats.multivariate_normal(np.zeros(cells), total).logpdf(sample.means)
            log_weights.append(evidence + prior.log_weight[h] + noise.log_weight[v])
            gain = np.linalg.solve(total, covariance[:cells, cells])
            means.append(gain @ sample.means)
            variances.append(covariance[cells, cells] - gain @ covariance[:cells, cells])
    weights = np.exp(np.array(log_weights) - max(log_weights))
    weights /= weights.sum()
    # Conditioning: the prior's largest variance over the noise's smallest is below 1e5.
    np.testing.assert_allclose(found.weights, weights, rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(found.means, means, atol=1e-10)
    np.testing.assert_allclose(found.sds**2, variances, atol=1e-11)


def test_budgets_are_stretched_by_the_scatter_of_seeds() -> None:
    """Distances are the integral of sd(tokens) / sd(top) over ln tokens; size, and what lies beyond, stay."""
    ladder = simulated_grid()
    places, beyond = as_places(ladder.cells), as_places(ladder.beyond["10x"])
    noise = SeedNoise(0.01, 10.0, exponent=-1.3, centre=float(np.log(50e6)))
    plain = layout_of(places, beyond, noise.scatter_power)
    top = float(noise.sds(np.array(118e6)))

    def relative(log_tokens: float) -> float:
        return float(noise.sds(np.exp(np.array(log_tokens)))) / top

    for at, own in zip(places[:3], plain.stretched.tokens, strict=False):
        expected = -integrate.quad(relative, np.log(at.tokens), np.log(118e6))[0]
        assert own == pytest.approx(expected, abs=1e-9)
    np.testing.assert_array_equal(plain.stretched.size, plain.size)
    assert plain.stretched.tokens[-1] == plain.tokens[-1] > 0.0
    even = layout_of(places, beyond, SeedNoise(0.01, 10.0, exponent=0.4).scatter_power)
    assert even.stretched is even


def test_budgets_are_stretched_a_hundredfold_at_most() -> None:
    """Up to a scatter of 100 times the top's as an integral of it, from there on evenly: without a step or a kink."""
    places = [
        Place(name="", size="", parameters=10**7, tokens=tokens, flops=6e7 * tokens)
        for tokens in (10**6, 10**7, 10**8, 10**9, 10**10)
    ]
    found = layout_of(places, scatter_power=1.0).stretched.tokens
    np.testing.assert_allclose(np.diff(found)[:2], 100.0 * np.log(10.0))
    np.testing.assert_allclose(np.diff(found)[2:], [90.0, 9.0])
    samples = [
        Sample(tuple(places), np.zeros(5), np.full(5, 3), np.arange(5), SeedNoise(1e-4, 10.0, exponent=own))
        for own in (-2.0, -3.0)
    ]
    assert all(np.isfinite(estimate(own, places[-1:])[0].interval(0.95).width) for own in samples)


def test_noisy_short_runs_leave_room_for_a_steep_start() -> None:
    """With scatter that falls sixfold, an even curve is too sure of the lowest budget; at the top they agree."""
    sample = _sample(simulated_grid(), np.zeros(12))
    falls = replace(sample, noise=replace(sample.noise, exponent=-1.3, centre=float(np.log(118e6))))

    def ratio(cell: int) -> float:
        place = [falls.places[cell]]
        noise = noise_model(falls.seeds, falls.groups, falls.tokens, falls.noise, falls.tokens[cell : cell + 1])
        even = GaussianModel(smooth_prior(layout_of(falls.places, place)), noise, np.eye(1)).fit(falls.means[None])
        return estimate(falls, place)[0].interval(0.95).width / even.mixture(0).interval(0.95).width

    assert ratio(0) > 1.2
    assert ratio(11) < 1.1


def _exact_variance(prior: np.ndarray, noise: np.ndarray) -> float:
    """Of the last place given the cells before it, by elimination in fractions."""
    joint = [[Fraction(value) for value in row] for row in prior.tolist()]
    for i, row in enumerate(noise.tolist()):
        joint[i] = [Fraction(a) + Fraction(b) for a, b in zip(joint[i], [*row, 0.0], strict=True)]
    for i in range(len(noise)):
        for below in range(i + 1, len(joint)):
            factor = joint[below][i] / joint[i][i]
            joint[below] = [a - factor * b for a, b in zip(joint[below], joint[i], strict=True)]
    return float(joint[-1][-1])


def test_budgets_far_apart_leave_digits() -> None:
    """Scatter like 1 / tokens and budgets 1000 apart: bends reach 1e5 nats², and the noise at the top is 5e-6."""
    places = [
        Place(name="", size="", parameters=size, tokens=tokens, flops=6.0 * size * tokens)
        for size in (10**6, 10**7, 10**8) for tokens in (10**7, 10**10)
    ]  # fmt: skip
    prior = smooth_prior(layout_of(places, places[-1:], 1.0))
    noise = np.diag([(0.004 * 1e10 / place.tokens) ** 2 / 3.0 for place in places])
    found = GaussianModel(prior, NoiseModel(noise[None], np.zeros(1), np.zeros((1, 1))), np.eye(1)).sds[:, 0]
    for at in (0, len(found) // 2, -1):
        # Solving errs by the rounding of the prior's variance, 1e5 · 2^-52, for some weights of about one.
        assert found[at] ** 2 == pytest.approx(_exact_variance(prior.covariance[at], noise), abs=1e-8)


def test_functionals_are_linear() -> None:
    sample = _sample(simulated_path(), np.array([-0.08, -0.05, -0.03, -0.02, -0.01]))
    pair = [sample.places[0], sample.places[-1]]
    bottom, top, change = estimate(sample, pair, np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 1.0]]))
    np.testing.assert_allclose(change.means, top.means - bottom.means, atol=1e-12)
    assert (change.sds <= top.sds + bottom.sds + 1e-12).all()


@pytest.mark.parametrize("ladder", [simulated_path(), simulated_grid()], ids=["path", "grid"])
def test_an_exact_line_without_noise_is_found(ladder: SimulatedLadder) -> None:
    line = -0.03 + 0.005 * ladder.cells.x
    sample = _sample(ladder, line, sd=0.0)
    # The smallest noise that the model allows is 1e-5; shrinkage to the prior is far below.
    for own, value in zip(estimate(sample, sample.places), line, strict=True):
        assert own.mean == pytest.approx(value, abs=5e-4)
    beyond = as_places(ladder.beyond["3.5x"])
    expected = -0.03 + 0.005 * float(ladder.beyond["3.5x"].x[0])
    found = estimate(sample, beyond)[0].interval(0.95)
    assert found.low < expected < found.high
    assert found.mean == pytest.approx(expected, abs=2e-3)


def test_prediction_adds_the_noise_of_a_new_cell() -> None:
    sample = _sample(simulated_path(), np.zeros(5))
    place = as_places(simulated_path().beyond["3.5x"])
    mean, new = (estimate(sample, place, new_seeds=seeds)[0] for seeds in (None, 2))
    noise = noise_model(sample.seeds, sample.groups, sample.tokens, sample.noise, new_seeds=2)
    shapes = len(mean.sds) // len(noise.new_cell)
    np.testing.assert_allclose(new.sds**2 - mean.sds**2, np.tile(noise.new_cell[:, -1], shapes), atol=1e-12)


def test_a_new_cell_has_the_noise_of_its_budget() -> None:
    ladder = simulated_grid()
    sample = _sample(ladder, np.zeros(12))
    falls = replace(sample, noise=replace(sample.noise, exponent=-1.0, centre=float(np.log(59e6))))
    mean, new = (estimate(falls, [sample.places[9], sample.places[11]], new_seeds=seeds) for seeds in (None, 2))
    short, long = (float((b.sds**2 - a.sds**2).min()) for a, b in zip(mean, new, strict=True))
    # A quarter of the tokens, four times the standard deviation; at its lowest there is no effect of the rung.
    assert short == pytest.approx(16.0 * long, rel=1e-6)


@pytest.mark.parametrize("prior_of", [smooth_prior, simple_law_prior])
def test_priors_are_covariances(prior_of: object) -> None:
    assert callable(prior_of)
    for ladder in (simulated_path(), simulated_grid()):
        places = as_places(ladder.cells)
        prior = prior_of(layout_of(places, as_places(ladder.beyond["10x"])))
        assert isinstance(prior, Prior)
        assert np.exp(prior.log_weight).sum() == pytest.approx(1.0)
        np.testing.assert_allclose(prior.covariance, prior.covariance.transpose(0, 2, 1), atol=1e-14)
        lowest = np.linalg.eigvalsh(prior.covariance)
        assert (lowest.min(axis=1) > -1e-12 * lowest.max(axis=1)).all()


def test_a_gap_in_tokens_alone_is_seen_by_the_simple_laws() -> None:
    ladder = simulated_grid()
    sample = _sample(ladder, -0.015 * np.exp(-ladder.cells.x_tokens), sd=0.002)
    found = estimate(sample, as_places(ladder.beyond["10x"]), prior_of=simple_law_prior)[0].interval(0.95)
    truth = -0.015 * np.exp(-float(ladder.beyond["10x"].x_tokens[0]))
    assert found.low < truth < found.high
