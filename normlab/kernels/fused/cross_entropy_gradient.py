"""Triton kernel: gradient of the cross-entropy with respect to the logits, in place, one row per program.

The first pass keeps a running maximum m and Σ exp(z − m) in every lane (online softmax); the second replaces the row by
its gradient. Keeping m and the sum apart avoids cancellation for large logits: neither p = exp(z − m)/Σ nor
log p = (z − m) − log Σ is a small difference of two large numbers.

A row of 50,304 in bf16 is 98 KiB. Two rows per multiprocessor, 26 MB on an H200, stay in the L2 cache between the
passes.
"""

# Triton's language is not Python's: launch options and compile-time values look wrong to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 8192
"""Elements of a row that are loaded at a time: enough in flight to hide the memory latency."""

WARPS = 16
"""Sixteen elements per thread: two such programs fit on a multiprocessor."""

LANE = 8
"""Neighbours that share a running maximum, 16 bytes of bf16: one extra exponential per eight elements."""

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
"""Initial running maximum: −∞ − (−∞) would be NaN in lanes that have no element yet."""


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
        # Keep it in the cache for the second pass.
        z = tl.load(row_ptr + first + column, mask=inside, other=-float("inf"), eviction_policy="evict_last")
        z = z.to(tl.float32)
        higher = tl.maximum(high, tl.max(z, 1))
        total = total * tl.exp(high - higher) + tl.sum(tl.exp(z - higher[:, None]), 1)
        high = higher
    highest = tl.max(high, 0)
    return highest, tl.sum(total * tl.exp(high - highest), 0)


@triton.jit
def _write_gradient(row_ptr, column, target, highest, factor, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    for first in range(0, WIDTH, BLOCK):
        inside = first + column < WIDTH
        z = tl.load(row_ptr + first + column, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        gradient = tl.exp(z - highest) * factor - tl.where(first + column == target, 1.0, 0.0)
        tl.store(row_ptr + first + column, gradient.to(row_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["ignore_index"])
def _gradient(
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
        # Read before the gradient overwrites it. A target outside the row makes the whole row NaN.
        known = (target >= 0) & (target < WIDTH)
        logit = tl.load(row_ptr + target, mask=known, other=float("nan")).to(tl.float32)
        highest, total = _statistics(row_ptr, column, WIDTH, LANES, LANES * LANE)
        total = tl.where(known, total, float("nan"))
        normaliser = highest + tl.log(total)
        tl.store(normaliser_ptr + row, normaliser)
        tl.store(log_p_ptr + row, (logit - highest) - tl.log(total))
        # All threads must have read the target's logit before any of them overwrites it.
        tl.debug_barrier()
        factor = (1.0 + 2.0 * z_loss * normaliser) / total
        _write_gradient(row_ptr, column, target, highest, factor, WIDTH, LANES * LANE)


def gradient_(logits: torch.Tensor, targets: torch.Tensor, z_loss: float, ignore_index: int) -> torch.Tensor:
    """Replace logits by their gradient; returns (2, N): log Σ exp z and the target's log-probability, 0 if ignored."""
    rows, width = logits.shape
    numbers = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    lanes = min(BLOCK, max(LANE, triton.next_power_of_2(width))) // LANE
    if rows:
        with torch.cuda.device_of(logits):
            _gradient[(rows,)](
                logits, targets.contiguous(), *numbers, logits.stride(0), z_loss, ignore_index,
                WIDTH=width, LANES=lanes, LANE=LANE, num_warps=min(WARPS, max(1, lanes * LANE // 256)),
            )  # fmt: skip
    return numbers
