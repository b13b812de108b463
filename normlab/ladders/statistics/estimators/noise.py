"""Noise of the cells' mean gaps: seeds, and what all seeds of a cell share.

The mean over S seeds at a cell has variance σ²/S + τ². σ is estimated from the spread over seeds, pooled over cells; it
may change with tokens as a power, since short runs can scatter several times as much as long ones. τ (a rate a little
off, rounding of shapes) is not seen by seeds and has a prior. Cells that branch from one trunk share most of their
path: both noises are correlated between them.
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
EXPONENT_SD = 1.0
"""Prior standard deviation of the power of tokens with which σ changes, if it does."""
CONSTANT_WEIGHT = 0.5
"""Prior probability that σ does not change with tokens."""
_EXPONENTS = np.linspace(-3.0, 3.0, 121)
_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
SMALLEST_SD = 1e-5
"""Keeps covariances regular for data without noise."""


@dataclass(frozen=True)
class SeedNoise:
    """Noise of a paired difference over seeds."""

    sd: float
    """At the cells' mean of ln tokens."""
    df: float
    """Degrees of freedom of the estimated standard deviation."""
    branch: float = BRANCH_CORRELATION
    """Correlation between branches of one trunk."""
    exponent: float = 0.0
    """The standard deviation grows as this power of tokens; below zero short runs scatter more."""
    exponent_error: float = 0.0
    centre: float = 0.0
    """Mean of ln tokens."""
    known: tuple[float, float] = (-math.inf, math.inf)
    """Smallest and largest ln tokens with several seeds: beyond them the scatter is taken to be that of the nearest."""

    @property
    def scatter_power(self) -> float:
        """The power with which scatter falls with tokens; 0 where it grows."""
        return max(-self.exponent, 0.0)

    def sds(self, tokens: Array) -> Array:
        """Estimated standard deviation for so many tokens."""
        return self.sd * np.exp(self.exponent * self._from_centre(tokens))

    def dfs(self, tokens: Array) -> Array:
        """Degrees of freedom there: the variance of ln σ is 1/(2 df), and the exponent adds its own."""
        own = self._from_centre(tokens) * self.exponent_error
        return 1.0 / (1.0 / self.df + 2.0 * own**2)

    def _from_centre(self, tokens: Array) -> Array:
        return np.clip(np.log(tokens), *self.known) - self.centre


def mean_sd(seed_sd: float, seeds: int) -> float:
    """Standard deviation of a cell's mean, with the assumed effect of a rung on the scheme alone."""
    return math.sqrt(seed_sd**2 / seeds + ASSUMED_RUNG_SD**2)


def pooled(differences: Sequence[Array], groups: Sequence[int], tokens: Sequence[int]) -> SeedNoise:
    """Pool the spread over seeds; cells of one trunk count for less than independent ones."""
    seeds = [len(own) for own in differences]
    free = np.array(seeds) - 1
    effective = effective_df(seeds, groups)
    if effective < FEW_DF:
        variance = sum(_squares(own) for own in differences) / max(free.sum(), 1)
        df = effective + ASSUMED_DF
        return SeedNoise(math.sqrt((effective * variance + ASSUMED_DF * ASSUMED_SEED_SD**2) / df), df)
    log_tokens = np.log(tokens)
    centre = float(free @ log_tokens / free.sum())
    exponent, error = exponent_over_tokens(differences, log_tokens - centre)
    alike = [own * factor for own, factor in zip(differences, np.exp(exponent * (centre - log_tokens)), strict=True)]
    branch = branch_correlation(alike, groups)
    sd = math.sqrt(sum(_squares(own) for own in alike) / free.sum())
    repeated = log_tokens[free > 0]
    known = float(repeated.min()), float(repeated.max())
    # With a power, a floor at the centre would be multiplied by it elsewhere.
    sd = sd if exponent else max(sd, SMALLEST_SD)
    return SeedNoise(sd, effective_df(seeds, groups, branch), branch, exponent, error, centre, known)


def exponent_over_tokens(differences: Sequence[Array], x: Array) -> tuple[float, float]:
    """Mean and standard deviation of the power of tokens that the spread over seeds follows; x is ln tokens, centred.

    x has mean zero over degrees of freedom, so that σ at its zero can be integrated out. Cells count as independent.
    Branches of a trunk are not: the ratio of their spreads is more certain for it, and less certain between trunks
    whose budgets differ.
    """
    free = np.array([len(own) - 1 for own in differences])
    squares = np.array([_squares(own) for own in differences])
    if np.ptp(x[free > 0]) == 0.0 or not squares.any():
        return 0.0, 0.0
    log_likelihood = -0.5 * free.sum() * np.log(np.exp(-2.0 * np.outer(_EXPONENTS, x)) @ squares)
    changes = np.exp(-0.5 * (_EXPONENTS / EXPONENT_SD) ** 2)
    prior = (1.0 - CONSTANT_WEIGHT) * changes / changes.sum() + CONSTANT_WEIGHT * (_EXPONENTS == 0.0)
    weights = prior * np.exp(log_likelihood - log_likelihood.max())
    weights /= weights.sum()
    mean = float(weights @ _EXPONENTS)
    return mean, math.sqrt(float(weights @ (_EXPONENTS - mean) ** 2))


def _squares(values: Array) -> float:
    return float(((values - values.mean()) ** 2).sum())


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


def noise_model(
    seeds: Array, groups: Array, tokens: Array, estimate: SeedNoise, new_tokens: Array | None = None, new_seeds: int = 1
) -> NoiseModel:
    """Covariance of cell means for every level of σ and τ; `seeds`, `groups` and `tokens` have one number a cell."""
    # Cells of one trunk with different numbers of seeds share those of the smaller number.
    per_seed = 1.0 / np.maximum.outer(seeds, seeds)
    is_branched = len(set(groups.tolist())) < len(groups)
    around = (-BRANCH_ERROR, BRANCH_ERROR) if is_branched else (0.0,)
    correlations = [correlation_matrix(groups, min(max(estimate.branch + off, 0.0), _STRONGEST)) for off in around]
    sds, new_sds = (_sd_levels(estimate, at) for at in (tokens, tokens if new_tokens is None else new_tokens))
    levels = [(level, tau, own) for own in correlations for level in range(len(_QUANTILES)) for tau in RUNG_SDS]
    covariance = np.array([(np.outer(sds[level], sds[level]) * per_seed + tau**2) * own for level, tau, own in levels])
    log_weight = np.array([-0.5 * (tau / RUNG_SCALE) ** 2 for _, tau, _ in levels])
    new_cell = np.array([new_sds[level] ** 2 / new_seeds + tau**2 for level, tau, _ in levels])
    return NoiseModel(covariance, log_weight, new_cell)


def _sd_levels(estimate: SeedNoise, tokens: Array) -> Array:
    """Quantiles of σ at every place, [quantiles, places]."""
    sds, dfs = estimate.sds(tokens), np.round(estimate.dfs(tokens), 6)
    ratios = [[df / chi_square_quantile(q, df) for df in dfs.tolist()] for q in _QUANTILES]
    return np.maximum(sds * np.sqrt(ratios), SMALLEST_SD)
