"""Simulated ladders with a known gap: eighteen truths, on a path and on a grid, to measure how often intervals cover.

The truths were written down before the estimator for grids was. The first twelve are functions of compute; the other
six live in tokens or parameters alone, or differ in shape over the grid. They are not to be tuned: an estimator that
fails on one is reported as failing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from normlab.ladders.rows import LadderRow
from normlab.ladders.statistics.noise import correlation_matrix

Array = np.ndarray
M = 1e6


@dataclass(frozen=True)
class Places:
    """Parameters, tokens and FLOPs of several places, and of the top cell that truths are relative to."""

    parameters: Array
    tokens: Array
    flops: Array
    top: tuple[float, float, float]

    @property
    def x(self) -> Array:
        """ln C relative to the top."""
        return np.log(self.flops / self.top[2])

    @property
    def x_size(self) -> Array:
        return np.log(self.parameters / self.top[0])

    @property
    def x_tokens(self) -> Array:
        return np.log(self.tokens / self.top[1])


@dataclass(frozen=True)
class Truth:
    """A true gap between a scheme and the baseline, everywhere."""

    name: str
    gap: Callable[[Places], Array]


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

    @property
    def paired_sd(self) -> float:
        """Standard deviation of a paired difference over seeds."""
        return self.run * math.sqrt(2.0 * (1.0 - self.shared))


USUAL = Noise(0.006, 0.3, 0.010, 0.003)
CLEAN = Noise(0.004, 0.3, 0.0, 0.0)
NOISY = Noise(0.010, 0.3, 0.010, 0.005)


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


def baseline_loss(parameters: Array, tokens: Array) -> Array:
    """The baseline's law, calibrated on 125M models: 4.18 with 33M and 3.80 with 100M tokens."""
    return 2.1 + 0.9 * (parameters / (110 * M)) ** -0.30 + 1.18 * (tokens / (33 * M)) ** -0.35


def simulated_path(rungs: int = 5) -> SimulatedLadder:
    """Rungs a factor 3.5 apart in compute at 4 tokens a parameter, up to 110M parameters."""
    factor = 3.5 ** -np.arange(rungs - 1, -1, -1.0)
    cells = _along(110 * M, 440 * M, 6.0 * 110 * M * 440 * M, factor)
    beyond = {f"{times:g}x": _along(*cells.top, np.array([times])) for times in (1.0, 3.5, 10.0, 100.0)}
    sizes = tuple(f"{n / M:.3g}M" for n in cells.parameters)
    return SimulatedLadder("path", cells, beyond, np.arange(rungs), sizes)


def simulated_grid(sizes: int = 4, budgets: int = 3) -> SimulatedLadder:
    """Four sizes and three budgets that branch from one trunk; the top is 12x768 with 118M tokens."""
    names = ("4x256", "6x384", "8x512", "12x768")[:sizes]
    parameters = np.array([11.6, 23.2, 42.5, 110.1])[:sizes] * M
    per_token = np.array([76.0, 153.0, 280.0, 717.0])[:sizes] * M
    tokens = np.array([29.5, 59.0, 118.0])[:budgets] * M
    top = (110.1 * M, 118 * M, 717 * M * 118 * M)
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
    base = noise.run * runs[0]
    own = noise.run * (noise.shared * runs[0] + math.sqrt(1.0 - noise.shared**2) * runs[1])
    gap = truth.gap(ladder.cells)[:, None] + own - base + noise.own_rung * rungs[0][..., None]
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


def _with_multiplier(log_multiplier: Callable[[Places], Array]) -> Callable[[Places], Array]:
    """Gap of a scheme that is the baseline with k times the compute, half of it in size and half in tokens."""

    def gap(at: Places) -> Array:
        root = np.exp(log_multiplier(at) / 2.0)
        return baseline_loss(at.parameters * root, at.tokens * root) - baseline_loss(at.parameters, at.tokens)

    return gap


def _own_law(at: Places) -> Array:
    """A law of its own: another E and slightly smaller exponents."""
    size = 0.9 * (np.exp(-0.29 * at.x_size) - np.exp(-0.30 * at.x_size))
    tokens = 0.477 * (np.exp(-0.34 * at.x_tokens) - np.exp(-0.35 * at.x_tokens))
    return -0.015 + size + tokens


def _step(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


TRUTHS: tuple[Truth, ...] = (
    # In compute, the six that K was shaped on.
    Truth("none", lambda at: np.zeros_like(at.x)),
    Truth("constant multiplier 1.1", _with_multiplier(lambda at: np.full_like(at.x, math.log(1.1)))),
    Truth("shrinks", lambda at: -0.020 * np.exp(-0.35 * at.x)),
    Truth("multiplier falls, crosses", _with_multiplier(lambda at: 0.0505 * (1.0 - at.x / math.log(10.0)))),
    Truth("crosses and settles", lambda at: 0.020 * (1.0 - np.exp(-0.35 * at.x))),
    Truth("grows and settles", lambda at: -0.0256 + 0.0036 * np.exp(-0.53 * at.x)),
    # In compute, the six on which K failed.
    Truth("logistic fade", lambda at: -0.080 * _step(-0.8 * (at.x + math.log(10.0)))),
    Truth("two powers", lambda at: 0.015 * np.exp(-0.05 * at.x) - 0.025 * np.exp(-0.35 * at.x)),
    Truth("bump", lambda at: -0.040 * np.exp(-(((at.x + math.log(10.0)) / 1.2) ** 2) / 2.0)),
    Truth("own E and exponents", _own_law),
    Truth("late onset", lambda at: -0.010 * np.log1p(np.exp(1.5 * (at.x + 1.2)))),
    Truth("steep start", lambda at: -0.010 - 0.001 * np.exp(-at.x)),
    # In tokens or parameters, or of another shape over the grid.
    Truth("fades in tokens only", lambda at: -0.015 * np.exp(-at.x_tokens)),
    Truth("crosses in tokens only", lambda at: -0.05 + 0.09 * _step((at.x_tokens + 0.8) / 0.5)),
    Truth("shrinks in parameters only", lambda at: -0.020 * np.exp(-0.5 * at.x_size)),
    Truth("bump in parameters only", lambda at: -0.040 * np.exp(-(((at.x_size + 1.05) / 0.6) ** 2) / 2.0)),
    Truth("shrinks in small, grows in large", lambda at: -0.02 - 0.03 * np.tanh(at.x_tokens * (at.x_size + 1.1) / 2.0)),
    Truth("by tokens per parameter", lambda at: 0.02 - 0.05 * _step((at.x_tokens - at.x_size) / 0.5)),
)  # fmt: skip

FRESH_TRUTHS: tuple[Truth, ...] = (
    # Written down after the scales of M were set with the eighteen above in sight, and run once: never to tune by.
    Truth("waves in compute", lambda at: 0.020 * np.sin(1.2 * at.x)),
    Truth("step early in compute", lambda at: -0.050 * _step(-(at.x + 2.5) / 0.4)),
    Truth("less with tokens, more with size", lambda at: -0.030 * np.exp(0.3 * at.x_size - 0.4 * at.x_tokens)),
    Truth("step in parameters only", lambda at: -0.030 * _step((at.x_size + 1.2) / 0.2)),
    Truth("late onset in tokens only", lambda at: -0.012 * np.log1p(np.exp(2.5 * (at.x_tokens + 0.4)))),
    Truth("turns in tokens only", lambda at: 0.020 * (at.x_tokens + 0.7) ** 2 - 0.020),
)  # fmt: skip
