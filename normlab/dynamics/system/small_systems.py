"""Small systems: batch several laws together, and run on one thread.

Small systems are limited by call overhead, not by arithmetic. Several laws therefore share a batch. Threads
synchronise several times in an evaluation: below a millisecond of work they gain little on an idle machine, and on a
busy one each wait can last a scheduler time slice, hundreds of times as long as the work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from normlab.dynamics.config import SimulateConfig
from normlab.schemes.contract.law import Law, Motion
from normlab.utils.threads import one_thread

_SMALL = 2**18
"""Elements of the largest tensor of a batch (scores or tokens) up to which laws share a batch."""
_SHARED = 2**23
"""Operations of an evaluation from which several threads are used: about a millisecond of one core."""
_EXPONENTIAL = 8
"""Cost of the exponential of a score, in multiply-adds."""


def batch_groups(config: SimulateConfig, laws: Sequence[Law]) -> list[list[int]]:
    """Group laws that can share a batch, as lists of indices: laws that switch at the same times, while small."""
    if config.method == "network":
        return [[place] for place in range(len(laws))]
    each = len(config.beta) * config.seeds * config.tokens * max(config.tokens, config.dim)
    room = max(1, _SMALL // each)
    alike: dict[tuple, list[int]] = {}
    for place, law in enumerate(laws):
        alike.setdefault((law.reads_state, law.switches, law.resets_radius), []).append(place)
    return [places[first : first + room] for places in alike.values() for first in range(0, len(places), room)]


def join_laws(laws: Sequence[Law]) -> Law:
    """Join laws into one law for a batch with equally many systems of each, in the order of the laws."""
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
    """Apply each function to its own chunk of the batch."""
    count = len(functions)
    return lambda motion: torch.cat([f(part) for f, part in zip(functions, _parts(motion, count), strict=True)])


def _parts(motion: Motion, count: int) -> Iterator[Motion]:
    columns = [getattr(motion, spec.name).chunk(count) for spec in dataclasses.fields(motion)]
    return (Motion(*parts) for parts in zip(*columns, strict=True))


def limit_threads(tokens: Tensor) -> AbstractContextManager[None]:
    """Run on one thread within this context if tokens (S, n, d) are few; else keep the number of threads."""
    systems, count, dim = tokens.shape
    return one_thread(when=systems * count**2 * (dim + _EXPONENTIAL) < _SHARED)
