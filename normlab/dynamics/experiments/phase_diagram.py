"""Experiment phase-diagram: share of token pairs that have merged, over time and β (arXiv 2312.10794).

In high dimension random tokens are nearly orthogonal, so the equations of the symmetric case predict when they merge:
the diagram has a sharp edge along the predicted curve.
"""

from __future__ import annotations

import numpy as np

from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.experiments import phases
from normlab.dynamics.experiments.result import Findings, PredictionVerdict, judge_prediction
from normlab.dynamics.progress import ProgressCallback
from normlab.dynamics.recording import record_law
from normlab.dynamics.system import laws
from normlab.utils.text import counted

_HIGH = 64
"""Smallest dimension in which the predicted curve is compared with the diagram."""
_LIMIT = 0.1


def run(config: SimulateConfig, tell: ProgressCallback) -> Findings:
    """Simulate the scheme over β and compare with the symmetric equations."""
    spec = config.scheme[0]
    found = record_law(config, spec, observables=("close",), times=phases.phase_times(config), tell=tell)
    half = phases.half_times(found)
    theory = phases.symmetric_times(laws.find_law(spec, config.layers), config, found.times)
    rows = [(beta, *pair) for beta, *pair in zip(config.beta, half.tolist(), theory.tolist(), strict=True)]
    return Findings(
        figures=(
            phases.phase_figure(spec, config, found, (phases.phase_curve("symmetric equations", config, theory),)),
        ),
        columns=("β", "half of the pairs have met", "symmetric equations"),
        rows=tuple(rows),
        verdicts=tuple(_judge(spec, config, half, theory)),
        notes=(
            f"{config.tokens} tokens in dimension {config.dim}, {counted(config.seeds, 'system')} for each β; "
            f"the curve is the limit of high dimension and is judged from dimension {_HIGH} on",
        ),
    )


def _judge(spec: str, config: SimulateConfig, half: np.ndarray, theory: np.ndarray) -> list[PredictionVerdict]:
    both = np.isfinite(half) & np.isfinite(theory)
    if not both.any():
        return []
    ratio = float(np.median(half[both] / theory[both]))
    predicted = 1.0 if config.dim >= _HIGH else None
    return [judge_prediction(spec, "time to meet over that of the symmetric equations", ratio, predicted, _LIMIT)]
