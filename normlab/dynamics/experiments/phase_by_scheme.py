"""The phase diagram for every scheme, from the same tokens.

Schemes whose divisor s is common to all tokens run through Post-Norm's orbit on a clock of their own, τ = ∫dt/s: their
diagrams must be Post-Norm's with the time axis redrawn. Those that divide by a length that tokens have of their own
(Pre, Peri, nGPT, Mix) have diagrams of their own, of which nothing is published.
"""

from __future__ import annotations

import numpy as np
import torch

from normlab.dynamics import laws
from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.experiments import phases
from normlab.dynamics.experiments.result import Findings, Tell, Verdict, judge, part
from normlab.dynamics.record import Record, record
from normlab.schemes.law import Law, Motion
from normlab.words import counted

_LIMIT = 0.01
"""Largest difference of shares: a few pairs in ten thousand lie within the integrator's error of having met."""
_FINE = 20_000
"""Points of a clock."""


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
    times, (fine, clocks) = np.asarray(phases.look_times(config)), _clocks(config)
    chosen = {spec: times.tolist() for spec in config.scheme}
    if not clocks:
        return chosen
    first, *others = clocks
    taus = np.interp(times, fine, clocks[first])
    for spec in others:
        own = np.interp(taus[taus < clocks[spec][-1]], clocks[spec], fine)
        chosen[spec] = [*own.tolist(), config.time]
    return chosen


def _judge(config: SimulateConfig, found: dict[str, Record]) -> list[Verdict]:
    """Schemes with a common divisor against the first of them, look by look."""
    common, verdicts = list(_clocks(config)[1]), []
    for spec in common[1:]:
        # The last look is at the horizon, where the two clocks part.
        shares = found[spec].values["close"].mean(-1)[:-1]
        first = found[common[0]].values["close"].mean(-1)[: len(shares)]
        quantity = f"largest difference of shares from {common[0]} on its clock"
        verdicts.append(judge(spec, quantity, float(abs(shares - first).max()), 0.0, _LIMIT))
    return verdicts


def _clocks(config: SimulateConfig) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Times, and τ at each of them for every scheme whose divisor is common to all tokens."""
    fine = np.linspace(0.0, config.time, _FINE + 1)
    clocks = {spec: _clock(laws.find(spec, config.layers), fine) for spec in config.scheme}
    return fine, {spec: clock for spec, clock in clocks.items() if clock is not None}


def _clock(law: Law, times: np.ndarray) -> np.ndarray | None:
    """τ = ∫dt/s at each time; None where s depends on the tokens."""
    moments = torch.as_tensor(times)
    middles = (moments[1:] + moments[:-1]) / 2
    slow, fast = (_divisor(law, middles, size) for size in (0.3, 0.9))
    if law.reads_state or not torch.equal(slow, fast) or bool((law.temperature(moments) != 1).any()):
        return None
    return np.concatenate([[0.0], ((moments[1:] - moments[:-1]) / slow).cumsum(0).numpy()])


def _divisor(law: Law, times: torch.Tensor, size: float) -> torch.Tensor:
    """s of tokens whose every length is `size`."""
    assert law.speed is not None
    sizes = torch.full_like(times, size)
    return law.speed(Motion(time=times, radius=sizes, attention=sizes, radial=sizes, tangent=sizes)).expand_as(times)
