"""Systems of a simulation: every β with every seed, in chunks that fit the caches, with their tokens at time zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normlab.dynamics import choices
from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.system.clocks import Clock, Logarithmic, Plain
from normlab.dynamics.system.flow import ParticleState, unit
from normlab.dynamics.system.integrators import DormandPrince, Method, RungeKutta4
from normlab.errors import NormLabError

_MOST = 256
"""Systems in a chunk; more of them leave the caches."""
_SCORES = 2**22
"""Numbers of the largest tensor of a chunk, scores or tokens."""
_SPREAD = 0.1
"""Distance of a token from the centre of a clustered start."""


@dataclass(frozen=True)
class SystemChunk:
    """Some systems: β and seed of each."""

    betas: tuple[float, ...]
    seeds: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.seeds)


def chunks(config: SimulateConfig) -> Iterator[SystemChunk]:
    """All systems in order: every seed of the first β, then those of the next."""
    pairs = [(beta, config.seed + k) for beta in config.beta for k in range(config.seeds)]
    size = max(1, min(_MOST, _SCORES // (config.tokens * max(config.tokens, config.dim))))
    for first in range(0, len(pairs), size):
        betas, seeds = zip(*pairs[first : first + size], strict=True)
        yield SystemChunk(betas, seeds)


def start(config: SimulateConfig, seeds: Sequence[int]) -> ParticleState:
    """Tokens at time zero, the same for a seed whatever the device, the number format and the other systems."""
    kinds = {seed: _tokens(config.start, config.tokens, config.dim, seed) for seed in sorted(set(seeds))}
    theta = torch.stack([kinds[seed] for seed in seeds]).to(device(config), dtype(config))
    radius = theta.new_full(theta.shape[:2], config.radius)
    return ParticleState(theta, radius, theta.new_zeros(len(seeds)))


def device(config: SimulateConfig) -> torch.device:
    """Where to compute."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(config.device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise NormLabError(f"cannot compute on {config.device!r} ({reason}); try cpu, or normlab doctor") from None
    return found


def dtype(config: SimulateConfig) -> torch.dtype:
    return {"float32": torch.float32, "float64": torch.float64}[config.dtype]


def clock(config: SimulateConfig) -> Clock:
    return {"plain": Plain(), "log": Logarithmic()}[config.clock]


def integrator(config: SimulateConfig) -> Method:
    """The method that follows a law."""
    if config.method == "dopri":
        return DormandPrince(tolerance=config.tolerance, clock=clock(config))
    return RungeKutta4(step=config.step, clock=clock(config))


def look_times(config: SimulateConfig) -> list[float]:
    """Zero, and as many times as there are looks up to the horizon; a network has states at its blocks alone."""
    ticker = clock(config)
    taus = torch.linspace(0.0, ticker.tau(config.time), config.looks + 1, dtype=torch.float64)
    times = [float(time) for time in ticker.time(taus)]
    if config.method != "network":
        return [*times[:-1], config.time]
    return sorted({round(time * config.cut) / config.cut for time in times})


def _tokens(kind: choices.Start, count: int, dim: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, dim, generator=draw, dtype=torch.float64)
    if kind == "uniform":
        return unit(noise)
    if kind == "orthonormal":
        return torch.linalg.qr(noise.mT).Q.mT
    centre = unit(torch.randn(dim, generator=draw, dtype=torch.float64))
    return unit(centre + _SPREAD * dim**-0.5 * noise)
