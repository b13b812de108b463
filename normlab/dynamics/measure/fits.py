"""Rates of decay and growth fitted to an orbit, with intervals.

A quantity that decays like e^{−a t^q} (exponential for q = 1, stretched for q = 1/2) or like t^{−a} is a straight line
in its own clock. Points of one orbit are no independent draws, so the scatter about the line says nothing: the interval
is that of the slopes of several stretches of the orbit, or of several orbits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from normlab.errors import NormLabError
from normlab.utils.student_t import t_interval

Form = Literal["exponential", "stretched", "power"]
FORMS: tuple[Form, ...] = ("exponential", "stretched", "power")
FORMULAS: dict[Form, str] = {"exponential": "e^(a t)", "stretched": "e^(a √t)", "power": "t^a"}

_STRETCHES = 5
"""Pieces of an orbit whose slopes give the interval."""
_LEAST = 2 * _STRETCHES
"""Looks that a fit takes."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A fitted law: value ≈ C e^{a x(t)} with x = t, √(t + 1) or log t."""

    form: Form
    value: float
    """a."""
    low: float
    high: float
    """95 % interval of a."""
    begin: float
    end: float
    """Times of the first and the last look that were fitted."""
    intercept: float
    """log C."""

    def at(self, time: float) -> float:
        """The fitted value."""
        return math.exp(self.intercept + self.value * float(_clock(self.form, np.asarray(time))))

    @property
    def formula(self) -> str:
        return FORMULAS[self.form].replace("a", f"{self.value:.4g}")

    def __str__(self) -> str:
        return f"{self.formula} (95 %: {self.low:.4f} to {self.high:.4f})"


def fit(times: Sequence[float], values: Sequence[float], form: Form) -> Rate:
    """The rate over all given looks."""
    t, y = _points(times, values)
    x = _clock(form, t)
    slope, intercept = _line(x, y)
    # Stretches of equal length in the clock of the form, so that none is a mere point.
    edges = np.linspace(x[0], x[-1], _STRETCHES + 1)
    pieces = [(x >= low) & (x <= high) for low, high in pairwise(edges)]
    slopes = [_line(x[piece], y[piece])[0] for piece in pieces if piece.sum() >= 2]
    low, high = _interval(slope, slopes)
    return Rate(form=form, value=slope, low=low, high=high, begin=float(t[0]), end=float(t[-1]), intercept=intercept)


def best(times: Sequence[float], values: Sequence[float]) -> Rate:
    """The form whose slope changes least along the orbit."""
    found = [fit(times, values, form) for form in FORMS]
    return min(found, key=lambda rate: (rate.high - rate.low) / max(abs(rate.value), 1e-12))


def pooled(rates: Sequence[Rate]) -> Rate:
    """One rate of several orbits, with the interval that they give together."""
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


def tail(times: Sequence[float], values: Sequence[float], *, floor: float, share: float = 0.5) -> slice:
    """The looks of the tail: the last `share` of those whose value is above the floor that precision sets."""
    begin = next((place for place, time in enumerate(times) if time > 0), len(times))
    # Once below the floor, a value that rises above it again is noise.
    end = next((place for place in range(begin, len(values)) if not values[place] > floor), len(values))
    first = begin + int((end - begin) * (1 - share))
    return slice(first, end) if end - first >= _LEAST else slice(0, 0)


def floor_of(dtype: str) -> float:
    """Var below which rounding speaks: that of directions rounded to the format, with a margin."""
    return 1e6 * float(np.finfo(dtype).eps) ** 2


def _points(times: Sequence[float], values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    t, y = np.asarray(times, dtype=float), np.asarray(values, dtype=float)
    if len(t) != len(y) or len(t) < _LEAST:
        raise NormLabError(f"a fit takes {_LEAST} looks at least, got {len(t)} times and {len(y)} values")
    if not (np.isfinite(t).all() and np.isfinite(y).all() and (y > 0).all() and (t > 0).all()):
        raise NormLabError("a fit takes positive times and values; leave out time zero and what is below precision")
    return t, np.log(y)


def _clock(form: Form, t: np.ndarray) -> np.ndarray:
    return {"exponential": t, "stretched": np.sqrt(t + 1), "power": np.log(np.maximum(t, 1e-300))}[form]


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    apart = x - x.mean()
    slope = float((apart * (y - y.mean())).sum() / (apart**2).sum())
    return slope, float(y.mean() - slope * x.mean())


def _interval(centre: float, values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return math.nan, math.nan
    half = t_interval(0.95, len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return centre - half, centre + half
