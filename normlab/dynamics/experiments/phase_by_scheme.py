"""Experiment phase-by-scheme: the phase diagram (share of merged pairs over time and β) of every scheme.

Schemes whose speed divisor s is the same for all tokens have Post-Norm's trajectories in the time τ = ∫dt/s, so their
diagrams must equal Post-Norm's with a rescaled time axis. Schemes with a divisor that differs between tokens (Pre,
Peri, nGPT, Mix) have diagrams of their own, for which no prediction is published.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import torch

from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.experiments import phases
from normlab.dynamics.experiments.result import Findings, PredictionVerdict, judge_prediction
from normlab.dynamics.progress import ProgressCallback, subtask
from normlab.dynamics.recording import Recording, record_law
from normlab.dynamics.system import laws
from normlab.dynamics.system.clocks import CommonSpeedClock
from normlab.errors import NormLabError
from normlab.utils.text import counted

_LIMIT = 0.01
"""Tolerance of the shares: a few pairs in ten thousand are within the integrator's error of the limit."""
_UNBOUNDED = 1e6


def run(config: SimulateConfig, tell: ProgressCallback) -> Findings:
    """Simulate every scheme over β and compare those with a common divisor."""
    found = {}
    for place, (spec, times) in enumerate(_times(config).items()):
        each = subtask(tell, place, len(config.scheme))
        found[spec] = record_law(config, spec, observables=("close",), times=times, tell=each)
    halves = {spec: phases.half_times(one) for spec, one in found.items()}
    shown = np.linspace(0, len(config.beta) - 1, min(9, len(config.beta))).round().astype(int)
    return Findings(
        figures=tuple(
            phases.phase_figure(spec, config, one, (phases.phase_curve("half of the pairs", config, halves[spec]),))
            for spec, one in found.items()
        ),
        columns=("scheme", *(f"β = {config.beta[k]:g}" for k in shown)),
        rows=tuple((spec, *(float(half[k]) for k in shown)) for spec, half in halves.items()),
        verdicts=tuple(_judge(config, found)),
        notes=(
            f"times at which half of the pairs have met; {config.tokens} tokens in dimension {config.dim}, "
            f"{counted(config.seeds, 'system')} for each β, the same for all schemes; laws are those of "
            f"{counted(config.layers, 'block')}",
        ),
    )


def _times(config: SimulateConfig) -> dict[str, list[float]]:
    """Recorded times of each scheme; schemes with a common divisor are recorded at equal τ."""
    times, clocks = phases.phase_times(config), _clocks(config)
    chosen = dict.fromkeys(config.scheme, times)
    if not clocks:
        return chosen
    first, *others = clocks
    taus = torch.tensor([clocks[first].tau(time) for time in times], dtype=torch.float64)
    for spec in others:
        own = clocks[spec].time(taus[taus < clocks[spec].tau(config.time)])
        chosen[spec] = [*own.tolist(), config.time]
    return chosen


def _judge(config: SimulateConfig, found: dict[str, Recording]) -> list[PredictionVerdict]:
    """Compare schemes with a common divisor with the first of them, time by time."""
    common, verdicts = list(_clocks(config)), []
    for spec in common[1:]:
        # The last recorded time is the end time, where τ differs between the two.
        shares = found[spec].values["close"].mean(-1)[:-1]
        first = found[common[0]].values["close"].mean(-1)[: len(shares)]
        quantity = f"largest difference of shares from {common[0]} on its clock"
        verdicts.append(judge_prediction(spec, quantity, float(abs(shares - first).max()), 0.0, _LIMIT))
    return verdicts


def _clocks(config: SimulateConfig) -> dict[str, CommonSpeedClock]:
    """The time change τ = ∫dt/s of every scheme whose divisor is the same for all tokens."""
    # Weighted means of unit vectors have length 1 at most; other outputs of attention have no such bound.
    plain = config.weights == "identity" and config.kind == "softmax" and config.heads == 1 and not config.mlp
    longest, clocks = 1.0 if plain else _UNBOUNDED, {}
    for spec in config.scheme:
        law = laws.find_law(spec, config.layers)
        with suppress(NormLabError):
            clocks[spec] = CommonSpeedClock(law, config.time, longest)
    return clocks
