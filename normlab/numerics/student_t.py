"""Student's t distribution, central and noncentral, in double precision, for confidence intervals over seeds.

By hand and not from scipy, so that the base install stays light and statistics can be imported without it; the tests
compare with scipy.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from normlab.errors import NormLabError


def t_interval(level: float, df: int) -> float:
    """Two-sided critical value: the t > 0 with P(|T| ≤ t) = level, for `df` degrees of freedom.

    Newton's method from 0: P(|T| > t) is decreasing and convex, so the steps approach the root from below.
    """
    if df < 1:
        raise NormLabError(f"degrees of freedom must be at least 1, got {df}")
    outside = 1.0 - level
    t = 0.0
    while True:
        following = t + (t_outside(t, df) - outside) / (2.0 * _density(t, df))
        # Stop when the increment is below the rounding error or negative.
        if following <= t * (1.0 + 1e-15):
            return t
        t = following


def t_outside(t: float, df: int) -> float:
    """Two-sided p-value P(|T| > t): the regularised incomplete beta function at df / (df + t²)."""
    square = t * t
    if math.isinf(square):
        return 0.0
    return beta_ratio(df / (df + square), square / (df + square), df / 2.0, 0.5)


def shifted_outside(t: float, shift: float, df: int) -> float:
    """P(|T| > t) for the noncentral T: the normal tails averaged over the estimated standard deviation.

    The estimate s (true value 1) has a standard deviation of about 1 / √(2 df); twelve of them cover it in double
    precision.
    """
    low, high = max(0.0, 1.0 - 12.0 / math.sqrt(2.0 * df)), 1.0 + 12.0 / math.sqrt(2.0 * df)
    nodes, weights = _gauss()
    s = low + (high - low) * (nodes + 1.0) / 2.0
    scale = math.log(2.0) + df / 2.0 * math.log(df / 2.0) - math.lgamma(df / 2.0)
    density = np.exp(scale + (df - 1) * np.log(s) - df * s * s / 2.0)
    tails = [_normal_above(t * x - shift) + _normal_above(t * x + shift) for x in s]
    return float((density * weights) @ np.array(tails)) * (high - low) / 2.0


@cache
def _gauss() -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(200)


def _normal_above(z: float) -> float:
    return math.erfc(z / math.sqrt(2.0)) / 2.0


def _density(t: float, df: int) -> float:
    scale = math.lgamma((df + 1) / 2.0) - math.lgamma(df / 2.0) - 0.5 * math.log(df * math.pi)
    return math.exp(scale - (df + 1) / 2.0 * math.log1p(t * t / df))


def beta_ratio(x: float, rest: float, a: float, b: float) -> float:
    """Regularised incomplete beta I_x(a, b); `rest` is 1 - x, passed separately to avoid cancellation."""
    if x <= 0.0 or rest <= 0.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - beta_ratio(rest, x, b, a)
    front = a * math.log(x) + b * math.log(rest) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(front) / (a * _beta_fraction(x, a, b))


def _beta_fraction(x: float, a: float, b: float, terms: int = 200) -> float:
    """The continued fraction of the incomplete beta function (DLMF 8.17.22), evaluated from its last term."""
    value = 1.0
    for k in range(terms, 0, -1):
        m = k // 2
        if k % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        value = 1.0 + d / value
    return value
