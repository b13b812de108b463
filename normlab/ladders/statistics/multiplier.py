"""Compute multipliers, k = exp(-gap / s) with s the baseline's slope, whose error is carried along.

That is the multiplier in tokens and size. In FLOPs it is less where the scheme needs more of them than the baseline for
the same tokens, k·C₀/C₁, and in time k times the ratio of speeds.

The gap's error and the slope's are taken as independent: the first comes from paired differences, the second mostly
from what a rung does to all schemes.
"""

from __future__ import annotations

import numpy as np

from normlab.ladders.statistics.answer import Interval
from normlab.ladders.statistics.estimators.mixture import Mixture

Array = np.ndarray


def log_multiplier(gap: Mixture, slope_nodes: Array) -> Mixture:
    """Distribution of ln k = -gap / s over equally likely slopes."""
    return Mixture(
        np.concatenate([gap.weights / len(slope_nodes)] * len(slope_nodes)),
        np.concatenate([-gap.means / slope for slope in slope_nodes]),
        np.concatenate([gap.sds / slope for slope in slope_nodes]),
    )


def multiplier(gap: Mixture, slope_nodes: Array, level: float, ratio: float) -> Interval:
    """Interval of k, times a ratio of FLOPs or speeds; its `mean` is exp(mean of ln k)."""
    found = log_multiplier(gap, slope_nodes).interval(level)
    low, high, mean = (ratio * float(np.exp(value)) for value in (found.low, found.high, found.mean))
    return Interval(low, high, mean, level)


def change_functionals(bottom: Array, top: Array) -> Array:
    """Rows over (bottom, top) that are ln k at the top less ln k at the bottom, for every pair of slopes."""
    return np.array([[1.0 / below, -1.0 / above] for below in bottom for above in top])


def average(mixtures: list[Mixture]) -> Mixture:
    """The mixture of equally likely mixtures."""
    return Mixture(
        np.concatenate([own.weights for own in mixtures]) / len(mixtures),
        np.concatenate([own.means for own in mixtures]),
        np.concatenate([own.sds for own in mixtures]),
    )
