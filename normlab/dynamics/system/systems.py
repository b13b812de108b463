"""From a SimulateConfig to systems (every β with every seed), initial tokens, device, integrator and recorded times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normlab.dynamics.config import SimulateConfig, StartName
from normlab.dynamics.system.clocks import Clock, LogClock, PlainClock
from normlab.dynamics.system.flow import ParticleState, unit
from normlab.dynamics.system.integrators import DormandPrince, Integrator, RungeKutta4
from normlab.errors import NormLabError

_MOST = 256
"""Largest number of systems in a chunk; more exceed the caches."""
_SCORES = 2**22
"""Largest number of elements of a tensor of a chunk (scores or tokens)."""
_SPREAD = 0.1
"""Distance of the tokens of a clustered start from their centre."""


@dataclass(frozen=True)
class SystemChunk:
    """A batch of systems: β and seed of each."""

    betas: tuple[float, ...]
    seeds: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.seeds)


def system_chunks(config: SimulateConfig) -> Iterator[SystemChunk]:
    """Yield all systems in chunks: every seed of the first β, then of the next."""
    pairs = [(beta, config.seed + k) for beta in config.beta for k in range(config.seeds)]
    size = max(1, min(_MOST, _SCORES // (config.tokens * max(config.tokens, config.dim))))
    for first in range(0, len(pairs), size):
        betas, seeds = zip(*pairs[first : first + size], strict=True)
        yield SystemChunk(betas, seeds)


def initial_state(config: SimulateConfig, seeds: Sequence[int]) -> ParticleState:
    """Initial tokens; they depend on the seed alone, not on device, dtype or the other systems."""
    kinds = {seed: _tokens(config.start, config.tokens, config.dim, seed) for seed in sorted(set(seeds))}
    theta = torch.stack([kinds[seed] for seed in seeds]).to(resolve_device(config), torch_dtype(config))
    radius = theta.new_full(theta.shape[:2], config.radius)
    return ParticleState(theta, radius, theta.new_zeros(len(seeds)))


def resolve_device(config: SimulateConfig) -> torch.device:
    """The device of the configuration; `auto` takes a GPU if there is one."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(config.device)
        torch.zeros(1, device=found).item()  # the meta device has shapes, but no numbers
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise NormLabError(f"cannot compute on {config.device!r} ({reason}); try cpu, or normlab doctor") from None
    return found


def torch_dtype(config: SimulateConfig) -> torch.dtype:
    """The dtype of the configuration."""
    return {"float32": torch.float32, "float64": torch.float64}[config.dtype]


def make_clock(config: SimulateConfig) -> Clock:
    """The clock of the configuration."""
    return {"plain": PlainClock(), "log": LogClock()}[config.clock]


def make_integrator(config: SimulateConfig) -> Integrator:
    """The integrator of the configuration."""
    if config.method == "dopri":
        return DormandPrince(tolerance=config.tolerance, clock=make_clock(config))
    return RungeKutta4(step=config.step, clock=make_clock(config))


def sample_times(config: SimulateConfig) -> list[float]:
    """Recorded times: zero and `looks` more up to the end time; for the method network rounded to blocks."""
    ticker = make_clock(config)
    taus = torch.linspace(0.0, ticker.tau(config.time), config.looks + 1, dtype=torch.float64)
    times = [float(time) for time in ticker.time(taus)]
    if config.method != "network":
        return [*times[:-1], config.time]
    return sorted({round(time * config.cut) / config.cut for time in times})


def _tokens(kind: StartName, count: int, dim: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, dim, generator=draw, dtype=torch.float64)
    if kind == "uniform":
        return unit(noise)
    if kind == "orthonormal":
        return torch.linalg.qr(noise.mT).Q.mT
    centre = unit(torch.randn(dim, generator=draw, dtype=torch.float64))
    return unit(centre + _SPREAD * dim**-0.5 * noise)
