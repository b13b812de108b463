"""The phase diagram of arXiv 2312.10794: which pairs of tokens have met, over time and temperature.

In high dimension random tokens are nearly orthogonal, so that the symmetric equations say when they meet: the picture
has a sharp edge, and the closed-form curve lies on it.
"""

from __future__ import annotations

import numpy as np

from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.experiments import phases
from normlab.dynamics.experiments.result import Findings, PredictionVerdict, Tell, judge
from normlab.dynamics.recording import record
from normlab.dynamics.system import laws
from normlab.utils.text import counted

_HIGH = 64
"""Dimension from which on the curve is held against the picture."""
_LIMIT = 0.1


def run(config: SimulateConfig, tell: Tell) -> Findings:
    """The diagram of the configuration's first scheme."""
    spec = config.scheme[0]
    found = record(config, spec, observables=("close",), times=phases.look_times(config), tell=tell)
    half = phases.half_times(found)
    foretold = phases.symmetric_times(laws.find(spec, config.layers), config, found.times)
    rows = [(beta, *pair) for beta, *pair in zip(config.beta, half.tolist(), foretold.tolist(), strict=True)]
    return Findings(
        figures=(phases.diagram(spec, config, found, (phases.line("symmetric equations", config, foretold),)),),
        columns=("β", "half of the pairs have met", "symmetric equations"),
        rows=tuple(rows),
        verdicts=tuple(_judge(spec, config, half, foretold)),
        notes=(
            f"{config.tokens} tokens in dimension {config.dim}, {counted(config.seeds, 'system')} for each β; "
            f"the curve is the limit of high dimension and is judged from dimension {_HIGH} on",
        ),
    )


def _judge(spec: str, config: SimulateConfig, half: np.ndarray, foretold: np.ndarray) -> list[PredictionVerdict]:
    both = np.isfinite(half) & np.isfinite(foretold)
    if not both.any():
        return []
    ratio = float(np.median(half[both] / foretold[both]))
    predicted = 1.0 if config.dim >= _HIGH else None
    return [judge(spec, "time to meet over that of the symmetric equations", ratio, predicted, _LIMIT)]
