"""True gaps that ladders are simulated with: twelve in compute, six in tokens or size, and six fresh ones.

The order in which they were fixed: the eighteen `TRUTHS` before the estimator for grids was written; then the scales
of the smooth estimator, with these eighteen in sight; then the six `FRESH_TRUTHS`, before they were run. None of them
is to be tuned: an estimator that fails on one is reported as failing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
MILLION = 1e6


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


def baseline_loss(parameters: Array, tokens: Array) -> Array:
    """The baseline's law, calibrated on 125M models: 4.18 with 33M and 3.80 with 100M tokens."""
    return 2.1 + 0.9 * (parameters / (110 * MILLION)) ** -0.30 + 1.18 * (tokens / (33 * MILLION)) ** -0.35


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
    # In compute, the six that the simple law was shaped on.
    Truth("none", lambda at: np.zeros_like(at.x)),
    Truth("constant multiplier 1.1", _with_multiplier(lambda at: np.full_like(at.x, math.log(1.1)))),
    Truth("shrinks", lambda at: -0.020 * np.exp(-0.35 * at.x)),
    Truth("multiplier falls, crosses", _with_multiplier(lambda at: 0.0505 * (1.0 - at.x / math.log(10.0)))),
    Truth("crosses and settles", lambda at: 0.020 * (1.0 - np.exp(-0.35 * at.x))),
    Truth("grows and settles", lambda at: -0.0256 + 0.0036 * np.exp(-0.53 * at.x)),
    # In compute, the six on which the simple law failed.
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
    # Written down after the smooth estimator's scales were set by the eighteen above, and run once: never to tune by.
    Truth("waves in compute", lambda at: 0.020 * np.sin(1.2 * at.x)),
    Truth("step early in compute", lambda at: -0.050 * _step(-(at.x + 2.5) / 0.4)),
    Truth("less with tokens, more with size", lambda at: -0.030 * np.exp(0.3 * at.x_size - 0.4 * at.x_tokens)),
    Truth("step in parameters only", lambda at: -0.030 * _step((at.x_size + 1.2) / 0.2)),
    Truth("late onset in tokens only", lambda at: -0.012 * np.log1p(np.exp(2.5 * (at.x_tokens + 0.4)))),
    Truth("turns in tokens only", lambda at: 0.020 * (at.x_tokens + 0.7) ** 2 - 0.020),
)  # fmt: skip
