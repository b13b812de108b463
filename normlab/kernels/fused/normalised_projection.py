"""Triton kernels: RMSNorm followed by a small linear map, forward and backward, with matrix products on tensor cores.

Numbers of more than bf16 are multiplied in parts, as `parts.py` says. Forward, a program has some rows and takes their
columns piece by piece. Backward, it has some columns and takes its rows tile by tile, in a fixed order, so that the
gradient of the weight is a sum that stays in registers and is bitwise equal in every run.
"""

# Triton's language is not Python's: launch options and compile-time values look wrong to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from normlab.kernels.backends import interpreting
from normlab.kernels.fused import launch
from normlab.kernels.fused.norms import inverse_size
from normlab.kernels.fused.partials import sum_partials
from normlab.kernels.fused.parts import padded, parts, product, transposed

# Compiled for compute capability 9.0 with 24 outputs and bf16: 64 registers forward, and five programs fit on one
# multiprocessor; 246 backward, two programs. Larger tiles spill, and so do 64 outputs in fp16. On an H200: 0.65
# to 0.78 of the copy bandwidth forward and 0.54 to 0.60 backward, at width 768; other tiles were not timed.
_STAGES, _WARPS = 3, 4
_FORWARD_TILE, _BACKWARD_TILE = (64, 64), (32, 128)
"""(rows, columns)"""
_TOGETHER = 2
"""Programs of the backward kernel on one multiprocessor."""


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(u, inverse RMS of every row), in fp32."""
    rows, outputs, dim = _sizes(x, weight)
    u = torch.empty((*x.shape[:-1], outputs), dtype=torch.float32, device=x.device)
    inverse = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if rows:
        with torch.cuda.device_of(x):
            _forward[(triton.cdiv(rows, _FORWARD_TILE[0]),)](
                launch.as_rows(x), weight.contiguous(), u, inverse, rows, eps, outputs, dim, padded(outputs),
                *_FORWARD_TILE, _STAGES, interpreting(), num_warps=_WARPS,
            )  # fmt: skip
    return u, inverse


def backward(x, weight, u, inverse, d_x, d_u) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight; `d_x` is that of the rows that were handed on, or None."""
    rows, outputs, dim = _sizes(x, weight)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tiles, pieces = triton.cdiv(rows, _BACKWARD_TILE[0]), triton.cdiv(dim, _BACKWARD_TILE[1])
    programs = launch.shares(tiles, pieces, _TOGETHER, x)
    new = torch.empty if rows else torch.zeros
    partial = new(1, programs, outputs * dim, dtype=torch.float32, device=x.device)
    if rows:
        upstream = None if d_x is None else launch.as_rows(d_x)
        with torch.cuda.device_of(x):
            _backward[(pieces, programs)](
                launch.as_rows(x), *(t.contiguous() for t in (weight, u, inverse)), upstream, d_u.contiguous(), dx,
                partial, rows, outputs, dim, padded(outputs), *_BACKWARD_TILE, _STAGES, interpreting(),
                num_warps=_WARPS,
            )  # fmt: skip
    return dx, sum_partials(partial).view(outputs, dim)


def _sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    """(rows, K, D)."""
    outputs, dim = weight.shape
    return x.numel() // max(1, dim), outputs, dim


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x_at, weight_at, u_at, inverse_at, rows, eps,
    K: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    output = tl.arange(0, PADDED)
    # 64 bits for the start of a tile only: within it 32 are enough and cost half the registers.
    start = tl.program_id(0).to(tl.int64) * ROWS
    known = start + row < rows
    total = tl.zeros((ROWS, PADDED), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for first in tl.range(0, DIM, BLOCK, num_stages=STAGES):
        column = first + tl.arange(0, BLOCK)
        within = (column < DIM)[None, :]
        at = start * DIM + (row[:, None] * DIM + column[None, :])
        x = tl.load(x_at + at, mask=known[:, None] & within, other=0.0)
        weight = tl.load(
            weight_at + output[:, None] * DIM + column[None, :], mask=(output < K)[:, None] & within, other=0.0
        )
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
        total = product(parts(x), transposed(parts(weight)), total, INTERPRETED)
    inverse = inverse_size(squares, eps, DIM)
    tl.store(inverse_at + start + row, inverse, mask=known)
    at = start * K + (row[:, None] * K + output[None, :])
    tl.store(u_at + at, total * inverse[:, None], mask=known[:, None] & (output < K)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _backward(
    x_at, weight_at, u_at, inverse_at, d_x_at, d_u_at, dx_at, partial_at, rows,
    K: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    output = tl.arange(0, PADDED)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    share = tl.program_id(1)
    within = (column < DIM)[None, :]
    place = output[:, None] * DIM + column[None, :]
    real = (output < K)[:, None] & within
    weight = parts(tl.load(weight_at + place, mask=real, other=0.0))
    d_weight = tl.zeros((PADDED, BLOCK), tl.float32)
    for tile in tl.range(share, tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        start = tl.cast(tile, tl.int64) * ROWS
        known = start + row < rows
        small = start * K + (row[:, None] * K + output[None, :])
        exists = known[:, None] & (output < K)[None, :]
        at = start * DIM + (row[:, None] * DIM + column[None, :])
        inside = known[:, None] & within
        x = tl.load(x_at + at, mask=inside, other=0.0)
        inverse = tl.load(inverse_at + start + row, mask=known, other=0.0)
        d = tl.load(d_u_at + small, mask=exists, other=0.0) * inverse[:, None]
        u = tl.load(u_at + small, mask=exists, other=0.0)
        along = tl.sum(d * u, axis=1) * inverse / DIM
        d_parts = parts(d)
        dx = product(d_parts, weight, tl.zeros((ROWS, BLOCK), tl.float32), INTERPRETED)
        dx -= along[:, None] * x.to(tl.float32)
        if d_x_at is not None:
            dx += tl.load(d_x_at + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_at + at, dx.to(dx_at.dtype.element_ty), mask=inside)
        d_weight = product(transposed(d_parts), parts(x), d_weight, INTERPRETED)
    tl.store(partial_at + share.to(tl.int64) * (K * DIM) + place, d_weight, mask=real)
