"""The simple-law estimator: the gap keeps a simple law in one variable. It misses gaps that turn, and decides nothing.

Two families, c^-γ·(a + b·ln c) and a + b·c^-γ, averaged over γ with equal weight; c is compute relative to the top.
On a grid c is c·r^φ with r tokens per parameter, averaged over φ: tokens alone (φ = 1), compute (0), parameters (-1).
"""

from __future__ import annotations

import numpy as np

from normlab.ladders.statistics.estimators.gaussian import Prior
from normlab.ladders.statistics.estimators.layout import Layout

Array = np.ndarray

LEVEL_SD = 0.10
SLOPE_SD = 0.03
FADES, SETTLES = "fades or grows", "settles"
EXPONENTS = {FADES: np.arange(0.005, 0.606, 0.05), SETTLES: np.arange(0.105, 0.606, 0.05)}
AXES = {
    "parameters alone": -1.0, "mostly parameters": -0.5, "compute": 0.0, "mostly tokens": 0.5, "tokens alone": 1.0
}  # fmt: skip


def simple_law_prior(layout: Layout) -> Prior:
    """The simple-law prior over the cells and places of a layout."""
    axes = AXES if layout.kind == "grid" else {"compute": 0.0}
    covariances, weights, labels = [], [], []
    for axis, tilt in axes.items():
        x = axis_coordinate(layout, tilt)
        for family, exponents in EXPONENTS.items():
            for gamma in exponents:
                features = form_features(family, float(gamma), x) * prior_sds(family)
                covariances.append(features @ features.T)
                weights.append(-np.log(2.0 * len(axes) * len(exponents)))
                labels.append((family, axis))
    return Prior(np.array(covariances), np.array(weights), tuple(labels))


def axis_coordinate(layout: Layout, tilt: float) -> Array:
    """ln of c·r^φ, zero at the top."""
    return layout.compute + tilt * layout.ratio


def form_features(family: str, gamma: float, x: Array) -> Array:
    """The two columns that a and b multiply."""
    power = np.exp(-gamma * x)
    return np.stack([power, power * x] if family == FADES else [np.ones_like(x), power], axis=1)


def prior_sds(family: str) -> Array:
    """Prior standard deviations of a and b."""
    return np.array([LEVEL_SD, SLOPE_SD if family == FADES else LEVEL_SD])
