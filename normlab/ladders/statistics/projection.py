"""The gap beyond the ladder if it stays smooth, if it keeps a simple law, and if the compute multiplier is constant."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from normlab.ladders.statistics.answer import Place, Projection
from normlab.ladders.statistics.baseline import slopes_at
from normlab.ladders.statistics.cells import MeanLoss
from normlab.ladders.statistics.estimators.fit import Sample, estimate
from normlab.ladders.statistics.estimators.layout import tokens_share
from normlab.ladders.statistics.estimators.mixture import Mixture
from normlab.ladders.statistics.estimators.simple_law import simple_law_prior
from normlab.ladders.statistics.forms import constant_multiplier
from normlab.ladders.statistics.multiplier import multiplier
from normlab.numerics.distributions import normal_cdf

NEXT_RUNG = 3.5
TEN_TIMES = 10.0
SMOOTH_UP_TO = 100.0
"""Beyond this multiple of the top, even the smooth estimator needs the gap to stay as smooth as within the ladder."""

_BOTH_AND_SUM = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(40)
_NEGLIGIBLE = 1e-6


def times_top(cells: Sequence[Place], times: float) -> Place:
    """The place with a multiple of the top's compute where the ladder leads; a grid keeps tokens per parameter."""
    top, share = max(cells, key=lambda place: place.flops), tokens_share(cells)
    what = {0.0: " in size", 1.0: " in tokens"}.get(share, "")
    return Place(
        name=f"{times:g} × the top{what}", size="", parameters=round(top.parameters * times ** (1.0 - share)),
        tokens=round(top.tokens * times**share), flops=top.flops * times,
    )  # fmt: skip


def project(
    sample: Sample, top: Place, places: Sequence[Place], baseline: Sequence[MeanLoss], level: float
) -> list[Projection]:
    """Projections to all places."""
    return [_project(sample, top, place, baseline, level) for place in places]


def _project(sample: Sample, top: Place, place: Place, baseline: Sequence[MeanLoss], level: float) -> Projection:
    smooth = estimate(sample, [place, top], _BOTH_AND_SUM)
    simple = estimate(sample, [place, top], _BOTH_AND_SUM, simple_law_prior)
    slopes, flops_ratio = slopes_at(baseline, [place]), sample.flops_ratio(place)
    return Projection(
        place=place,
        times_top=place.flops / top.flops,
        gap=smooth[0].interval(level),
        simple_law=simple[0].interval(level),
        constant_multiplier=constant_multiplier(sample, place, baseline, level),
        multiplier=multiplier(smooth[0], slopes.nodes[0], level, flops_ratio) if slopes is not None else None,
        shrinks=_is_smaller(*smooth),
        shrinks_simple_law=_is_smaller(*simple),
        is_smoothness=place.flops > SMOOTH_UP_TO * top.flops,
    )


def _is_smaller(there: Mixture, top: Mixture, both: Mixture) -> float:
    """P(|there| < |top|): over the top's distribution by quadrature, given it in closed form."""
    kept = there.weights > _NEGLIGIBLE
    weights, variance = there.weights[kept], top.sds[kept] ** 2
    shared = (both.sds[kept] ** 2 - there.sds[kept] ** 2 - variance) / 2.0
    at_top = top.means[kept][:, None] + top.sds[kept][:, None] * _NODES
    middle = there.means[kept][:, None] + (shared / variance)[:, None] * (at_top - top.means[kept][:, None])
    sd = np.sqrt(np.maximum(there.sds[kept] ** 2 - shared**2 / variance, 1e-16))[:, None]
    inside = normal_cdf((np.abs(at_top) - middle) / sd) - normal_cdf((-np.abs(at_top) - middle) / sd)
    return float(weights @ (inside @ _WEIGHTS) / (_WEIGHTS.sum() * weights.sum()))
