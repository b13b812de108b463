"""Noise of the cells' mean gaps: seeds, and what all seeds of a cell share.

The mean over S seeds at a cell has variance σ²/S + τ². σ is estimated from the spread over seeds, pooled over cells; τ
(a rate a little off, rounding of shapes) is not seen by seeds and has a prior. Cells that branch from one trunk share
most of their path: both noises are correlated between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from normlab.ladders.statistics.gaussian import NoiseModel
from normlab.utils.distributions import chi_square_quantile

Array = np.ndarray

BRANCH_CORRELATION = 0.75
RUNG_SDS = np.array([0.0, 1.0, 2.0, 4.0, 6.0, 9.0, 13.0]) * 1e-3
RUNG_SCALE = 5e-3
"""Scale of the half-normal weight of τ."""
ASSUMED_RUNG_SD = 0.003
"""τ where one value is needed: without it, seeds would reject every form and list every cell."""
ASSUMED_SEED_SD = 0.007
ASSUMED_DF = 2.0
"""Weight of the assumed σ where seeds give fewer than `FEW_DF` degrees of freedom."""
FEW_DF = 4.0
_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
_SMALLEST_SD = 1e-5
"""Keeps covariances regular for data without noise."""


@dataclass(frozen=True)
class SeedNoise:
    """Standard deviation of a paired difference over seeds, and the degrees of freedom of its estimate."""

    sd: float
    df: float


def mean_sd(noise: SeedNoise, seeds: int) -> float:
    """Standard deviation of a cell's mean, with the assumed effect of a rung on the scheme alone."""
    return math.sqrt(noise.sd**2 / seeds + ASSUMED_RUNG_SD**2)


def pooled(differences: Sequence[Array], groups: Sequence[int]) -> SeedNoise:
    """Pool the spread over seeds; cells of one trunk count for less than independent ones."""
    centred = sum(float(((own - own.mean()) ** 2).sum()) for own in differences)
    free = sum(len(own) - 1 for own in differences)
    effective = effective_df([len(own) for own in differences], groups)
    if effective >= FEW_DF:
        return SeedNoise(max(math.sqrt(centred / free), _SMALLEST_SD), effective)
    variance = centred / free if free else 0.0
    df = effective + ASSUMED_DF
    return SeedNoise(math.sqrt((effective * variance + ASSUMED_DF * ASSUMED_SEED_SD**2) / df), df)


def effective_df(seeds: Sequence[int], groups: Sequence[int]) -> float:
    """Degrees of freedom of the pooled spread (Satterthwaite): cells of one trunk repeat each other in part."""
    found = 0.0
    for group in sorted(set(groups)):
        free = [own - 1 for own, at in zip(seeds, groups, strict=True) if at == group and own > 1]
        # The trace of the block squared over the trace of its square.
        found += sum(free) / (1.0 + (len(free) - 1) * BRANCH_CORRELATION**2) if free else 0.0
    return found


def noise_model(
    seeds: Array, groups: Array, estimate: SeedNoise, new_seeds: int = 1, correlation: float = BRANCH_CORRELATION
) -> NoiseModel:
    """Covariance of cell means for every level of σ and τ; `seeds` and `groups` have one number a cell."""
    same = groups[:, None] == groups[None, :]
    correlated = np.where(same, correlation, 0.0) + (1.0 - correlation) * np.eye(len(groups))
    # Cells of one trunk with different numbers of seeds share those of the smaller number.
    per_seed = correlated / np.maximum.outer(seeds, seeds)
    sds = [estimate.sd * math.sqrt(estimate.df / chi_square_quantile(q, round(estimate.df, 6))) for q in _QUANTILES]
    levels = [(max(sd, _SMALLEST_SD), tau) for sd in sds for tau in RUNG_SDS]
    covariance = np.array([sd**2 * per_seed + tau**2 * correlated for sd, tau in levels])
    log_weight = np.array([-0.5 * (tau / RUNG_SCALE) ** 2 for _, tau in levels])
    new_cell = np.array([sd**2 / new_seeds + tau**2 for sd, tau in levels])
    return NoiseModel(covariance, log_weight, new_cell)
