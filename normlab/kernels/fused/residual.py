"""Triton kernels: residual addition with up to three norms (shape, write, read), forward and backward."""

# Triton's decorator hides signatures, and names bound under a constant condition look unbound.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from normlab.kernels.backends import interpreting
from normlab.kernels.fused.launch import Sweep, as_rows, pointer_or, sweep, visit
from normlab.kernels.fused.norms import centre, column_values, inverse_size, normalise, normalise_back, sums
from normlab.kernels.fused.partials import sum_partials
from normlab.kernels.residual import has_input

# KIND of a place: 0 nothing, 1 RMSNorm, 2 LayerNorm, 3 a scale.


@triton.jit
def _normalise_and_back(v, d, inside, eps, DIM: tl.constexpr, KIND: tl.constexpr, PAIRED: tl.constexpr):
    """(normalised rows, gradient of the rows), given the rows and the gradient of the normalised rows."""
    if KIND == 3:
        n = v
    else:
        v = centre(v, inside, DIM, KIND)
        squares, along = sums(v * v, d * v, PAIRED)
        inverse = inverse_size(squares, eps, DIM)
        n = v * inverse[:, None]
        d = centre(d, inside, DIM, KIND)
        d = (d - n * (along * inverse / DIM)[:, None]) * inverse[:, None]
    return n, d


@triton.jit
def _add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _two_norms_and_back(v, w_gain, d, w_eps, r_eps, DIM: tl.constexpr, DTYPE: tl.constexpr, PAIRED: tl.constexpr):
    """An RMSNorm of an RMSNorm: (first normalised rows, its inverse RMS, second normalised rows, gradient between).

    Both inverse RMS values follow from three sums over the input rows, so one reduction is enough.
    """
    gained = v * w_gain
    if PAIRED:
        squares, gained_squares, along = tl.reduce((v * v, gained * gained, gained * d), 1, _add_three)
    else:
        squares = tl.sum(v * v, axis=1)
        gained_squares = tl.sum(gained * gained, axis=1)
        along = tl.sum(gained * d, axis=1)
    inverse_w = inverse_size(squares, w_eps, DIM)
    inverse_r = inverse_size(gained_squares * inverse_w * inverse_w, r_eps, DIM)
    state = (gained * inverse_w[:, None]).to(DTYPE).to(tl.float32)
    n_r = state * inverse_r[:, None]
    d = (d - n_r * (along * inverse_w * inverse_r / DIM)[:, None]) * inverse_r[:, None]
    return v * inverse_w[:, None], inverse_w, n_r, d


