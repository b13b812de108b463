"""Fit decay and growth rates (exponential, stretched exponential, power law) to a trajectory, with 95 % intervals.

A quantity that decays like e^{−a t^q} (exponential for q = 1, stretched for q = 1/2) or like t^{−a} is a straight line
in a suitable time variable. Points of one trajectory are not independent, so the residuals do not give an interval:
it is computed from the slopes of several segments of the trajectory, or of several trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from normlab.errors import NormLabError
from normlab.numerics.power_law import line
from normlab.numerics.student_t import t_interval

RateForm = Literal["exponential", "stretched", "power"]
FORMS: tuple[RateForm, ...] = ("exponential", "stretched", "power")
FORMULAS: dict[RateForm, str] = {"exponential": "e^(a t)", "stretched": "e^(a √t)", "power": "t^a"}

_STRETCHES = 5
"""Number of segments of a trajectory whose slopes give the interval."""
_LEAST = 2 * _STRETCHES
"""Smallest number of points of a fit."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A fitted law: value ≈ C e^{a x(t)} with x = t, √(t + 1) or log t."""

    form: RateForm
    value: float
    """The rate a."""
    low: float
    high: float
    """95 % interval of a."""
    begin: float
    end: float
    """First and last time of the fit."""
    intercept: float
    """log C."""

    def at(self, time: float) -> float:
        """The fitted value at a time."""
        return math.exp(self.intercept + self.value * float(_clock(self.form, np.asarray(time))))

    @property
    def formula(self) -> str:
        return FORMULAS[self.form].replace("a", f"{self.value:.4g}")

    def __str__(self) -> str:
        return f"{self.formula} (95 %: {self.low:.4f} to {self.high:.4f})"


def fit_rate(times: Sequence[float], values: Sequence[float], form: RateForm) -> Rate:
    """Fit a rate of the given form to all points."""
    t, y = _points(times, values)
    x = _clock(form, t)
    slope, intercept = line(x, y)
    # Segments of equal length in the time variable of the form, so that none is a single point.
    edges = np.linspace(x[0], x[-1], _STRETCHES + 1)
    pieces = [(x >= low) & (x <= high) for low, high in pairwise(edges)]
    slopes = [line(x[piece], y[piece])[0] for piece in pieces if piece.sum() >= 2]
    low, high = _interval(slope, slopes)
    return Rate(form=form, value=slope, low=low, high=high, begin=float(t[0]), end=float(t[-1]), intercept=intercept)


def fit_best_form(times: Sequence[float], values: Sequence[float]) -> Rate:
    """Fit the form whose slope changes least along the trajectory."""
    return fit_best_common_form([(times, values)])[0]


def fit_best_common_form(trajectories: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[Rate]:
    """Fit one form to several trajectories (times, values): that whose slopes change least, by the median over them."""
    found = [[fit_rate(times, values, form) for times, values in trajectories] for form in FORMS]
    return min(found, key=lambda rates: float(np.median([_change(rate) for rate in rates])))


def _change(rate: Rate) -> float:
    return (rate.high - rate.low) / max(abs(rate.value), 1e-12)


def pool_rates(rates: Sequence[Rate]) -> Rate:
    """Mean rate of several trajectories, with the interval from their spread."""
    if len(rates) == 1:
        return rates[0]
    mean = float(np.mean([rate.value for rate in rates]))
    low, high = _interval(mean, [rate.value for rate in rates])
    first = rates[0]
    return Rate(
        form=first.form,
        value=mean,
        low=low,
        high=high,
        begin=first.begin,
        end=first.end,
        intercept=float(np.mean([rate.intercept for rate in rates])),
    )


def tail_slice(times: Sequence[float], values: Sequence[float], *, floor: float, share: float = 0.5) -> slice:
    """Points of the tail, as a slice: the last `share` of those above the numerical floor."""
    begin = next((place for place, time in enumerate(times) if time > 0), len(times))
    # Values above the floor after the first one below it are noise.
    end = next((place for place in range(begin, len(values)) if not values[place] > floor), len(values))
    first = begin + int((end - begin) * (1 - share))
    return slice(first, end) if end - first >= _LEAST else slice(0, 0)


def variance_floor(dtype: str) -> float:
    """Variance below which rounding errors of a dtype dominate, with a margin."""
    return 1e6 * float(np.finfo(dtype).eps) ** 2


def _points(times: Sequence[float], values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    t, y = np.asarray(times, dtype=float), np.asarray(values, dtype=float)
    if len(t) != len(y) or len(t) < _LEAST:
        raise NormLabError(f"a fit takes {_LEAST} looks at least, got {len(t)} times and {len(y)} values")
    if not (np.isfinite(t).all() and np.isfinite(y).all() and (y > 0).all() and (t > 0).all()):
        raise NormLabError("a fit takes positive times and values; leave out time zero and what is below precision")
    return t, np.log(y)


def _clock(form: RateForm, t: np.ndarray) -> np.ndarray:
    return {"exponential": t, "stretched": np.sqrt(t + 1), "power": np.log(np.maximum(t, 1e-300))}[form]


def _interval(centre: float, values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return math.nan, math.nan
    half = t_interval(0.95, len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return centre - half, centre + half
