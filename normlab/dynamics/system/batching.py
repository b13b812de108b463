"""Several laws in one batch: small systems cost calls and not arithmetic, and a call takes all schemes at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from normlab.dynamics.config import SimulateConfig
from normlab.schemes.contract.law import Law, Motion

_SMALL = 2**18
"""Numbers of the largest tensor of a batch, scores or tokens, up to which schemes share one."""


def groups(config: SimulateConfig, laws: Sequence[Law]) -> list[list[int]]:
    """Which laws may be followed in one batch, by places: those that change at the same times, if there is room."""
    if config.method == "network":
        return [[place] for place in range(len(laws))]
    each = len(config.beta) * config.seeds * config.tokens * max(config.tokens, config.dim)
    room = max(1, _SMALL // each)
    alike: dict[tuple, list[int]] = {}
    for place, law in enumerate(laws):
        alike.setdefault((law.reads_state, law.switches, law.resets_radius), []).append(place)
    return [places[first : first + room] for places in alike.values() for first in range(0, len(places), room)]


def joined(laws: Sequence[Law]) -> Law:
    """One law for equally many systems of each, the first law's first."""
    if len(laws) == 1:
        return laws[0]
    return dataclasses.replace(
        laws[0],
        speed=_each([law.speed for law in laws if law.speed is not None]),
        radial=_each([law.radial for law in laws]),
        temperature=lambda time: torch.cat(
            [law.temperature(part) for law, part in zip(laws, time.chunk(len(laws)), strict=True)]
        ),
    )


def _each(functions: Sequence[Callable[[Motion], Tensor]]) -> Callable[[Motion], Tensor]:
    """Each function of its own systems."""
    count = len(functions)
    return lambda motion: torch.cat([f(part) for f, part in zip(functions, _parts(motion, count), strict=True)])


def _parts(motion: Motion, count: int) -> Iterator[Motion]:
    columns = [getattr(motion, spec.name).chunk(count) for spec in dataclasses.fields(motion)]
    return (Motion(*parts) for parts in zip(*columns, strict=True))
