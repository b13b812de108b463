"""Logits to their slope, a row at a time: once over memory, twice over the cache.

The first pass keeps a running maximum m and Σ exp(z − m) in every lane, the second turns the row into its slope. With
m and the sum apart, nothing is lost where logits are large: neither p = exp(z − m)/Σ nor log p = (z − m) − log Σ ever
holds the small difference of two large numbers.

A row of 50,304 in bf16 is 98 KiB. Two rows a multiprocessor, 26 MB on an H200, stay in its L2 cache between the passes.
"""

# Triton's language is not Python's: launch options and compile-time values look wrong to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 8192
"""Elements of a row that are read at a time: enough on their way to hide the memory's latency."""

WARPS = 16
"""Sixteen elements a thread: two such programs fit on a multiprocessor."""

LANE = 8
"""Neighbours that share a running maximum, 16 bytes of bf16: one exponential more for eight elements, not for each."""

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""Where a running maximum starts: −∞ − (−∞) would be NaN in lanes that have seen nothing yet."""


@triton.jit
def _clear(row_ptr, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    for first in range(0, WIDTH, BLOCK):
        zeros = tl.zeros(column.shape, row_ptr.dtype.element_ty)
        tl.store(row_ptr + first + column, zeros, mask=first + column < WIDTH)


@triton.jit
def _statistics(row_ptr, column, WIDTH: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """max z and Σ exp(z − max z)."""
    high = tl.full([LANES], _LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for first in range(0, WIDTH, BLOCK):
        inside = first + column < WIDTH
        # Kept in the cache: it is read once more, and soon.
        z = tl.load(row_ptr + first + column, mask=inside, other=-float("inf"), eviction_policy="evict_last")
        z = z.to(tl.float32)
        higher = tl.maximum(high, tl.max(z, 1))
        total = total * tl.exp(high - higher) + tl.sum(tl.exp(z - higher[:, None]), 1)
        high = higher
    highest = tl.max(high, 0)
    return highest, tl.sum(total * tl.exp(high - highest), 0)


@triton.jit
def _turn_into_slope(row_ptr, column, target, highest, factor, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    for first in range(0, WIDTH, BLOCK):
        inside = first + column < WIDTH
        z = tl.load(row_ptr + first + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        slope = tl.exp(z - highest) * factor - tl.where(first + column == target, 1.0, 0.0)
        tl.store(row_ptr + first + column, slope.to(row_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["ignore_index"])
def _slope(
    logits_ptr, targets_ptr, normaliser_ptr, log_p_ptr, row_stride, z_loss, ignore_index,
    WIDTH: tl.constexpr, LANES: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    column = tl.arange(0, LANES)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        _clear(row_ptr, column, WIDTH, LANES * LANE)
        tl.store(normaliser_ptr + row, 0.0)
        tl.store(log_p_ptr + row, 0.0)
    else:
        # Read before the slope takes its place; what lies outside of the row makes all of it NaN.
        known = (target >= 0) & (target < WIDTH)
        logit = tl.load(row_ptr + target, mask=known, other=float("nan")).to(tl.float32)
        highest, total = _statistics(row_ptr, column, WIDTH, LANES, LANES * LANE)
        total = tl.where(known, total, float("nan"))
        normaliser = highest + tl.log(total)
        tl.store(normaliser_ptr + row, normaliser)
        tl.store(log_p_ptr + row, (logit - highest) - tl.log(total))
        # All threads have read the target's logit before any of them overwrites it.
        tl.debug_barrier()
        factor = (1.0 + 2.0 * z_loss * normaliser) / total
        _turn_into_slope(row_ptr, column, target, highest, factor, WIDTH, LANES * LANE)


def slope_(logits: torch.Tensor, targets: torch.Tensor, z_loss: float, ignore_index: int) -> torch.Tensor:
    """Turns logits into their slope; (2, N): log Σ exp z and the target's log-probability, 0 where it is ignored."""
    rows, width = logits.shape
    numbers = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    lanes = min(BLOCK, max(LANE, triton.next_power_of_2(width))) // LANE
    if rows:
        with torch.cuda.device_of(logits):
            _slope[(rows,)](
                logits, targets.contiguous(), *numbers, logits.stride(0), z_loss, ignore_index,
                WIDTH=width, LANES=lanes, LANE=LANE, num_warps=min(WARPS, max(1, lanes * LANE // 256)),
            )  # fmt: skip
    return numbers
