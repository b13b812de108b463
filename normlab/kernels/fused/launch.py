"""How rows are laid over a GPU: tiles, programs, and the constants that kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton

from normlab.kernels.backends import interpreting

# The numbers below were measured on an H200. Forward kernels want few, well-filled threads; backward kernels live from
# reading tiles ahead into shared memory, which as many programs must share as run on one multiprocessor.
_WIDE = 4096
"""Rows of this many columns fill a multiprocessor's program on their own."""
_SHARED = 200 * 1024
"""Bytes that the programs of one multiprocessor may read ahead into."""


@dataclass(frozen=True)
class Tile:
    """A program's share: `rows` rows of `block` columns, the power of two that holds the width."""

    rows: int
    block: int
    warps: int


@dataclass(frozen=True)
class Sweep:
    """Programs that walk over all tiles in a fixed order, reading `stages` tiles ahead."""

    tile: Tile
    programs: int
    stages: int


def tile(dim: int, per_thread: int = 32) -> Tile:
    """The tile of a kernel that visits every row once; narrow rows are taken several at a time."""
    return _tile(dim, 2048, per_thread)


def sweep(
    dim: int,
    rows: int,
    reads: Sequence[torch.Tensor | None],
    *,
    elements: int,
    per_thread: int,
    together: int,
    most_stages: int = 4,
) -> Sweep:
    """The programs of a kernel that adds up over rows.

    `reads` are the tensors of which it reads a tile each time, `elements` the least size of a tile, and `together` the
    programs on one multiprocessor, unless rows are wide.
    """
    plan = _tile(dim, elements, per_thread)
    together = 1 if plan.block >= _WIDE else together
    ahead = together * plan.rows * plan.block * sum(read.element_size() for read in reads if read is not None)
    # A fourth stage pays only where it leaves a third of the memory free.
    stages = 4 if 4 * ahead <= _SHARED * 2 // 3 else min(3, _SHARED // max(ahead, 1))
    device = next(read.device for read in reads if read is not None)
    # Interpreted: an odd few, so that tests see uneven shares.
    programs = 3 if interpreting() else together * _multiprocessors(device)
    return Sweep(plan, max(1, min(programs, triton.cdiv(rows, plan.rows))), max(1, min(stages, most_stages)))


def _tile(dim: int, elements: int, per_thread: int) -> Tile:
    block = triton.next_power_of_2(dim)
    rows = max(1, elements // block)
    return Tile(rows, block, min(32, max(1, rows * block // (32 * per_thread))))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """(..., D) as contiguous (rows, D); copies only what is not contiguous."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()
