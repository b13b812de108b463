"""Mixtures of normal distributions: probabilities, and quantiles from the distribution function instead of draws."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from normlab.ladders.statistics.answer import Interval
from normlab.utils.distributions import normal_cdf

_NEGLIGIBLE = 1e-7
"""Share of the weight that may be dropped: far below what moves a quantile that is printed."""


@dataclass(frozen=True)
class Mixture:
    """Components with weights that sum to one."""

    weights: np.ndarray
    means: np.ndarray
    sds: np.ndarray

    @property
    def mean(self) -> float:
        return float(self.weights @ self.means)

    @property
    def sd(self) -> float:
        second = self.weights @ (self.sds**2 + (self.means - self.mean) ** 2)
        return float(np.sqrt(second))

    def below(self, value: float) -> float:
        """P(X ≤ value)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            z = (value - self.means) / self.sds
        # A component without spread is a step.
        return float(self.weights @ normal_cdf(np.where(np.isnan(z), 0.0, z)))

    def quantile(self, probability: float) -> float:
        """The value with P(X ≤ value) = probability, by bisection to a relative width of 1e-10."""
        kept = self._without_negligible()
        reach = 10.0 * kept.sds
        low, high = float((kept.means - reach).min()), float((kept.means + reach).max())
        tolerance = 1e-10 * max(high - low, 1e-12)
        while high - low > tolerance:
            middle = (low + high) / 2.0
            low, high = (middle, high) if kept.below(middle) < probability else (low, middle)
        return (low + high) / 2.0

    def interval(self, level: float) -> Interval:
        """The central interval."""
        tail = (1.0 - level) / 2.0
        return Interval(self.quantile(tail), self.quantile(1.0 - tail), self.mean, level)

    def _without_negligible(self) -> Mixture:
        order = np.argsort(-self.weights)
        needed = int(np.searchsorted(np.cumsum(self.weights[order]), 1.0 - _NEGLIGIBLE)) + 1
        kept = order[:needed]
        return Mixture(self.weights[kept] / self.weights[kept].sum(), self.means[kept], self.sds[kept])
