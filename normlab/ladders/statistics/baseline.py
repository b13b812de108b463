"""The baseline's law, L(C) = E + A·C^-α on a path or L(N, D) = E + A·N^-α + B·D^-β on a grid, averaged over exponents.

Only its values and slopes are used. The slope s = -dL/d ln C turns a gap into a compute multiplier, k = exp(-gap/s); on
a grid it is the slope at constant tokens per parameter. E, A and the exponents are hardly identified by few rungs: E is
shown as a range, given that it lies between zero and the smallest loss measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from normlab.ladders.statistics.answer import BaselineCell, BaselineLaw
from normlab.ladders.statistics.cells import MeanLoss
from normlab.ladders.statistics.estimators.gaussian import GaussianModel, NoiseModel, Prior
from normlab.ladders.statistics.estimators.layout import HasPlace, Layout, layout_of
from normlab.ladders.statistics.estimators.mixture import Mixture
from normlab.ladders.statistics.estimators.noise import BRANCH_CORRELATION, correlation_matrix

Array = np.ndarray

EXPONENTS = np.arange(0.02, 0.62, 0.02)
GRID_EXPONENTS = np.arange(0.05, 0.75, 0.05)
"""For parameters and tokens separately."""
NOISE_SDS = np.array([1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 14.0, 20.0]) * 1e-3
"""Of a cell's mean around the law: seeds, and what a rung does to all schemes."""
LEAST_PLAUSIBLE = 0.05
"""Probability that the law must leave to an E between zero and the smallest loss, so that its range means something."""
_MINIMUM = {"path": 3, "grid": 4}
"""Cells needed: one more than there are linear coefficients."""
_SLOPE_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Slopes:
    """Distribution of the baseline's slope at places, as equally likely values."""

    nodes: Array
    """[places, values]; all positive."""


def fit_baseline(means: Sequence[MeanLoss], level: float) -> BaselineLaw | None:
    """The law with the range of E and the slope at each cell; None with too few cells."""
    if len(means) < 2 or len(means) < _MINIMUM[layout_of(means).kind]:
        return None
    values, slopes, offset = _fit(means, means)
    fitted = np.array([own.mean for own in values])
    losses = np.array([own.loss for own in means])
    kind = layout_of(means).kind
    return BaselineLaw(
        kind="L(C)" if kind == "path" else "L(N, D)",
        text="E + A·C^-α" if kind == "path" else "E + A·N^-α + B·D^-β",
        irreducible=offset.interval_within(0.0, float(losses.min()), level, LEAST_PLAUSIBLE),
        residual_sd=float(np.std(losses - fitted)),
        cells=[
            BaselineCell(
                size=own.place.size, parameters=own.place.parameters, tokens=own.tokens, flops=own.flops, n=own.n,
                loss=own.loss, fitted=float(fitted[index]), slope=slopes[index].interval(level),
            )
            for index, own in enumerate(means)
        ],
    )  # fmt: skip


def slopes_at(means: Sequence[MeanLoss], places: Sequence[HasPlace]) -> Slopes | None:
    """The baseline's slope at places; None with too few cells, or where it may be zero or negative."""
    if len(means) < 2 or len(means) < _MINIMUM[layout_of(means).kind]:
        return None
    _, slopes, _ = _fit(means, places)
    nodes = np.array([[own.quantile(q) for q in _SLOPE_QUANTILES] for own in slopes])
    return Slopes(nodes) if (nodes > 0.0).all() else None


def _fit(means: Sequence[MeanLoss], places: Sequence[HasPlace]) -> tuple[list[Mixture], list[Mixture], Mixture]:
    """Distributions of the loss and of the slope at places, and of E."""
    losses = np.array([own.loss for own in means])
    layout = layout_of(means, places)
    covariance = np.array([_joint(values, slopes, losses) for values, slopes in _features(layout)])
    prior = Prior(covariance, np.zeros(len(covariance)))
    functionals = np.eye(2 * len(places) + 1)
    # E is measured from the smallest loss, so that its prior is centred there.
    model = GaussianModel(prior, _noise(means), functionals)
    posterior = model.fit((losses - losses.min())[None])
    shift = np.concatenate([np.full(len(places), losses.min()), np.zeros(len(places)), [losses.min()]])
    mixtures = [posterior.mixture(index) for index in range(len(functionals))]
    moved = [own.moved(float(by)) for own, by in zip(mixtures, shift, strict=True)]
    return moved[: len(places)], moved[len(places) : -1], moved[-1]


def _features(layout: Layout) -> list[tuple[Array, Array]]:
    """For each set of exponents, columns of the law and of its slope, over cells and places."""
    one, zero = np.ones_like(layout.compute), np.zeros_like(layout.compute)
    if layout.kind == "path":
        powers = [(alpha, np.exp(-alpha * layout.compute)) for alpha in EXPONENTS]
        return [(np.stack([one, p], 1), np.stack([zero, alpha * p], 1)) for alpha, p in powers]
    found = []
    for alpha, beta in itertools.product(GRID_EXPONENTS, repeat=2):
        size, tokens = np.exp(-alpha * layout.size), np.exp(-beta * layout.tokens)
        slope = np.stack([zero, alpha * size / 2.0, beta * tokens / 2.0], 1)
        found.append((np.stack([one, size, tokens], 1), slope))
    return found


def _joint(values: Array, slopes: Array, losses: Array) -> Array:
    """Prior covariance of losses at cells, then of losses and slopes at places, then of E."""
    cells = len(losses)
    rows = np.concatenate([values[:cells], values[cells:], slopes[cells:], np.eye(1, values.shape[1])])
    # Wide: coefficients may be as large as the loss itself.
    scaled = rows * losses.max()
    return scaled @ scaled.T


def _noise(means: Sequence[MeanLoss]) -> NoiseModel:
    trunks = np.array([own.trunk for own in means])
    correlated = correlation_matrix(trunks, BRANCH_CORRELATION)
    covariance = NOISE_SDS[:, None, None] ** 2 * correlated
    return NoiseModel(covariance, np.zeros(len(NOISE_SDS)), np.zeros((len(NOISE_SDS), 1)))
