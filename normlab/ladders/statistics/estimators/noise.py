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

from normlab.ladders.statistics.estimators.gaussian import NoiseModel
from normlab.numerics.distributions import chi_square_quantile

Array = np.ndarray

BRANCH_CORRELATION = 0.75
"""Expected correlation between branches of a trunk; what the seeds show is averaged with it."""
BRANCH_DF = 4.0
"""Weight of the expectation, in degrees of freedom."""
BRANCH_ERROR = 0.12
"""The correlation is averaged over the estimate plus and minus this."""
_STRONGEST = 0.95
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
    """Noise of a paired difference over seeds."""

    sd: float
    df: float
    """Degrees of freedom of the estimated standard deviation."""
    branch: float = BRANCH_CORRELATION
    """Correlation between branches of one trunk."""


def mean_sd(noise: SeedNoise, seeds: int) -> float:
    """Standard deviation of a cell's mean, with the assumed effect of a rung on the scheme alone."""
    return math.sqrt(noise.sd**2 / seeds + ASSUMED_RUNG_SD**2)


def pooled(differences: Sequence[Array], groups: Sequence[int]) -> SeedNoise:
    """Pool the spread over seeds; cells of one trunk count for less than independent ones."""
    centred = sum(float(((own - own.mean()) ** 2).sum()) for own in differences)
    free = sum(len(own) - 1 for own in differences)
    branch = branch_correlation(differences, groups)
    effective = effective_df([len(own) for own in differences], groups, branch)
    if effective >= FEW_DF:
        return SeedNoise(max(math.sqrt(centred / free), _SMALLEST_SD), effective, branch)
    variance = centred / free if free else 0.0
    df = effective + ASSUMED_DF
    return SeedNoise(math.sqrt((effective * variance + ASSUMED_DF * ASSUMED_SEED_SD**2) / df), df, branch)


def branch_correlation(differences: Sequence[Array], groups: Sequence[int]) -> float:
    """Correlation between branches of a trunk over seeds, averaged with what is expected.

    Branches with different numbers of seeds are not compared.
    """
    products = squares = free = 0.0
    for group in sorted(set(groups)):
        own = [values - values.mean() for values, at in zip(differences, groups, strict=True) if at == group]
        pairs = [(a, b) for i, a in enumerate(own) for b in own[i + 1 :] if len(a) == len(b) > 1]
        products += sum(float(a @ b) for a, b in pairs)
        squares += sum(float(a @ a + b @ b) / 2.0 for a, b in pairs)
        free += max((len(a) - 1 for a, _ in pairs), default=0)
    if squares <= 0.0:
        return BRANCH_CORRELATION
    shared = (free * products / squares + BRANCH_DF * BRANCH_CORRELATION) / (free + BRANCH_DF)
    return min(max(shared, 0.0), _STRONGEST)


def effective_df(seeds: Sequence[int], groups: Sequence[int], correlation: float = BRANCH_CORRELATION) -> float:
    """Degrees of freedom of the pooled spread (Satterthwaite): cells of one trunk repeat each other in part."""
    found = 0.0
    for group in sorted(set(groups)):
        free = [own - 1 for own, at in zip(seeds, groups, strict=True) if at == group and own > 1]
        # The trace of the block squared over the trace of its square.
        found += sum(free) / (1.0 + (len(free) - 1) * correlation**2) if free else 0.0
    return found


def correlation_matrix(groups: Array, correlation: float) -> Array:
    """Correlation between cells: that of branches within a trunk, none between trunks."""
    same = groups[:, None] == groups[None, :]
    return np.where(same, correlation, 0.0) + (1.0 - correlation) * np.eye(len(groups))


def noise_model(seeds: Array, groups: Array, estimate: SeedNoise, new_seeds: int = 1) -> NoiseModel:
    """Covariance of cell means for every level of σ and τ; `seeds` and `groups` have one number a cell."""
    # Cells of one trunk with different numbers of seeds share those of the smaller number.
    per_seed = 1.0 / np.maximum.outer(seeds, seeds)
    is_branched = len(set(groups.tolist())) < len(groups)
    around = (-BRANCH_ERROR, BRANCH_ERROR) if is_branched else (0.0,)
    correlations = [correlation_matrix(groups, min(max(estimate.branch + off, 0.0), _STRONGEST)) for off in around]
    sds = [estimate.sd * math.sqrt(estimate.df / chi_square_quantile(q, round(estimate.df, 6))) for q in _QUANTILES]
    levels = [(max(sd, _SMALLEST_SD), tau, own) for own in correlations for sd in sds for tau in RUNG_SDS]
    covariance = np.array([(sd**2 * per_seed + tau**2) * own for sd, tau, own in levels])
    log_weight = np.array([-0.5 * (tau / RUNG_SCALE) ** 2 for _, tau, _ in levels])
    new_cell = np.array([sd**2 / new_seeds + tau**2 for sd, tau, _ in levels])
    return NoiseModel(covariance, log_weight, new_cell)
