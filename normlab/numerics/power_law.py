"""Power laws: fit value = c · x^p by least squares in logarithms, with an interval for the exponent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from normlab.errors import NormLabError
from normlab.numerics.student_t import t_interval


@dataclass(frozen=True, kw_only=True)
class Fit:
    """value = e^intercept · depth^exponent; the interval is None without degrees of freedom to estimate it."""

    exponent: float
    intercept: float
    low: float | None
    high: float | None
    n: int
    """Number of points, or seeds, in the fit."""
    level: float = 0.95

    def at(self, depth: float) -> float:
        """The fitted value at a depth; 0 or infinite outside the range of floats."""
        with np.errstate(over="ignore", under="ignore"):
            return float(np.exp(self.intercept + self.exponent * math.log(depth)))


def power_law(depths: Sequence[float], values: Sequence[float], *, level: float = 0.95) -> Fit:
    """Fit value = c · depth^p by least squares in logarithms, with Student's t interval for p; depths may repeat."""
    if len(depths) != len(values) or len(set(depths)) < 2:
        raise NormLabError(f"power law: expected one value for each of two or more depths, got {list(depths)}")
    if not all(math.isfinite(x) and x > 0.0 for x in (*depths, *values)):
        raise NormLabError("power law: depths and values must be positive and finite")
    x, y = np.log(np.asarray(depths, dtype=float)), np.log(np.asarray(values, dtype=float))
    slope, intercept = line(x, y)
    free = len(x) - 2
    if free == 0:
        return Fit(exponent=slope, intercept=intercept, low=None, high=None, n=len(x), level=level)
    left = float(((y - slope * x - intercept) ** 2).sum()) / free
    half = t_interval(level, free) * math.sqrt(left / float(((x - x.mean()) ** 2).sum()))
    return Fit(exponent=slope, intercept=intercept, low=slope - half, high=slope + half, n=len(x), level=level)


def mean_fit(fits: Sequence[Fit], *, level: float = 0.95) -> Fit:
    """The mean of fits to several seeds, with Student's t interval of the exponent over the seeds."""
    if not fits:
        raise NormLabError("power law: expected the fit of at least one seed, got none")
    exponents = [fit.exponent for fit in fits]
    mean, half = float(np.mean(exponents)), half_width(exponents, level)
    low, high = (None, None) if half is None else (mean - half, mean + half)
    intercept = float(np.mean([fit.intercept for fit in fits]))
    return Fit(exponent=mean, intercept=intercept, low=low, high=high, n=len(fits), level=level)


def half_width(values: Sequence[float], level: float) -> float | None:
    """Half of Student's t interval of a mean; None for a single value."""
    if len(values) < 2:
        return None
    return t_interval(level, len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Slope and intercept of a least-squares line."""
    apart = x - x.mean()
    slope = float((apart * (y - y.mean())).sum() / (apart**2).sum())
    return slope, float(y.mean() - slope * x.mean())
