"""Simple forms of the gap, fitted one by one: which of them the cells reject, and which sign the others give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from normlab.ladders.statistics.answer import Interval
from normlab.ladders.statistics.baseline import slopes_at
from normlab.ladders.statistics.cells import MeanLoss
from normlab.ladders.statistics.estimators.fit import Sample
from normlab.ladders.statistics.estimators.layout import HasPlace, layout_of
from normlab.ladders.statistics.estimators.noise import ASSUMED_RUNG_SD, correlation_matrix
from normlab.ladders.statistics.estimators.simple_law import (
    AXES,
    EXPONENTS,
    FADES,
    SETTLES,
    axis_coordinate,
    form_features,
)
from normlab.numerics.distributions import f_above
from normlab.numerics.student_t import t_interval

Array = np.ndarray

_REJECTED = 0.05
_LARGEST_DRIFT = math.log(1.1)
"""In ln k a decade: a ladder that cannot exclude more says nothing about a constant multiplier."""
_SIGN = 0.001
"""A gap below this many nats has no sign."""


@dataclass(frozen=True)
class FormFit:
    """One form, fitted by weighted least squares."""

    name: str
    value: float
    """Gap at the place."""
    p: float
    """Of the test that the form fits."""
    error: float
    """Standard error of the value."""

    @property
    def is_rejected(self) -> bool:
        return self.p < _REJECTED


def fit_forms(sample: Sample, place: HasPlace, baseline: Sequence[MeanLoss]) -> list[FormFit]:
    """All forms that have fewer coefficients than there are cells, at one place."""
    layout = layout_of(sample.places, [place])
    forms: list[tuple[str, Array]] = []
    slopes = slopes_at(baseline, [*sample.places, place])
    if slopes is not None:
        middle = slopes.nodes[:, slopes.nodes.shape[1] // 2]
        forms.append(("constant multiplier", middle[:, None]))
        forms.append(("drifting multiplier", np.stack([middle, middle * layout.compute], 1)))
    for axis, tilt in (AXES if layout.kind == "grid" else {"compute": 0.0}).items():
        x = axis_coordinate(layout, tilt)
        forms.append((f"line in {axis}", form_features(FADES, 0.0, x)))
        for gamma in map(float, EXPONENTS[SETTLES]):
            like = f"{axis} (exponent {gamma:.3g})"
            forms.append((f"power of {like}", form_features(FADES, gamma, x)[:, :1]))
            forms.append((f"settles in {like}", form_features(SETTLES, gamma, x)))
            forms.append((f"fades in {like}", form_features(FADES, gamma, x)))
    return [_fit(name, columns, sample) for name, columns in forms if columns.shape[1] < layout.cells]


def opposite_signs(fits: Sequence[FormFit]) -> tuple[FormFit, FormFit] | None:
    """The best fitting forms with a negative and a positive gap, among those not rejected; None if all agree."""
    kept = [fit for fit in fits if not fit.is_rejected]
    below = [fit for fit in kept if fit.value < -_SIGN]
    above = [fit for fit in kept if fit.value > _SIGN]
    if not below or not above:
        return None
    return max(below, key=lambda fit: fit.p), max(above, key=lambda fit: fit.p)


def constant_multiplier(sample: Sample, place: HasPlace, baseline: Sequence[MeanLoss], level: float) -> Interval | None:
    """Gap at the place if the multiplier is constant, by Student's t over trunks; None where that is rejected."""
    trunks, slopes = len(set(sample.groups.tolist())), slopes_at(baseline, [*sample.places, place])
    if slopes is None or trunks < 3:
        return None
    x, slope = layout_of(sample.places, [place]).compute, slopes.nodes[:, slopes.nodes.shape[1] // 2]
    # The drift of ln k over a decade of compute: evaluated by a last row that is not a place.
    drift_row = np.array([[0.0, np.log(10.0)]])
    columns = np.concatenate([np.stack([slope, slope * x], 1)[:-1], drift_row])
    drift = _fit("drift", columns, sample)
    width = t_interval(level, trunks - 2) * drift.error
    if not abs(drift.value) <= width < _LARGEST_DRIFT:
        return None
    found = _fit("constant multiplier", slope[:, None], sample)
    half = t_interval(level, trunks - 1) * found.error
    return Interval(found.value - half, found.value + half, found.value, level)


def cell_covariance(sample: Sample) -> Array:
    """Covariance of cell means at the estimated noise of seeds and the assumed one of rungs."""
    correlated = correlation_matrix(sample.groups, sample.noise.branch)
    sds = sample.noise.sds(sample.tokens)
    per_seed = np.outer(sds, sds) / np.maximum.outer(sample.seeds, sample.seeds)
    return (per_seed + ASSUMED_RUNG_SD**2) * correlated


def _fit(name: str, columns: Array, sample: Sample) -> FormFit:
    cells, coefficients = len(sample.means), columns.shape[1]
    lower = np.linalg.cholesky(cell_covariance(sample))
    white, y = np.linalg.solve(lower, columns[:cells]), np.linalg.solve(lower, sample.means)
    found, *_ = np.linalg.lstsq(white, y, rcond=None)
    free = cells - coefficients
    lack = float(((y - white @ found) ** 2).sum()) / free
    spread = columns[-1] @ np.linalg.pinv(white.T @ white) @ columns[-1]
    error = float(np.sqrt(spread * max(lack, 1.0)))
    return FormFit(name, float(columns[-1] @ found), f_above(lack, free, sample.noise.df), error)
