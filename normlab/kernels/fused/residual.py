"""The residual step with its norms as two Triton kernels, specialised by what stands in its three places."""

# Triton's decorator hides signatures, and names bound under a constant condition look unbound.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from normlab.kernels.fused.launch import as_rows, sweep, tile

# Kinds of a place: 0 nothing, 1 RMSNorm, 2 LayerNorm, 3 a scale.


@triton.jit
def _column(pointer, columns, inside, HAS: tl.constexpr, OFFSET: tl.constexpr, DEFAULT: tl.constexpr):
    """A gain or bias along the columns in fp32; its default where there is none."""
    if HAS:
        value = tl.load(pointer + columns, mask=inside, other=0.0).to(tl.float32)
        if OFFSET:
            value += 1.0
    else:
        value = tl.full(columns.shape, DEFAULT, tl.float32)
    return value


@triton.jit
def _normalise(v, inside, D, eps, KIND: tl.constexpr):
    """(normalised rows, inverse size); a scale leaves rows as they are."""
    if KIND == 3:
        inverse = tl.full((v.shape[0],), 1.0, tl.float32)
        n = v
    else:
        if KIND == 2:
            v = tl.where(inside, v - (tl.sum(v, axis=1) / D)[:, None], 0.0)
        inverse = 1.0 / tl.sqrt(tl.sum(v * v, axis=1) / D + eps)
        n = v * inverse[:, None]
    return n, inverse


@triton.jit
def _normalise_back(d, n, inverse, inside, D, KIND: tl.constexpr):
    """Gradient of the rows, given that of the normalised rows."""
    if KIND != 3:
        along = tl.sum(d * n, axis=1) / D
        if KIND == 2:
            d = d - (tl.sum(d, axis=1) / D)[:, None]
        d = tl.where(inside, (d - n * along[:, None]) * inverse[:, None], 0.0)
    return d


