"""Causal attention: tokens gather at leaders, and there are about √β of these (arXiv 2411.04990).

A token that finds none of its predecessors within a distance of order 1/√β hardly feels them and becomes a leader;
later ones nearby join it. Choosing leaders so is Rényi's parking: cars of length c/√β park one after the other where
there is room. The exponent of the count in β is 1/2 whatever c; with one c for all β, parking on the same tokens gives
the counts.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.experiments.result import Findings, Tell, judge, part
from normlab.dynamics.measure.clusters import labels
from normlab.dynamics.recording import orbit
from normlab.dynamics.system.systems import SystemChunk, start
from normlab.dynamics.view.figures import Figure, curve
from normlab.errors import NormLabError
from normlab.utils.power_law import power_law
from normlab.utils.text import counted

_EXPONENT, _COUNTS = 0.1, 0.15
"""Largest errors: of the exponent, and of the counts against parking, root mean square of the relative ones."""
_NEAR = 0.3
"""Neighbours in a cluster are at most so many 1/√β apart."""


def run(config: SimulateConfig, tell: Tell) -> Findings:
    """Leaders of the configuration's first scheme at each β."""
    if not config.causal or len(set(config.beta)) < 3:
        raise NormLabError("causal needs the mask and three different β at least; try --causal --beta 30,120,500")
    spec, seeds = config.scheme[0], range(config.seed, config.seed + config.seeds)
    found, parked = [], []
    for place, beta in enumerate(config.beta):
        each = part(tell, place, len(config.beta))
        found.append([_leaders(config, spec, beta, seed) for seed in seeds])
        each(f"β = {beta:g}", 1.0)
    counts = np.array(found, dtype=float)
    angles = [_angles(config, seed) for seed in seeds]
    length, parked = _best_length(angles, config.beta, counts)
    fit = power_law(config.beta, counts.mean(1).tolist())
    apart = float(np.sqrt(np.mean((counts.mean(1) / parked - 1) ** 2)))
    interval = None if fit.low is None or fit.high is None else (fit.low, fit.high)
    return Findings(
        figures=(
            Figure(
                title="Leaders over the inverse temperature",
                x_label="β",
                y_label="leaders",
                x_log=True,
                y_log=True,
                curves=(
                    curve(spec, config.beta, counts.mean(1), low=counts.min(1), high=counts.max(1), marks=True),
                    curve(f"Rényi's parking, {length:.2f}/√β", config.beta, parked, role="theory"),
                ),
            ),
        ),
        columns=("β", "leaders", "Rényi's parking", "leaders / √β"),
        rows=tuple(
            (beta, float(count), float(cars), float(count / math.sqrt(beta)))
            for beta, count, cars in zip(config.beta, counts.mean(1), parked, strict=True)
        ),
        verdicts=(
            judge(spec, "exponent of the leaders in β", fit.exponent, 0.5, _EXPONENT, interval=interval),
            judge(spec, "relative distance from parking", apart, 0.0, _COUNTS),
        ),
        notes=(
            f"{config.tokens} tokens in dimension {config.dim} at time {config.time:g}, "
            f"{counted(config.seeds, 'seed')}; clusters of two tokens or more, neighbours within {_NEAR}/√β; the "
            f"length {length:.2f}/√β of a car is fitted, the same for all β",
        ),
    )


def _leaders(config: SimulateConfig, spec: str, beta: float, seed: int) -> int:
    """Clusters of two tokens at least: one that is still on its way between leaders is none."""
    *_, (state, _) = orbit(config, spec, SystemChunk((beta,), (seed,)), [config.time])
    found = labels(state.theta, min(_NEAR / math.sqrt(max(beta, 1e-9)), 3.0))[0]
    return int((torch.bincount(found) >= 2).sum())


def _angles(config: SimulateConfig, seed: int) -> np.ndarray:
    """Cosines of all pairs at the start, as angles."""
    theta = start(config, (seed,)).theta[0].double()
    return torch.arccos((theta @ theta.mT).clamp(-1, 1)).cpu().numpy()


def _best_length(angles: list[np.ndarray], betas: tuple[float, ...], counts: np.ndarray) -> tuple[float, np.ndarray]:
    """The c of c/√β with which parking comes closest to the counts, and what it counts."""
    lengths = np.linspace(0.5, 5.0, 46)
    tried = np.array([[np.mean([_parked(one, c / math.sqrt(b)) for one in angles]) for b in betas] for c in lengths])
    misses = ((np.log(tried) - np.log(counts.mean(1))) ** 2).sum(1)
    place = int(misses.argmin())
    return float(lengths[place]), tried[place]


def _parked(angles: np.ndarray, length: float) -> int:
    """How many tokens, taken in order, are farther than `length` from all that were taken before."""
    free, count = np.ones(len(angles), dtype=bool), 0
    for place in range(len(angles)):
        if free[place]:
            free &= angles[place] > length
            count += 1
    return count