@triton.jit
def _forward_tile(
    first, x_ptr, g_ptr, state_ptr, seen_ptr, keep_ptr, step_ptr, scale_ptr,
    sg_ptr, sb_ptr, wg_ptr, wb_ptr, rg_ptr, rb_ptr, rows, s_eps, w_eps, r_eps,
    DIM: tl.constexpr, HAS_G: tl.constexpr, KEEP: tl.constexpr, STEP: tl.constexpr, SCALE: tl.constexpr,
    SHAPE: tl.constexpr, WRITE: tl.constexpr, READ: tl.constexpr, COPY: tl.constexpr,
    SG: tl.constexpr, SB: tl.constexpr, WG: tl.constexpr, WB: tl.constexpr, RG: tl.constexpr, RB: tl.constexpr,
    S_OFF: tl.constexpr, W_OFF: tl.constexpr, R_OFF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    within = column < DIM
    inside = (row < rows)[:, None] & within[None, :]
    place = row.to(tl.int64)[:, None] * DIM + column[None, :]
    state = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_G:
        u = tl.load(g_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if SHAPE > 0:
            n, _ = normalise(u, inside, s_eps, DIM, SHAPE)
            u = n * column_values(sg_ptr, column, within, SG, S_OFF, 1.0)[None, :]
            u += column_values(sb_ptr, column, within, SB, False, 0.0)[None, :]
        if STEP:
            u *= tl.load(step_ptr).to(tl.float32)
        if KEEP:
            state *= tl.load(keep_ptr).to(tl.float32)
        state += u
        if WRITE > 0:
            n, _ = normalise(state, inside, w_eps, DIM, WRITE)
            state = n * column_values(wg_ptr, column, within, WG, W_OFF, 1.0)[None, :]
            state += column_values(wb_ptr, column, within, WB, False, 0.0)[None, :]
        rounded = state.to(state_ptr.dtype.element_ty)
        tl.store(state_ptr + place, rounded, mask=inside)
        # The next norm reads the rounded value that was stored, so that results equal those without fusion.
        state = rounded.to(tl.float32)
    if READ > 0:
        n, _ = normalise(state, inside, r_eps, DIM, READ)
        y = n * column_values(rg_ptr, column, within, RG, R_OFF, 1.0)[None, :]
        y += column_values(rb_ptr, column, within, RB, False, 0.0)[None, :]
        if SCALE:
            y *= tl.load(scale_ptr).to(tl.float32)
        tl.store(seen_ptr + place, y.to(seen_ptr.dtype.element_ty), mask=inside)
    elif COPY:
        tl.store(seen_ptr + place, state.to(seen_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x_ptr, g_ptr, state_ptr, seen_ptr, keep_ptr, step_ptr, scale_ptr, sg_ptr, sb_ptr, wg_ptr, wb_ptr, rg_ptr, rb_ptr,
    rows, s_eps, w_eps, r_eps,
    DIM: tl.constexpr, HAS_G: tl.constexpr, KEEP: tl.constexpr, STEP: tl.constexpr, SCALE: tl.constexpr,
    SHAPE: tl.constexpr, WRITE: tl.constexpr, READ: tl.constexpr, COPY: tl.constexpr,
    SG: tl.constexpr, SB: tl.constexpr, WG: tl.constexpr, WB: tl.constexpr, RG: tl.constexpr, RB: tl.constexpr,
    S_OFF: tl.constexpr, W_OFF: tl.constexpr, R_OFF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    if STAGES == 1:
        _forward_tile(
            first, x_ptr, g_ptr, state_ptr, seen_ptr, keep_ptr, step_ptr, scale_ptr,
            sg_ptr, sb_ptr, wg_ptr, wb_ptr, rg_ptr, rb_ptr, rows, s_eps, w_eps, r_eps, DIM, HAS_G, KEEP, STEP, SCALE,
            SHAPE, WRITE, READ, COPY, SG, SB, WG, WB, RG, RB, S_OFF, W_OFF, R_OFF, ROWS, BLOCK,
        )  # fmt: skip
    else:
        for tile in tl.range(first, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
            _forward_tile(
                tile, x_ptr, g_ptr, state_ptr, seen_ptr, keep_ptr, step_ptr, scale_ptr,
                sg_ptr, sb_ptr, wg_ptr, wb_ptr, rg_ptr, rb_ptr, rows, s_eps, w_eps, r_eps, DIM, HAS_G, KEEP, STEP,
                SCALE, SHAPE, WRITE, READ, COPY, SG, SB, WG, WB, RG, RB, S_OFF, W_OFF, R_OFF, ROWS, BLOCK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _backward(
    x_ptr, g_ptr, state_ptr, d_state_ptr, d_input_ptr, dx_ptr, dg_ptr, partial_ptr,
    keep_ptr, step_ptr, scale_ptr, sg_ptr, sb_ptr, wg_ptr, wb_ptr, rg_ptr, rb_ptr,
    rows, s_eps, w_eps, r_eps,
    DIM: tl.constexpr, HAS_G: tl.constexpr, KEEP: tl.constexpr, STEP: tl.constexpr, SCALE: tl.constexpr,
    D_STATE: tl.constexpr, D_INPUT: tl.constexpr, SEPARATE: tl.constexpr,
    SHAPE: tl.constexpr, WRITE: tl.constexpr, READ: tl.constexpr,
    SG: tl.constexpr, SB: tl.constexpr, WG: tl.constexpr, WB: tl.constexpr, RG: tl.constexpr, RB: tl.constexpr,
    S_OFF: tl.constexpr, W_OFF: tl.constexpr, R_OFF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, PAIRED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    within = column < DIM
    s_gain = column_values(sg_ptr, column, within, SG, S_OFF, 1.0)[None, :]
    w_gain = column_values(wg_ptr, column, within, WG, W_OFF, 1.0)[None, :]
    r_gain = column_values(rg_ptr, column, within, RG, R_OFF, 1.0)[None, :]
    keep = tl.load(keep_ptr).to(tl.float32) if KEEP else 1.0
    step = tl.load(step_ptr).to(tl.float32) if STEP else 1.0
    scale = tl.load(scale_ptr).to(tl.float32) if SCALE else 1.0
    d_sg = tl.zeros((BLOCK,), tl.float32)
    d_sb = tl.zeros((BLOCK,), tl.float32)
    d_wg = tl.zeros((BLOCK,), tl.float32)
    d_wb = tl.zeros((BLOCK,), tl.float32)
    d_rg = tl.zeros((BLOCK,), tl.float32)
    d_rb = tl.zeros((BLOCK,), tl.float32)
    # Every program visits its tiles in a fixed order, so sums over rows are deterministic.
    for first in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & within[None, :]
        place = row.to(tl.int64)[:, None] * DIM + column[None, :]
        # Every tensor is loaded where it is first used: until then it takes shared memory but no registers.
        if WRITE > 0:
            u = tl.load(g_ptr + place, mask=inside, other=0.0).to(tl.float32)
            if SHAPE > 0:
                n_s, inverse_s = normalise(u, inside, s_eps, DIM, SHAPE)
                u = n_s * s_gain + column_values(sb_ptr, column, within, SB, False, 0.0)[None, :]
            v = keep * tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32) + step * u
        if D_INPUT:
            d = tl.load(d_input_ptr + place, mask=inside, other=0.0).to(tl.float32)
            if READ > 0:
                d *= scale
        if CHAINED:
            n_w, inverse_w, n_r, back = _two_norms_and_back(
                v, w_gain, d * r_gain, w_eps, r_eps, DIM, dx_ptr.dtype.element_ty, PAIRED
            )
        else:
            if WRITE > 0:
                n_w, inverse_w = normalise(v, inside, w_eps, DIM, WRITE)
            if D_INPUT and READ > 0:
                if WRITE > 0:
                    state = n_w * w_gain + column_values(wb_ptr, column, within, WB, False, 0.0)[None, :]
                    state = state.to(dx_ptr.dtype.element_ty).to(tl.float32)
                else:
                    state = tl.load(state_ptr + place, mask=inside, other=0.0).to(tl.float32)
                n_r, back = _normalise_and_back(state, d * r_gain, inside, r_eps, DIM, READ, PAIRED)
        if D_INPUT and READ > 0:
            if RG:
                d_rg += tl.sum(d * n_r, axis=0)
            if RB:
                d_rb += tl.sum(d, axis=0)
            d = back
        if D_STATE:
            from_state = tl.load(d_state_ptr + place, mask=inside, other=0.0).to(tl.float32)
            d = d + from_state if D_INPUT else from_state
        if WRITE > 0:
            if WG:
                d_wg += tl.sum(d * n_w, axis=0)
            if WB:
                d_wb += tl.sum(d, axis=0)
            d = normalise_back(d * w_gain, n_w, inverse_w, inside, DIM, WRITE)
        tl.store(dx_ptr + place, (keep * d).to(dx_ptr.dtype.element_ty), mask=inside)
        if HAS_G and SEPARATE:
            d *= step
            if SHAPE > 0:
                if WRITE > 0:
                    back = normalise_back(d * s_gain, n_s, inverse_s, inside, DIM, SHAPE)
                else:
                    g = tl.load(g_ptr + place, mask=inside, other=0.0).to(tl.float32)
                    n_s, back = _normalise_and_back(g, d * s_gain, inside, s_eps, DIM, SHAPE, PAIRED)
                if SG:
                    d_sg += tl.sum(d * n_s, axis=0)
                if SB:
                    d_sb += tl.sum(d, axis=0)
                d = back
            tl.store(dg_ptr + place, d.to(dg_ptr.dtype.element_ty), mask=inside)
    slot = partial_ptr + program * DIM + column
    size = tl.num_programs(0) * DIM
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


def forward(x, g, constants, affines, kinds, eps, offsets, input_dtype) -> tuple[Tensor, Tensor]:
    """(state, input); the input is empty if it equals the state, the state is empty without an update."""
    flat = as_rows(x)
    update = None if g is None else as_rows(g)
    rows, dim = flat.shape
    state = torch.empty(x.shape, dtype=x.dtype, device=x.device) if g is not None else x.new_empty(0)
    own = has_input(x, kinds, input_dtype)
    seen = torch.empty(x.shape if own else 0, dtype=input_dtype, device=x.device)
    if rows:
        # Two norms in sequence leave the memory idle in between, unless the next row is prefetched.
        walk = visit(dim, rows, (flat, update), ahead=dim > 4096 and kinds[0] in (1, 2))
        pointers = [pointer_or(t, flat) for t in (update, state, seen, *constants, *affines)]
        _forward[(walk.programs,)](
            flat, *pointers, rows, *eps, DIM=dim, HAS_G=g is not None, COPY=own and not kinds[2],
            **_flags(constants, affines, kinds, offsets), ROWS=walk.tile.rows, BLOCK=walk.tile.block,
            STAGES=walk.stages, num_warps=walk.tile.warps,
        )  # fmt: skip
    return state, seen


def _walk(dim: int, rows: int, reads: list[Tensor | None], gains: int, chained: bool, wide: bool) -> Sweep:
    """Grid of the backward kernel; the numbers are the best of searches on an H200."""
    # An fp32 state: measured for steps without a write norm, which read no x.
    if dim <= 1024 and wide and reads[0] is None:
        narrow = dim <= 256
        return sweep(dim, rows, reads, elements=1024 if narrow else 2048, per_thread=32, together=4 if narrow else 2)
    if dim <= 1024:
        return sweep(dim, rows, reads, elements=2048, per_thread=32, together=4)
    if dim <= 2048:
        return sweep(dim, rows, reads, elements=1, per_thread=16, together=3)
    if dim <= 4096 and gains < 2:
        return sweep(dim, rows, reads, elements=1, per_thread=32, together=2)
    if dim <= 4096:
        return sweep(dim, rows, reads, elements=1, per_thread=16, together=1, most_stages=3)
    # Two norms in sequence fill the registers with their gains and sums: more threads with fewer elements, no prefetch.
    return sweep(
        dim, rows, reads, elements=1, per_thread=16 if chained else 32, together=1, most_stages=1 if chained else 4
    )


def backward(
    x, g, state, constants, affines, kinds, eps, offsets, d_state, d_input, state_dtype, update_dtype, separate
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dg, gradients of the gains and biases that exist, stacked in order)."""
    given = d_state if d_state is not None else d_input
    dim, rows = given.shape[-1], given.numel() // given.shape[-1]
    dx = torch.empty(given.shape, dtype=state_dtype, device=given.device)
    dg = torch.empty(given.shape, dtype=update_dtype, device=given.device) if separate else dx.new_empty(0)
    wanted = sum(affine is not None for affine in affines)
    flat = [None if t is None else as_rows(t) for t in (x, g, state, d_state, d_input)]
    chained = kinds[1:] == [1, 1] and affines[3] is None and d_input is not None
    walk = _walk(dim, rows, flat, wanted, chained, state_dtype == torch.float32)
    partial = torch.zeros if rows == 0 else torch.empty
    sums = partial(wanted, walk.programs, dim, dtype=torch.float32, device=given.device)
    if rows:
        pointers = [pointer_or(t, dx) for t in (*flat, dx, dg, sums, *constants, *affines)]
        _backward[(walk.programs,)](
            *pointers, rows, *eps, DIM=dim, HAS_G=separate or g is not None, D_STATE=d_state is not None,
            D_INPUT=d_input is not None, SEPARATE=separate, **_flags(constants, affines, kinds, offsets),
            ROWS=walk.tile.rows, BLOCK=walk.tile.block, STAGES=walk.stages, PAIRED=not interpreting(), CHAINED=chained,
            num_warps=walk.tile.warps,
        )  # fmt: skip
    return dx, dg, sum_partials(sums)
