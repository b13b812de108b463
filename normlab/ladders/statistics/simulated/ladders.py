"""Simulated ladders with a known gap, on a path and on a grid: cells, noise of runs and rungs, and rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from normlab.ladders.rows import LadderRow
from normlab.ladders.statistics.estimators.layout import Side
from normlab.ladders.statistics.estimators.noise import correlation_matrix
from normlab.ladders.statistics.simulated.truths import MILLION, Array, Places, Truth, baseline_loss


@dataclass(frozen=True)
class Noise:
    """Standard deviations in nats a token."""

    run: float
    shared: float
    """Correlation of a seed's noise between schemes, by which pairing gains."""
    common_rung: float
    """Effect of a rung on all schemes: it cancels in the gap."""
    own_rung: float
    """Effect of a rung on the scheme alone: more seeds do not average it out."""
    branch: float = 0.75
    """Correlation of everything above between budgets that branch from one trunk."""
    untuned: float = 0.0
    """Share of the cells at which one side was trained with settings that do not fit there."""
    untuned_sd: float = 0.05
    """Of what that does to the gap at such a cell, in nats."""
    scatter: tuple[float, ...] = (1.0,)
    """Factors on `run`, one for each budget of a grid from the smallest on, or one for each cell."""

    @property
    def paired_sd(self) -> float:
        """Standard deviation of a paired difference over seeds."""
        return self.run * math.sqrt(2.0 * (1.0 - self.shared))


USUAL = Noise(0.006, 0.3, 0.010, 0.003)
CLEAN = Noise(0.004, 0.3, 0.0, 0.0)
NOISY = Noise(0.010, 0.3, 0.010, 0.005)
EARLY = replace(USUAL, scatter=(6.0, 2.5, 1.0))
"""Short runs scatter more, as where seeds learn to copy from the context at different times: GeoNorm at 4x256."""
EARLY_AND_STRONG = replace(USUAL, scatter=(8.0, 3.0, 1.0))
EARLY_ON_A_PATH = replace(USUAL, scatter=(5.0, 3.5, 2.2, 1.5, 1.0))
"""Both fixed after the estimator was made to hold `EARLY`, before they were run: never to tune by."""
MIDDLE = replace(USUAL, scatter=(0.5, 4.0, 1.0))
"""Most at the middle budget, as where that happens there: SpanNorm at 4x256."""
SMALL = replace(USUAL, scatter=tuple(factor for factor in (4.0, 3.0, 2.0, 1.0) for _ in range(3)))
"""Small models scatter more, at every budget."""
LATE = replace(USUAL, scatter=(0.5, 1.0, 2.0))
"""Long runs scatter more."""
UNTUNED = replace(USUAL, untuned=0.1)
"""One cell in ten is off, as in tables that others have published."""


@dataclass(frozen=True)
class SimulatedLadder:
    """Cells of a ladder and the places beyond it that its forecasts are judged at."""

    name: str
    cells: Places
    beyond: dict[str, Places]
    group: Array
    """Number of the trunk of each cell: cells with the same one are branches of it."""
    sizes: tuple[str, ...]

    @property
    def is_branched(self) -> bool:
        return len(set(self.group.tolist())) < len(self.group)


def simulated_path(rungs: int = 5) -> SimulatedLadder:
    """Rungs a factor 3.5 apart in compute at 4 tokens a parameter, up to 110M parameters."""
    factor = 3.5 ** -np.arange(rungs - 1, -1, -1.0)
    cells = _along(110 * MILLION, 440 * MILLION, 6.0 * 110 * MILLION * 440 * MILLION, factor)
    beyond = {f"{times:g}x": _along(*cells.top, np.array([times])) for times in (1.0, 3.5, 10.0, 100.0)}
    sizes = tuple(f"{n / MILLION:.3g}M" for n in cells.parameters)
    return SimulatedLadder("path", cells, beyond, np.arange(rungs), sizes)