@triton.jit
def _forward(
    x_ptr, g_ptr, state_ptr, seen_ptr, keep_ptr, step_ptr, scale_ptr, sg_ptr, sb_ptr, wg_ptr, wb_ptr, rg_ptr, rb_ptr,
    rows, D, s_eps, w_eps, r_eps,
    HAS_G: tl.constexpr, KEEP: tl.constexpr, STEP: tl.constexpr, SCALE: tl.constexpr,
    SHAPE: tl.constexpr, WRITE: tl.constexpr, READ: tl.constexpr,
    SG: tl.constexpr, SB: tl.constexpr, WG: tl.constexpr, WB: tl.constexpr, RG: tl.constexpr, RB: tl.constexpr,
    S_OFF: tl.constexpr, W_OFF: tl.constexpr, R_OFF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    within = column < D
    inside = (row < rows)[:, None] & within[None, :]
    place = row[:, None] * D + column[None, :]
    state = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_G:
        u = tl.load(g_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if SHAPE > 0:
            n, _ = _normalise(u, inside, D, s_eps, SHAPE)
            u = n * _column(sg_ptr, column, within, SG, S_OFF, 1.0)[None, :]
            u += _column(sb_ptr, column, within, SB, False, 0.0)[None, :]
        if STEP:
            u *= tl.load(step_ptr).to(tl.float32)
        if KEEP:
            state *= tl.load(keep_ptr).to(tl.float32)
        state += u
        if WRITE > 0:
            n, _ = _normalise(state, inside, D, w_eps, WRITE)
            state = n * _column(wg_ptr, column, within, WG, W_OFF, 1.0)[None, :]
            state += _column(wb_ptr, column, within, WB, False, 0.0)[None, :]
        rounded = state.to(state_ptr.dtype.element_ty)
        tl.store(state_ptr + place, rounded, mask=inside)
        # The next norm reads what was stored, not what was computed: the same numbers as without fusion.
        state = tl.where(inside, rounded.to(tl.float32), 0.0)
    if READ > 0:
        n, _ = _normalise(state, inside, D, r_eps, READ)
        y = n * _column(rg_ptr, column, within, RG, R_OFF, 1.0)[None, :]
        y += _column(rb_ptr, column, within, RB, False, 0.0)[None, :]
        if SCALE:
            y *= tl.load(scale_ptr).to(tl.float32)
        tl.store(seen_ptr + place, y.to(seen_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    x_ptr, g_ptr, state_ptr, d_state_ptr, d_input_ptr, dx_ptr, dg_ptr, partial_ptr,
    keep_ptr, step_ptr, scale_ptr, sg_ptr, sb_ptr, wg_ptr, wb_ptr, rg_ptr, rb_ptr,
    rows, D, s_eps, w_eps, r_eps,
    HAS_G: tl.constexpr, KEEP: tl.constexpr, STEP: tl.constexpr, SCALE: tl.constexpr, D_STATE: tl.constexpr,
    D_INPUT: tl.constexpr, SEPARATE: tl.constexpr, SHAPE: tl.constexpr, WRITE: tl.constexpr, READ: tl.constexpr,
    SG: tl.constexpr, SB: tl.constexpr, WG: tl.constexpr, WB: tl.constexpr, RG: tl.constexpr, RB: tl.constexpr,
    S_OFF: tl.constexpr, W_OFF: tl.constexpr, R_OFF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    within = column < D
    s_gain = _column(sg_ptr, column, within, SG, S_OFF, 1.0)[None, :]
    w_gain = _column(wg_ptr, column, within, WG, W_OFF, 1.0)[None, :]
    r_gain = _column(rg_ptr, column, within, RG, R_OFF, 1.0)[None, :]
    keep = tl.load(keep_ptr).to(tl.float32) if KEEP else 1.0
    step = tl.load(step_ptr).to(tl.float32) if STEP else 1.0
    scale = tl.load(scale_ptr).to(tl.float32) if SCALE else 1.0
    d_sg = tl.zeros((BLOCK,), tl.float32)
    d_sb = tl.zeros((BLOCK,), tl.float32)
    d_wg = tl.zeros((BLOCK,), tl.float32)
    d_wb = tl.zeros((BLOCK,), tl.float32)
    d_rg = tl.zeros((BLOCK,), tl.float32)
    d_rb = tl.zeros((BLOCK,), tl.float32)
    # Every program takes its row tiles in the same order every time: sums over rows are deterministic.
    for first in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & within[None, :]
        place = row.to(tl.int64)[:, None] * D + column[None, :]
        if SHAPE > 0 or WRITE > 0:
            g = tl.load(g_ptr + place, mask=inside, other=0.0).to(tl.float32)
            u = g
            if SHAPE > 0:
                n_s, inverse_s = _normalise(g, inside, D, s_eps, SHAPE)
                if WRITE > 0:
                    u = n_s * s_gain + _column(sb_ptr, column, within, SB, False, 0.0)[None, :]
        if WRITE > 0:
            x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
            n_w, inverse_w = _normalise(keep * x + step * u, inside, D, w_eps, WRITE)
        d = tl.zeros((ROWS, BLOCK), tl.float32)
        if D_STATE:
            d += tl.load(d_state_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if D_INPUT:
            dy = tl.load(d_input_ptr + place, mask=inside, other=0.0).to(tl.float32)
            if READ > 0:
                if WRITE > 0:
                    state = n_w * w_gain + _column(wb_ptr, column, within, WB, False, 0.0)[None, :]
                    state = tl.where(inside, state.to(dx_ptr.dtype.element_ty).to(tl.float32), 0.0)
                else:
                    state = tl.load(state_ptr + place, mask=inside, other=0.0).to(tl.float32)
                n_r, inverse_r = _normalise(state, inside, D, r_eps, READ)
                dy *= scale
                if RG:
                    d_rg += tl.sum(dy * n_r, axis=0)
                if RB:
                    d_rb += tl.sum(dy, axis=0)
                dy = _normalise_back(dy * r_gain, n_r, inverse_r, inside, D, READ)
            d += dy
        if WRITE > 0:
            if WG:
                d_wg += tl.sum(d * n_w, axis=0)
            if WB:
                d_wb += tl.sum(d, axis=0)
            d = _normalise_back(d * w_gain, n_w, inverse_w, inside, D, WRITE)
        tl.store(dx_ptr + place, (keep * d).to(dx_ptr.dtype.element_ty), mask=inside)
        if HAS_G and SEPARATE:
            d *= step
            if SHAPE > 0:
                if SG:
                    d_sg += tl.sum(d * n_s, axis=0)
                if SB:
                    d_sb += tl.sum(d, axis=0)
                d = _normalise_back(d * s_gain, n_s, inverse_s, inside, D, SHAPE)
            tl.store(dg_ptr + place, d.to(dg_ptr.dtype.element_ty), mask=inside)
    slot = partial_ptr + program * D + column
    size = tl.num_programs(0) * D
    if SG:
        tl.store(slot, d_sg, mask=within)
        slot += size
    if SB:
        tl.store(slot, d_sb, mask=within)
        slot += size
    if WG:
        tl.store(slot, d_wg, mask=within)
        slot += size
    if WB:
        tl.store(slot, d_wb, mask=within)
        slot += size
    if RG:
        tl.store(slot, d_rg, mask=within)
        slot += size
    if RB:
        tl.store(slot, d_rb, mask=within)


def _flags(constants: list[Tensor | None], affines: list[Tensor | None], kinds: list[int], offsets: list[bool]) -> dict:
    names = ("SG", "SB", "WG", "WB", "RG", "RB")
    return {
        **{name: value is not None for name, value in zip(("KEEP", "STEP", "SCALE"), constants, strict=True)},
        **dict(zip(("SHAPE", "WRITE", "READ"), kinds, strict=True)),
        **{name: value is not None for name, value in zip(names, affines, strict=True)},
        **dict(zip(("S_OFF", "W_OFF", "R_OFF"), offsets, strict=True)),
    }


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer for what is not there: never read."""
    return other if tensor is None else tensor


def forward(x, g, constants, affines, kinds, eps, offsets) -> tuple[Tensor, Tensor]:
    """(state, input); the input is empty where nothing is read through a norm, the state where there is no update."""
    flat = as_rows(x)
    update = None if g is None else as_rows(g)
    rows, dim = flat.shape
    state = torch.empty(x.shape, dtype=x.dtype, device=x.device) if g is not None else x.new_empty(0)
    seen = torch.empty(x.shape, dtype=x.dtype, device=x.device) if kinds[2] else x.new_empty(0)
    if rows:
        plan = tile(dim, per_thread=16 if kinds[0] and dim >= 4096 else 32)
        pointers = [_or(t, flat) for t in (update, state, seen, *constants, *affines)]
        _forward[(triton.cdiv(rows, plan.rows),)](
            flat, *pointers, rows, dim, *eps, HAS_G=g is not None, **_flags(constants, affines, kinds, offsets),
            ROWS=plan.rows, BLOCK=plan.block, num_warps=plan.warps,
        )  # fmt: skip
    return state, seen


def backward(
    x, g, state, constants, affines, kinds, eps, offsets, d_state, d_input, update_dtype, separate
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dg, gradients of the gains and biases that are there, stacked in order)."""
    given = d_state if d_state is not None else d_input
    dim, rows = given.shape[-1], given.numel() // given.shape[-1]
    dx = torch.empty(given.shape, dtype=given.dtype, device=given.device)
    dg = torch.empty(given.shape, dtype=update_dtype, device=given.device) if separate else given.new_empty(0)
    wanted = sum(affine is not None for affine in affines)
    flat = [None if t is None else as_rows(t) for t in (x, g, state, d_state, d_input)]
    narrow, crowded = dim <= 1024, wanted > 1 and dim > 4096
    # Two gains with their sums crowd the registers of a wide row: fewer, fuller threads, and less read ahead.
    walk = sweep(
        dim,
        rows,
        flat,
        elements=4096 if narrow else 1,
        per_thread=32 if narrow or crowded else 16,
        together=2,
        most_stages=2 if crowded else 4,
    )
    partial = torch.zeros if rows == 0 else torch.empty
    sums = partial(wanted, walk.programs, dim, dtype=torch.float32, device=given.device)
    if rows:
        pointers = [_or(t, dx) for t in (*flat, dx, dg, sums, *constants, *affines)]
        _backward[(walk.programs,)](
            *pointers, rows, dim, *eps, HAS_G=separate or g is not None, D_STATE=d_state is not None,
            D_INPUT=d_input is not None, SEPARATE=separate, **_flags(constants, affines, kinds, offsets),
            ROWS=walk.tile.rows, BLOCK=walk.tile.block, STAGES=walk.stages,
            num_warps=walk.tile.warps,
        )  # fmt: skip
    return dx, dg, sums.sum(1)
