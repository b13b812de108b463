"""Experiment random-weights: mean cosine of token pairs over depth at random initialisation, with bands over seeds.

With independent tokens and random matrices, A_j is a sum of n nearly orthogonal vectors with the weights p of a
softmax over logits of variance σ² = β²‖QᵀK‖²/d²: ‖A‖² ≈ (Σp² + σ²/d) ‖V‖²/d (Frobenius norms), where Σp² is that of a
softmax of n normal numbers and σ/√d is the correlation of the weights with the query. The law turns ‖A‖ into the
initial speed of the tokens: schemes that divide by ‖A‖ start at speed one, the others more slowly.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.experiments.result import Findings, PredictionVerdict, judge_prediction
from normlab.dynamics.progress import ProgressCallback, subtask
from normlab.dynamics.recording import Recording, record_law, trajectory
from normlab.dynamics.simulate import quantile_band
from normlab.dynamics.system import laws
from normlab.dynamics.system.attention import LowRank, Matrix
from normlab.dynamics.system.flow import attention_at
from normlab.dynamics.system.systems import SystemChunk
from normlab.dynamics.view.figures import Figure, make_curve
from normlab.schemes.contract.law import Law, Motion
from normlab.utils.text import counted

_LIMIT = 0.1
"""Tolerance of the relative error of the initial speed, which fluctuates with tokens and weights."""
_DRAWS = 1000


def run(config: SimulateConfig, tell: ProgressCallback) -> Findings:
    """Simulate every scheme from the same tokens and weights."""
    config = config.replace(beta=config.beta[:1])
    length = _attention_length(config)
    figures, rows, verdicts = [], [], []
    for place, spec in enumerate(config.scheme):
        found = record_law(config, spec, tell=subtask(tell, place, len(config.scheme)))
        verdict = _judge_speed(spec, laws.find_law(spec, config.layers), found, length, config)
        verdicts.append(verdict)
        figures.append(_curve(spec, found))
        cosine = quantile_band(found.values["cosine"][:, 0])
        rows.append((spec, verdict.measured, verdict.predicted, cosine.mean[-1], cosine.low[-1], cosine.high[-1]))
    return Findings(
        figures=(Figure(title="Mean cosine over depth", x_label="time", y_label="mean cosine", curves=tuple(figures)),),
        columns=("scheme", "speed at the start", "theory", "cosine at the end", "5 %", "95 %"),
        rows=tuple(rows),
        verdicts=tuple(verdicts),
        notes=(
            f"{config.tokens} tokens in dimension {config.dim}, β = {config.beta[0]:.4g}, "
            f"{counted(config.heads, 'head')}, {config.weights} weights "
            f"{'redrawn in every layer' if config.redraw else 'shared by all layers'}, "
            f"{counted(config.seeds, 'seed')}, {config.method} at {config.step:g}; laws are those of "
            f"{counted(config.layers, 'block')}",
            f"length of attention's output at the start, by theory: {length:.4f}",
        ),
    )


def _curve(spec: str, found: Recording):
    cosine = quantile_band(found.values["cosine"][:, 0])
    return make_curve(spec, found.times, cosine.mean, low=cosine.low, high=cosine.high)


def _attention_length(config: SimulateConfig) -> float:
    """Predicted ‖A‖ at time zero, mean over seeds."""
    lengths = []
    for seed in range(config.seed, config.seed + config.seeds):
        state, flow = next(trajectory(config, config.scheme[0], SystemChunk(config.beta, (seed,)), [0.0]))
        attention = attention_at(flow.attention, state.time)
        spread = config.beta[0] ** 2 * _square(attention.score, config.dim) / config.dim
        square = _mixing(math.sqrt(spread), config.tokens) ** 2 + spread / config.dim
        lengths.append(math.sqrt(square * _square(attention.value, config.dim)))
    return float(np.mean(lengths))


def _mixing(sigma: float, tokens: int) -> float:
    """Mean of √Σp² for a softmax over `tokens` normal logits: (e^{σ²}/n)^½ for large n, larger for small n."""
    logits = sigma * np.random.default_rng(0).standard_normal((_DRAWS, tokens))
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return float(np.mean(np.linalg.norm(weights, axis=1) / weights.sum(1)))


def _square(matrix: Matrix | None, dim: int) -> float:
    """‖M‖²/d, summed over heads: the mean square length of M θ."""
    if matrix is None:
        return 1.0
    whole = matrix.left.mT @ matrix.right if isinstance(matrix, LowRank) else matrix
    return float(whole.double().square().sum()) / dim


def _judge_speed(spec: str, law: Law, found: Recording, length: float, config: SimulateConfig) -> PredictionVerdict:
    """Compare the mean speed at time zero, where attention's output is almost entirely tangential."""
    assert law.speed is not None
    measured = float(found.values["speed"][0].mean())
    size, still, radius = (torch.tensor(value, dtype=torch.float64) for value in (length, 0.0, config.radius))
    motion = Motion(time=still, radius=radius, attention=size, radial=still, tangent=size)
    predicted = length / float(_number(law.speed(motion)))
    return judge_prediction(spec, "speed at the start", measured, predicted, _LIMIT, relative=True)


def _number(value: Tensor | float) -> float:
    return float(value)
