"""Triton kernels: ResiDual's step on a normalised and an accumulating stream, forward and backward.

v = p + step·f, p' = N(v), u' = u + scale·step·f. With d the sum of both gradients of p' and e that of u'

    dp = N'(v)·d,  du = e,  df = step·(dp + scale·e)

and the gradients of gain and bias are sums over rows, in a fixed order: two runs are bitwise equal.
"""

# Triton's language is not Python's: launch options and compile-time values look wrong to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from normlab.kernels.fused import launch
from normlab.kernels.fused.norms import column_values, normalise, normalise_back
from normlab.kernels.fused.partials import sum_partials


def forward(state, update, step, scale, gain, bias, kind, eps, offset) -> Tensor:
    """The next state, (..., 2, D)."""
    after = torch.empty(state.shape, dtype=state.dtype, device=state.device)
    streams, flat = launch.as_rows(state), launch.as_rows(update)
    rows, dim = flat.shape
    plan = launch.tile(dim)
    if rows:
        with torch.cuda.device_of(state):
            _forward[(triton.cdiv(rows, plan.rows),)](
                streams, flat, after, step, scale, gain, bias, rows, eps, dim, kind, offset, plan.rows, plan.block,
                num_warps=plan.warps,
            )  # fmt: skip
    return after


def backward(
    state, update, step, scale, gain, bias, kind, eps, offset, d_state, d_input
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of the state, of the update, of the gain and bias that exist, stacked)."""
    before = torch.empty(state.shape, dtype=state.dtype, device=state.device)
    d_update = torch.empty(update.shape, dtype=update.dtype, device=update.device)
    wanted = (gain is not None) + (bias is not None)
    streams, flat = launch.as_rows(state), launch.as_rows(update)
    upstream = [None if d is None else launch.as_rows(d) for d in (d_state, d_input)]
    rows, dim = flat.shape
    if not rows:
        return before, d_update, torch.zeros(wanted, dim, dtype=torch.float32, device=state.device)
    reads = (streams, flat, upstream[0], *upstream)
    walk = _walk(dim, rows, reads)
    partial = torch.empty(wanted, walk.programs, dim, dtype=torch.float32, device=state.device)
    with torch.cuda.device_of(state):
        _backward[(walk.programs,)](
            streams, flat, *upstream, before, d_update, partial, step, scale, gain, bias, rows, eps, dim, kind, offset,
            walk.tile.rows, walk.tile.block, walk.stages, num_warps=walk.tile.warps,
        )  # fmt: skip
    return before, d_update, sum_partials(partial)


def _walk(dim: int, rows: int, reads: tuple[Tensor | None, ...]) -> launch.Sweep:
    """Grid of the backward kernel: that of a single stream with one norm (`residual.py`), not measured for two."""
    if dim <= 1024:
        return launch.sweep(dim, rows, reads, elements=2048, per_thread=32, together=4)
    if dim <= 2048:
        return launch.sweep(dim, rows, reads, elements=1, per_thread=16, together=3)
    return launch.sweep(dim, rows, reads, elements=1, per_thread=32, together=2 if dim <= 4096 else 1)


@triton.jit
def _constant(at):
    """A factor from device memory, 1 if there is none."""
    if at is None:
        value = 1.0
    else:
        value = tl.load(at).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["rows"])
def _forward(
    state_at, update_at, after_at, step_at, scale_at, gain_at, bias_at, rows, eps,
    DIM: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)
    within = column < DIM
    # 64 bits for the start of a tile only: within it 32 are enough and cost half the registers.
    start = tl.program_id(0).to(tl.int64) * ROWS
    inside = (start + row < rows) & within[None, :]
    at = start * DIM + (row * DIM + column[None, :])
    first = 2 * start * DIM + (2 * row * DIM + column[None, :])
    f = _constant(step_at) * tl.load(update_at + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(state_at + first + DIM, mask=inside, other=0.0).to(tl.float32) + _constant(scale_at) * f
    tl.store(after_at + first + DIM, u.to(after_at.dtype.element_ty), mask=inside)
    v = tl.load(state_at + first, mask=inside, other=0.0).to(tl.float32) + f
    n, _ = normalise(v, inside, eps, DIM, KIND)
    p = n * column_values(gain_at, column, within, gain_at is not None, OFFSET, 1.0)[None, :]
    p += column_values(bias_at, column, within, bias_at is not None, False, 0.0)[None, :]
    tl.store(after_at + first, p.to(after_at.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    state_at, update_at, d_after_at, d_input_at, d_state_at, d_update_at, partial_at,
    step_at, scale_at, gain_at, bias_at, rows, eps,
    DIM: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)
    within = column < DIM
    step, scale = _constant(step_at), _constant(scale_at)
    gain = column_values(gain_at, column, within, gain_at is not None, OFFSET, 1.0)[None, :]
    d_gain = tl.zeros((BLOCK,), tl.float32)
    d_bias = tl.zeros((BLOCK,), tl.float32)
    program = tl.program_id(0)
    # Every program visits its tiles in a fixed order, so sums over rows are deterministic.
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        start = tl.cast(tile, tl.int64) * ROWS
        inside = (start + row < rows) & within[None, :]
        at = start * DIM + (row * DIM + column[None, :])
        first = 2 * start * DIM + (2 * row * DIM + column[None, :])
        f = step * tl.load(update_at + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(state_at + first, mask=inside, other=0.0).to(tl.float32) + f
        n, inverse = normalise(v, inside, eps, DIM, KIND)
        d = tl.zeros((ROWS, BLOCK), tl.float32)
        e = tl.zeros((ROWS, BLOCK), tl.float32)
        if d_input_at is not None:
            d += tl.load(d_input_at + at, mask=inside, other=0.0).to(tl.float32)
        if d_after_at is not None:
            d += tl.load(d_after_at + first, mask=inside, other=0.0).to(tl.float32)
            e += tl.load(d_after_at + first + DIM, mask=inside, other=0.0).to(tl.float32)
        if gain_at is not None:
            d_gain += tl.sum(d * n, axis=0)
        if bias_at is not None:
            d_bias += tl.sum(d, axis=0)
        d = normalise_back(d * gain, n, inverse, inside, DIM, KIND)
        tl.store(d_state_at + first, d.to(d_state_at.dtype.element_ty), mask=inside)
        tl.store(d_state_at + first + DIM, e.to(d_state_at.dtype.element_ty), mask=inside)
        tl.store(d_update_at + at, (step * (d + scale * e)).to(d_update_at.dtype.element_ty), mask=inside)
    slot = partial_at + program * DIM + column
    if gain_at is not None:
        tl.store(slot, d_gain, mask=within)
        slot += tl.num_programs(0) * DIM
    if bias_at is not None:
        tl.store(slot, d_bias, mask=within)
