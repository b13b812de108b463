"""The phase diagram for every scheme, from the same tokens.

Schemes whose divisor s is common to all tokens run through Post-Norm's orbit on a clock of their own, τ = ∫dt/s: their
diagrams must be Post-Norm's with the time axis redrawn. Those that divide by a length that tokens have of their own
(Pre, Peri, nGPT, Mix) have diagrams of their own, of which nothing is published.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import torch

from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.experiments import phases
from normlab.dynamics.experiments.result import Findings, PredictionVerdict, Tell, judge, part
from normlab.dynamics.recording import Recording, record
from normlab.dynamics.system import laws
from normlab.dynamics.system.clocks import Common
from normlab.errors import NormLabError
from normlab.utils.text import counted

_LIMIT = 0.01
"""Largest difference of shares: a few pairs in ten thousand lie within the integrator's error of having met."""


def run(config: SimulateConfig, tell: Tell) -> Findings:
    """A diagram for each scheme."""
    found = {}
    for place, (spec, times) in enumerate(_times(config).items()):
        each = part(tell, place, len(config.scheme))
        found[spec] = record(config, spec, observables=("close",), times=times, tell=each)
    halves = {spec: phases.half_times(one) for spec, one in found.items()}
    shown = np.linspace(0, len(config.beta) - 1, min(9, len(config.beta))).round().astype(int)
    return Findings(
        figures=tuple(
            phases.diagram(spec, config, one, (phases.line("half of the pairs", config, halves[spec]),))
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
    """Looks of each scheme: where it shares the first scheme's orbits, at the same places on them."""
    times, clocks = phases.look_times(config), _clocks(config)
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
    """Schemes with a common divisor against the first of them, look by look."""
    common, verdicts = list(_clocks(config)), []
    for spec in common[1:]:
        # The last look is at the horizon, where the two clocks part.
        shares = found[spec].values["close"].mean(-1)[:-1]
        first = found[common[0]].values["close"].mean(-1)[: len(shares)]
        quantity = f"largest difference of shares from {common[0]} on its clock"
        verdicts.append(judge(spec, quantity, float(abs(shares - first).max()), 0.0, _LIMIT))
    return verdicts


def _clocks(config: SimulateConfig) -> dict[str, Common]:
    """The clock of every scheme whose divisor is common to all tokens."""
    clocks = {}
    for spec in config.scheme:
        law = laws.find(spec, config.layers)
        with suppress(NormLabError):
            clocks[spec] = Common(law, config.time)
    return clocks
