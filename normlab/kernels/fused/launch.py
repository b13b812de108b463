"""Launch configuration of row-wise Triton kernels: tile sizes, number of programs, warps and pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton

from normlab.kernels.backends import interpreting

# The numbers below were measured on an H200. Forward kernels are fastest with few threads and many elements each;
# backward kernels prefetch tiles into shared memory, which the programs on one multiprocessor must share.
_SHARED = 200 * 1024
"""Shared memory in bytes that the programs of one multiprocessor may prefetch into."""

_OVERHEAD = 2 * 1024
"""Shared memory in bytes that a program takes beside its tiles: for the system, and for reductions."""

_REGISTERS = 65536
"""Registers of one multiprocessor."""


@dataclass(frozen=True)
class Tile:
    """The tile of one program: `rows` rows of `block` columns, the smallest power of two that holds the width."""

    rows: int
    block: int
    warps: int


@dataclass(frozen=True)
class Sweep:
    """A grid of persistent programs that loop over all tiles in a fixed order, prefetching `stages` tiles."""

    tile: Tile
    programs: int
    stages: int
    registers: int = 255
    """Most that a thread may have, if all programs of a multiprocessor are to run at once."""


def tile(dim: int, per_thread: int = 32) -> Tile:
    """Tile size of a kernel that visits every row once; a tile holds several rows if they are narrow."""
    return _tile(dim, 1024, per_thread)


def visit(dim: int, rows: int, reads: Sequence[torch.Tensor | None], *, ahead: bool) -> Sweep:
    """Grid of a kernel that visits every row once: one program per tile, or two per multiprocessor that prefetch."""
    wide = _tile(dim, 1, 16)
    if ahead and 2 * 2 * _tile_bytes(wide, reads) <= _SHARED:
        return Sweep(wide, _programs(rows, 2, reads), 2)
    plan = tile(dim)
    return Sweep(plan, triton.cdiv(rows, plan.rows), 1)


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
    """Grid of a kernel that sums over rows.

    `reads` are the tensors of which it loads a tile in each iteration, `elements` the smallest size of a tile, and
    `together` the number of programs on one multiprocessor.
    """
    plan = _tile(dim, elements, per_thread)
    ahead = max(1, together * _tile_bytes(plan, reads))
    # A fourth stage is faster only if it leaves a third of the shared memory free.
    stages = 4 if 4 * ahead <= _SHARED * 2 // 3 else min(3, _SHARED // ahead)
    return Sweep(plan, _programs(triton.cdiv(rows, plan.rows), together, reads), max(1, min(stages, most_stages)))


def chunks(
    dim: int,
    rows: int,
    reads: Sequence[torch.Tensor | None],
    *,
    per_thread: int,
    vector: int,
    registers: int,
    most_stages: int = 3,
) -> Sweep:
    """Grid of a kernel that sums over rows and takes a row in chunks, with `vector` elements of each in a thread.

    A row is padded to a multiple of a chunk and not to a power of two. As many programs run together as registers and
    shared memory allow: they hide one another's latency. `most_stages` applies to programs that have company.
    """
    warps = min(32, triton.next_power_of_2(triton.cdiv(dim, 32 * per_thread)))
    block = min(32 * warps * vector, triton.next_power_of_2(dim))
    plan = Tile(32 * warps * vector // block, block, warps)
    most = max(1, _REGISTERS // (32 * warps * registers))
    fit = _shared_memory(_device(reads)) // (triton.cdiv(dim, block) * _tile_bytes(plan, reads) + _OVERHEAD)
    together = max(1, min(most, fit))
    # The pipeline keeps one tile less than it has stages, and loads the next one at the end of an iteration.
    stages = min(most_stages if together > 1 else 3, 1 + fit // together)
    if together == 1 and stages <= 2:
        # Nothing would be computed while a tile is loaded.
        together, stages = most, 1
    programs = _programs(triton.cdiv(rows, plan.rows), together, reads)
    return Sweep(plan, programs, stages, most_registers(warps, together))


def most_registers(warps: int, together: int) -> int:
    """Most registers of a thread, if so many programs are to run on one multiprocessor."""
    return min(255, _REGISTERS // (32 * warps * max(1, together)) // 8 * 8)


def _tile(dim: int, elements: int, per_thread: int) -> Tile:
    block = triton.next_power_of_2(dim)
    rows = max(1, elements // block)
    return Tile(rows, block, min(32, max(1, rows * block // (32 * per_thread))))


def _tile_bytes(plan: Tile, reads: Sequence[torch.Tensor | None]) -> int:
    return plan.rows * plan.block * sum(read.element_size() for read in reads if read is not None)


def shares(tiles: int, pieces: int, together: int, like: torch.Tensor) -> int:
    """Programs that share the tiles of rows, where every tile is taken by `pieces` programs, each with its columns."""
    return _even(tiles, 3 if interpreting() else together * _multiprocessors(like.device) // pieces)


def _programs(tiles: int, together: int, reads: Sequence[torch.Tensor | None]) -> int:
    # In the interpreter: an odd few, so that tests cover uneven shares.
    return _even(tiles, 3 if interpreting() else together * _multiprocessors(_device(reads)))


def _even(tiles: int, most: int) -> int:
    """The smallest number of programs that needs no more rounds than the most that run at once: an even last round."""
    return max(1, triton.cdiv(tiles, max(1, triton.cdiv(tiles, max(1, most)))))


def _device(reads: Sequence[torch.Tensor | None]) -> torch.device:
    return next(read.device for read in reads if read is not None)


@cache
def _shared_memory(device: torch.device) -> int:
    """Shared memory in bytes of one multiprocessor: that of an H200 in the interpreter."""
    if interpreting():
        return 228 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """(..., D) as contiguous (rows, D); copies only what is not contiguous."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


def pointer_or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """The tensor, or `other` in place of an absent argument: the kernel needs a pointer there, and does not read it."""
    return other if tensor is None else tensor
