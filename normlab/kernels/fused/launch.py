"""How rows are laid over a GPU: tiles, programs, and the constants that kernels read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

from normlab.kernels.backends import MAX_DIM, interpreting

__all__ = ["MAX_DIM", "Tile", "as_rows", "interpreting", "programs", "tile"]

_TILE = 4096
"""Elements in flight per program: narrow rows are taken several at a time."""


@dataclass(frozen=True)
class Tile:
    """A program's share: `rows` rows of `block` columns, the power of two that holds the width."""

    rows: int
    block: int
    warps: int


@cache
def tile(dim: int, elements: int = _TILE) -> Tile:
    """The tile for rows of width `dim`: about sixteen elements a thread."""
    block = triton.next_power_of_2(dim)
    rows = max(1, elements // block)
    warps = min(32, max(4, rows * block // 512))
    return Tile(rows, block, warps)


@cache
def programs(device: torch.device) -> int:
    """Programs that fill the device once, for kernels that add up over rows in a fixed order."""
    if interpreting():
        return 3  # an odd few, so that tests see uneven shares
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """(..., D) as contiguous (rows, D); copies only what is not contiguous."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()
