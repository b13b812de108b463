"""Experiment causal: under a causal mask tokens on the circle cluster around about √β leaders (arXiv 2411.04990).

A token with no earlier token within a distance of order 1/√β hardly moves and becomes a leader; later tokens nearby
join it. Selecting leaders in this way is Rényi's parking problem with cars of length c/√β. The number of leaders
grows as β^((d − 1)/2) in dimension d for any c; with one c for all β, parking on the same initial tokens predicts the
counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.experiments.result import Findings, judge_prediction
from normlab.dynamics.measure.clusters import cluster_labels
from normlab.dynamics.progress import ProgressCallback, subtask
from normlab.dynamics.recording import trajectory
from normlab.dynamics.system.systems import SystemChunk, initial_state
from normlab.dynamics.view.figures import Figure, make_curve
from normlab.errors import NormLabError
from normlab.numerics.power_law import power_law
from normlab.utils.text import counted

_EXPONENT, _COUNTS = 0.1, 0.15
"""Tolerances: of the exponent, and of the relative difference of the counts from parking (root mean square)."""
_NEAR = 0.3
"""Largest distance between neighbours of one cluster, in units of 1/√β."""


@dataclass(frozen=True)
class _Leaders:
    """Number of leaders at each β, counted and as parking predicts it."""

    counts: np.ndarray
    """[β, seed]"""
    parked: np.ndarray
    """[β], mean over seeds."""
    length: float
    """c of the cars' length c/√β, fitted."""
    power: float
    """Exponent of β that theory predicts."""

    @property
    def means(self) -> np.ndarray:
        return self.counts.mean(1)

    @property
    def distance(self) -> float:
        """Relative difference of the counts from parking, root mean square."""
        return float(np.sqrt(np.mean((self.means / self.parked - 1) ** 2)))


def run(config: SimulateConfig, tell: ProgressCallback) -> Findings:
    """Count the leaders of the scheme at each β."""
    if not config.causal or len(set(config.beta)) < 3 or 0.0 in config.beta:
        raise NormLabError(
            "causal needs the mask and three different β above zero at least; try --causal --beta 30,120,500"
        )
    counts = _counts(config, tell)
    if not counts.mean(1).all():
        beta = config.beta[int(counts.mean(1).argmin())]
        raise NormLabError(
            f"causal: no token has joined a leader at β = {beta:g}; try more --tokens, or a later --time"
        )
    length, parked = _best_length([_angles(config, seed) for seed in _seeds(config)], config.beta, counts)
    return _findings(config, _Leaders(counts, parked, length, (config.dim - 1) / 2))


def _findings(config: SimulateConfig, leaders: _Leaders) -> Findings:
    spec, fit = config.scheme[0], power_law(config.beta, leaders.means.tolist())
    interval = None if fit.low is None or fit.high is None else (fit.low, fit.high)
    exponent = "exponent of the leaders in β"
    return Findings(
        figures=(_figure(config, leaders),),
        columns=("β", "leaders", "Rényi's parking", f"leaders / β^{leaders.power:g}"),
        rows=tuple(
            (beta, float(count), float(cars), float(count / beta**leaders.power))
            for beta, count, cars in zip(config.beta, leaders.means, leaders.parked, strict=True)
        ),
        verdicts=(
            judge_prediction(spec, exponent, fit.exponent, leaders.power, _EXPONENT, interval=interval),
            judge_prediction(spec, "relative distance from parking", leaders.distance, 0.0, _COUNTS),
        ),
        notes=(
            f"{config.tokens} tokens in dimension {config.dim} at time {config.time:g}, "
            f"{counted(config.seeds, 'seed')}; clusters of two tokens or more, neighbours within {_NEAR}/√β; the "
            f"length {leaders.length:.2f}/√β of a car is fitted, the same for all β",
        ),
    )


def _figure(config: SimulateConfig, leaders: _Leaders) -> Figure:
    low, high = leaders.counts.min(1), leaders.counts.max(1)
    return Figure(
        title="Leaders over the inverse temperature",
        x_label="β",
        y_label="leaders",
        x_log=True,
        y_log=True,
        curves=(
            make_curve(config.scheme[0], config.beta, leaders.means, low=low, high=high, marks=True),
            make_curve(f"Rényi's parking, {leaders.length:.2f}/√β", config.beta, leaders.parked, role="theory"),
        ),
    )


def _counts(config: SimulateConfig, tell: ProgressCallback) -> np.ndarray:
    """Number of leaders, [β, seed]."""
    found = []
    for place, beta in enumerate(config.beta):
        each = subtask(tell, place, len(config.beta))
        found.append([_leaders(config, config.scheme[0], beta, seed) for seed in _seeds(config)])
        each(f"β = {beta:g}", 1.0)
    return np.array(found, dtype=float)


def _seeds(config: SimulateConfig) -> range:
    return range(config.seed, config.seed + config.seeds)


def _leaders(config: SimulateConfig, spec: str, beta: float, seed: int) -> int:
    """Number of clusters of at least two tokens; a single token is still moving between leaders."""
    *_, (state, _) = trajectory(config, spec, SystemChunk((beta,), (seed,)), [config.time])
    found = cluster_labels(state.theta, min(_NEAR / math.sqrt(beta), 3.0))[0]
    return int((torch.bincount(found) >= 2).sum())


def _angles(config: SimulateConfig, seed: int) -> np.ndarray:
    """Angles between all pairs of initial tokens."""
    theta = initial_state(config, (seed,)).theta[0].double()
    return torch.arccos((theta @ theta.mT).clamp(-1, 1)).cpu().numpy()


def _best_length(angles: list[np.ndarray], betas: tuple[float, ...], counts: np.ndarray) -> tuple[float, np.ndarray]:
    """The length c of c/√β for which parking fits the counts best, and its counts."""
    lengths = np.linspace(0.5, 5.0, 46)
    tried = np.array([[np.mean([_parked(one, c / math.sqrt(b)) for one in angles]) for b in betas] for c in lengths])
    misses = ((np.log(tried) - np.log(counts.mean(1))) ** 2).sum(1)
    place = int(misses.argmin())
    return float(lengths[place]), tried[place]


def _parked(angles: np.ndarray, length: float) -> int:
    """Number of tokens that, taken in order, are farther than `length` from all tokens taken before."""
    free, count = np.ones(len(angles), dtype=bool), 0
    for place in range(len(angles)):
        if free[place]:
            free &= angles[place] > length
            count += 1
    return count