def simulated_line(unvaried: Side, rungs: int = 5) -> SimulatedLadder:
    """Rungs a factor 3.5 apart in compute that all have one size, or one budget: the top of the path."""
    factor, top = 3.5 ** -np.arange(rungs - 1, -1, -1.0), simulated_path().cells.top
    cells = _line(top, factor, unvaried)
    beyond = {f"{times:g}x": _line(top, np.array([times]), unvaried) for times in (1.0, 3.5, 10.0, 100.0)}
    sizes = tuple(f"{n / MILLION:.3g}M" for n in cells.parameters)
    return SimulatedLadder(f"one {unvaried}", cells, beyond, np.arange(rungs), sizes)


def _line(top: tuple[float, float, float], times: Array, unvaried: Side) -> Places:
    size, tokens = (1.0, times) if unvaried == "size" else (times, 1.0)
    one = np.ones_like(times)
    return Places(top[0] * size * one, top[1] * tokens * one, top[2] * times, top)


def simulated_grid(sizes: int = 4, budgets: int = 3) -> SimulatedLadder:
    """Four sizes and three budgets that branch from one trunk; the top is 12x768 with 118M tokens."""
    names = ("4x256", "6x384", "8x512", "12x768")[:sizes]
    parameters = np.array([11.6, 23.2, 42.5, 110.1])[:sizes] * MILLION
    per_token = np.array([76.0, 153.0, 280.0, 717.0])[:sizes] * MILLION
    tokens = np.array([29.5, 59.0, 118.0])[:budgets] * MILLION
    top = (110.1 * MILLION, 118 * MILLION, 717 * MILLION * 118 * MILLION)
    cells = Places(np.repeat(parameters, budgets), np.tile(tokens, sizes), np.outer(per_token, tokens).ravel(), top)
    beyond = {f"{times:g}x": _along(*top, np.array([times])) for times in (1.0, 3.5, 10.0, 100.0)}
    group = np.repeat(np.arange(sizes), budgets)
    return SimulatedLadder("grid", cells, beyond, group, tuple(name for name in names for _ in range(budgets)))


def _along(parameters: float, tokens: float, flops: float, times: Array) -> Places:
    """Places at multiples of a top cell's compute, with its tokens per parameter."""
    root = np.sqrt(times)
    return Places(parameters * root, tokens * root, flops * times, (parameters, tokens, flops))


def simulate(
    ladder: SimulatedLadder, truth: Truth, noise: Noise, seeds: int, repeats: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Paired differences and baseline losses, each [repeats, cells, seeds]."""
    cells = len(ladder.group)
    lower = np.linalg.cholesky(correlation_matrix(ladder.group, noise.branch))
    runs = np.einsum("ij,krjs->kris", lower, rng.standard_normal((2, repeats, cells, seeds)))
    rungs = np.einsum("ij,krj->kri", lower, rng.standard_normal((2, repeats, cells)))
    scatter = noise.run * np.resize(noise.scatter, cells)[:, None]
    base = scatter * runs[0]
    own = scatter * (noise.shared * runs[0] + math.sqrt(1.0 - noise.shared**2) * runs[1])
    gap = truth.gap(ladder.cells)[:, None] + own - base + noise.own_rung * rungs[0][..., None]
    if noise.untuned:
        is_untuned = rng.random((repeats, cells)) < noise.untuned
        gap = gap + (noise.untuned_sd * is_untuned * rng.standard_normal((repeats, cells)))[..., None]
    law = baseline_loss(ladder.cells.parameters, ladder.cells.tokens)[:, None]
    return gap, law + base + noise.common_rung * rungs[1][..., None]


def as_rows(ladder: SimulatedLadder, gaps: Array, losses: Array, scheme: str = "peri") -> list[LadderRow]:
    """Rows of one repeat ([cells, seeds] each): the baseline "pre" and one scheme."""
    rows = []
    for cell, size in enumerate(ladder.sizes):
        place = {
            "size": size,
            "parameters": round(float(ladder.cells.parameters[cell])),
            "tokens": round(float(ladder.cells.tokens[cell])),
            "flops": float(ladder.cells.flops[cell]),
        }
        for seed in range(gaps.shape[1]):
            for name, loss in (("pre", losses[cell, seed]), (scheme, losses[cell, seed] + gaps[cell, seed])):
                trunk = f"{name}-{size}-{seed}" if ladder.is_branched else None
                rows.append(LadderRow(scheme=name, seed=seed, loss=float(loss), trunk=trunk, **place))
    return rows
