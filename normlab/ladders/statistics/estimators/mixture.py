"""Mixtures of normal distributions: probabilities, and quantiles from the distribution function instead of draws."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from normlab.ladders.statistics.answer import Interval
from normlab.numerics.distributions import normal_cdf

_NEGLIGIBLE = 1e-7
"""Share of the weight that may be dropped: far below what moves a quantile that is printed."""
_MOST_STEPS = 200
_ROOT = float(np.sqrt(2.0 * np.pi))


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

    def density(self, value: float) -> float:
        """The probability density at a value."""
        z = (value - self.means) / np.maximum(self.sds, 1e-300)
        return float(self.weights @ (np.exp(-0.5 * np.minimum(z * z, 1400.0)) / np.maximum(self.sds, 1e-300)) / _ROOT)

    def quantile(self, probability: float) -> float:
        """The value with P(X ≤ value) = probability: Newton's method inside a bracket that shrinks."""
        kept = self._without_negligible()
        reach = 8.0 * kept.sds
        low, high = float((kept.means - reach).min()), float((kept.means + reach).max())
        value, tolerance = kept.mean, 1e-9 * max(kept.sd, 1e-12)
        for _ in range(_MOST_STEPS):
            excess = kept.below(value) - probability
            low, high = (low, value) if excess > 0.0 else (value, high)
            density = kept.density(value)
            following = value - excess / density if density > 0.0 else low
            # Outside the bracket Newton's step is of no use: halve instead.
            following = following if low < following < high else (low + high) / 2.0
            if abs(following - value) <= tolerance or high - low <= tolerance:
                return following
            value = following
        return value

    def moved(self, by: float) -> Mixture:
        """The distribution of X + by."""
        return Mixture(self.weights, self.means + by, self.sds)

    def interval(self, level: float) -> Interval:
        """The central interval."""
        tail = (1.0 - level) / 2.0
        return Interval(self.quantile(tail), self.quantile(1.0 - tail), self.mean, level)

    def interval_within(self, low: float, high: float, level: float, least: float) -> Interval | None:
        """The central interval given that X lies between two values; None if it does with less than `least`."""
        below, above = self.below(low), 1.0 - self.below(high)
        inside, tail = 1.0 - below - above, (1.0 - level) / 2.0
        if inside < least:
            return None
        first, last = (self.quantile(below + share * inside) for share in (tail, 1.0 - tail))
        return Interval(first, last, self._mean_within(low, high) / inside, level)

    def _mean_within(self, low: float, high: float) -> float:
        """The integral of x over the density between two values."""
        sds = np.maximum(self.sds, 1e-300)
        z = (np.array([[low], [high]]) - self.means) / sds
        density = np.exp(-0.5 * np.minimum(z * z, 1400.0)) / _ROOT
        shares = normal_cdf(z[1]) - normal_cdf(z[0])
        return float(self.weights @ (self.means * shares - sds * (density[1] - density[0])))

    def _without_negligible(self) -> Mixture:
        order = np.argsort(-self.weights)
        needed = int(np.searchsorted(np.cumsum(self.weights[order]), 1.0 - _NEGLIGIBLE)) + 1
        kept = order[:needed]
        return Mixture(self.weights[kept] / self.weights[kept].sum(), self.means[kept], self.sds[kept])
