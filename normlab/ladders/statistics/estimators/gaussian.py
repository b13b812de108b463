"""Posterior of a Gaussian model averaged over its hyperparameters: every cell in closed form, weighted by its evidence.

The gap at cells and places has a normal prior whose covariance depends on hyperparameters (a bend, an exponent), and
cells are measured with normal noise that depends on others. For each pair of them the posterior is normal and linear in
the data, so that many data sets of one design share the factorisations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from normlab.ladders.statistics.estimators.mixture import Mixture
from normlab.numerics.distributions import normal_cdf

Array = np.ndarray


@dataclass(frozen=True)
class Prior:
    """Covariances of the gap over cells followed by places, one for each hyperparameter."""

    covariance: Array
    """[hyperparameters, cells + places, cells + places]."""
    log_weight: Array
    labels: tuple[tuple[str, ...], ...] = ()
    """What each hyperparameter stands for, to sum weights over."""


@dataclass(frozen=True)
class NoiseModel:
    """Covariances of the measured cell means around the true gaps, one for each level of noise."""

    covariance: Array
    """[levels, cells, cells]."""
    log_weight: Array
    new_cell: Array
    """[levels, places]: variance of the mean of new seeds at a new cell there."""


@dataclass(frozen=True)
class Posterior:
    """Weights, means and standard deviations of functionals of the gap, for a batch of data sets."""

    weights: Array
    """[data sets, components]."""
    means: Array
    """[data sets, components, functionals]."""
    sds: Array
    """[components, functionals]."""

    def mixture(self, functional: int, data_set: int = 0) -> Mixture:
        return Mixture(self.weights[data_set], self.means[data_set, :, functional], self.sds[:, functional])

    def below(self, values: Array) -> Array:
        """P(functional ≤ value), [data sets, functionals]."""
        z = (values - self.means) / self.sds
        return np.einsum("bh,bhf->bf", self.weights, normal_cdf(z))


class GaussianModel:
    """Factorised once for a design and a prior; `fit` then takes any number of data sets."""

    def __init__(self, prior: Prior, noise: NoiseModel, functionals: Array, predicts: bool = False) -> None:
        """`functionals` are rows of weights over places; with `predicts` they are means of new seeds there."""
        cells = noise.covariance.shape[-1]
        self.shape = (len(prior.log_weight), len(noise.log_weight))
        own, cross = prior.covariance[:, :cells, :cells], functionals @ prior.covariance[:, cells:, :cells]
        total = own[:, None] + noise.covariance[None]
        self.precision = np.linalg.inv(total).reshape(-1, cells, cells)
        # Not times the inverse: with a prior variance 1e10 times the noise's that leaves no digit of sds.
        gain = np.linalg.solve(total, np.swapaxes(cross, 1, 2)[:, None])
        self.gain = np.swapaxes(gain, 2, 3).reshape(-1, len(functionals), cells)
        before = np.einsum("fp,hpq,fq->hf", functionals, prior.covariance[:, cells:, cells:], functionals)
        explained = np.einsum("kfc,kfc->kf", self.gain, np.repeat(cross, self.shape[1], axis=0))
        variance = np.repeat(before, self.shape[1], axis=0) - explained
        if predicts:
            variance = variance + np.tile(noise.new_cell @ (functionals**2).T, (self.shape[0], 1))
        # Rounding can leave a variance of zero slightly negative.
        self.sds = np.sqrt(np.maximum(variance, 1e-16))
        log_weight = (prior.log_weight[:, None] + noise.log_weight[None, :]).ravel()
        self.log_weight = log_weight - 0.5 * np.linalg.slogdet(total)[1].ravel()

    def fit(self, means: Array) -> Posterior:
        """Posterior given measured cell means, [data sets, cells]."""
        weighted = np.einsum("kij,bj->bki", self.precision, means, optimize=True)
        log_weight = self.log_weight - 0.5 * np.einsum("bki,bi->bk", weighted, means, optimize=True)
        weights = np.exp(log_weight - log_weight.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        return Posterior(weights, np.einsum("kfc,bc->bkf", self.gain, means, optimize=True), self.sds)

    def shape_weights(self, posterior: Posterior, data_set: int = 0) -> Array:
        """Posterior weight of each hyperparameter of the prior."""
        return posterior.weights[data_set].reshape(self.shape).sum(axis=1)
