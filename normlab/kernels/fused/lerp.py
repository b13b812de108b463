"""Triton kernels: nGPT's interpolation step with its backward pass, and weights scaled to unit length.

u = h + α ⊙ (t − h) with t = n(g), y = n(u), n(v) = v/√(Σv² + eps²). Upstream gradients d = d_state + d_input give

    du = (d − y (y·d)) / √(Σu² + eps²)
    dh = du − α ⊙ du
    dg = (α ⊙ du − t (t·(α ⊙ du))) / √(Σg² + eps²)
    dα = Σ_rows du ⊙ (t − h)

which is exact with eps, because y and t include it. Both directions read every input once and write every output once;
the backward pass recomputes t, u and y. Sums over rows have a fixed order: two runs are bitwise equal.
"""

# Triton's language is not Python's: launch options and compile-time values look wrong to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from normlab.kernels.fused import launch, partials

_ROWS, _COLUMNS = 32, 128
"""Tile of a weight whose columns are scaled: rows of 256 bytes in bf16."""

_CHUNKS = 32
"""Largest number of partial sums per column."""

_CHUNK = 256
"""Smallest number of rows per partial sum."""

_L2 = 24 * 1024 * 1024
"""Bytes of weight per group of columns, so that the second pass over a group reads from the L2 cache."""

_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


def lerp_forward(
    h: torch.Tensor, g: torch.Tensor, alpha: torch.Tensor, eps: float, input_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    copies = input_dtype != h.dtype
    y = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    seen = torch.empty(h.shape if copies else 0, dtype=input_dtype, device=h.device)
    state, update = launch.as_rows(h), launch.as_rows(g)
    rows, dim = state.shape
    plan = launch.tile(dim)
    if rows:
        with torch.cuda.device_of(h):
            _forward[(triton.cdiv(rows, plan.rows),)](
                state, update, alpha.contiguous(), y, seen, rows, eps**2,
                dim, plan.rows, plan.block, copies, num_warps=plan.warps,
            )  # fmt: skip
    return y, seen


def lerp_backward(
    h: torch.Tensor,
    g: torch.Tensor,
    alpha: torch.Tensor,
    eps: float,
    d_state: torch.Tensor | None,
    d_input: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    dg = torch.empty(g.shape, dtype=g.dtype, device=g.device)
    state, update = launch.as_rows(h), launch.as_rows(g)
    upstream = [None if d is None else launch.as_rows(d) for d in (d_state, d_input)]
    rows, dim = state.shape
    if not rows:
        return dh, dg, torch.zeros(alpha.shape, dtype=alpha.dtype, device=alpha.device)
    reads, together = (state, update, *upstream), 2 if dim <= 2048 else 1
    sweep = launch.sweep(dim, rows, reads, elements=4096 if dim <= 1024 else 1, per_thread=32, together=together)
    plan, programs = sweep.tile, sweep.programs
    partial = torch.empty(programs, dim, dtype=torch.float32, device=h.device)
    with torch.cuda.device_of(h):
        _backward[(programs,)](
            state,
            update,
            alpha.contiguous(),
            *upstream,
            dh,
            dg,
            partial,
            rows,
            triton.cdiv(rows, plan.rows),
            eps**2,
            dim,
            plan.rows,
            plan.block,
            sweep.stages,
            num_warps=plan.warps,
        )
    return dh, dg, partials.sum_partials(partial[None])[0].to(alpha.dtype)


def unit_rows_(weight: torch.Tensor, axis: int) -> None:
    """Scale a contiguous weight in place to unit length along `axis`, -1 or -2."""
    if weight.numel():
        with torch.cuda.device_of(weight):
            if axis == -1:
                _scale_rows_(weight)
            else:
                _scale_columns_(weight)


def _scale_rows_(weight: torch.Tensor) -> None:
    dim = weight.shape[-1]
    rows = weight.numel() // dim
    plan = launch.tile(dim)
    _unit_rows[(triton.cdiv(rows, plan.rows),)](weight, rows, dim, plan.rows, plan.block, num_warps=plan.warps)


def _scale_columns_(weight: torch.Tensor) -> None:
    height, width = weight.shape[-2:]
    matrices = weight.view(-1, height, width)
    chunk = max(_CHUNK, _ROWS * triton.cdiv(height, _ROWS * _CHUNKS))
    chunks = triton.cdiv(height, chunk)
    column = height * weight.element_size()
    group = max(1, _L2 // (column * width))
    share = max(_COLUMNS, _L2 // column // _COLUMNS * _COLUMNS)
    squares = torch.empty(min(group, len(matrices)), chunks, width, dtype=torch.float32, device=weight.device)
    for some in matrices.split(group):
        for first in range(0, width, share):
            last = min(width, first + share)
            grid = (chunks, triton.cdiv(last - first, _COLUMNS), len(some))
            tile = (height, width, first, last, chunk, _ROWS, _COLUMNS)
            _column_squares[grid](some, squares, *tile, num_warps=8)
            _unit_columns[grid](some, squares, *tile, triton.next_power_of_2(chunks), num_warps=8)


@triton.jit
def _unit(v, eps_square):
    """n(v), and the factor that v was multiplied by."""
    inverse = tl.rsqrt(tl.sum(v * v, axis=1) + eps_square)[:, None]
    return v * inverse, inverse


@triton.jit(do_not_specialize=["rows"])
def _forward(
    h_at,
    g_at,
    alpha_at,
    y_at,
    seen_at,
    rows,
    eps_square,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COPY: tl.constexpr,
):
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    # 64 bits for the start of a tile only: within it 32 are enough and cost half the registers.
    start = tl.program_id(0).to(tl.int64) * ROWS
    inside = (start + row < rows) & (column < DIM)
    at = start * DIM + (row * DIM + column)
    alpha = tl.load(alpha_at + column, mask=column < DIM, other=0.0).to(tl.float32)
    h = tl.load(h_at + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_at + at, mask=inside, other=0.0).to(tl.float32)
    target, _ = _unit(g, eps_square)
    y, _ = _unit(h + alpha * (target - h), eps_square)
    y = y.to(y_at.dtype.element_ty)
    tl.store(y_at + at, y, mask=inside)
    if COPY:
        tl.store(seen_at + at, y.to(seen_at.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _backward(
    h_at,
    g_at,
    alpha_at,
    d_state_at,
    d_input_at,
    dh_at,
    dg_at,
    partial_at,
    rows,
    tiles,
    eps_square,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    alpha = tl.load(alpha_at + column, mask=column < DIM, other=0.0).to(tl.float32)
    d_alpha = tl.zeros((ROWS, BLOCK), tl.float32)
    first = tl.program_id(0)
    for tile in tl.range(first, tiles, tl.num_programs(0), num_stages=STAGES):
        start = tl.cast(tile, tl.int64) * ROWS
        inside = (start + row < rows) & (column < DIM)
        at = start * DIM + (row * DIM + column)
        h = tl.load(h_at + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(g_at + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.zeros((ROWS, BLOCK), tl.float32)
        if d_state_at is not None:
            d += tl.load(d_state_at + at, mask=inside, other=0.0).to(tl.float32)
        if d_input_at is not None:
            d += tl.load(d_input_at + at, mask=inside, other=0.0).to(tl.float32)
        target, g_inverse = _unit(g, eps_square)
        turn = target - h
        y, u_inverse = _unit(h + alpha * turn, eps_square)
        du = u_inverse * (d - y * tl.sum(y * d, axis=1)[:, None])
        d_alpha += du * turn
        d_target = alpha * du
        dg = g_inverse * (d_target - target * tl.sum(target * d_target, axis=1)[:, None])
        tl.store(dh_at + at, (du - d_target).to(dh_at.dtype.element_ty), mask=inside)
        tl.store(dg_at + at, dg.to(dg_at.dtype.element_ty), mask=inside)
    place = tl.arange(0, BLOCK)
    tl.store(partial_at + first.to(tl.int64) * DIM + place, tl.sum(d_alpha, axis=0), mask=place < DIM)


@triton.jit
def _inverse_length(squares):
    return 1.0 / tl.maximum(tl.sqrt_rn(squares), _TINY)


@triton.jit(do_not_specialize=["rows"])
def _unit_rows(weight_at, rows, DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    start = tl.program_id(0).to(tl.int64) * ROWS
    inside = (start + row < rows) & (column < DIM)
    at = weight_at + start * DIM + (row * DIM + column)
    weight = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    inverse = _inverse_length(tl.sum(weight * weight, axis=1))[:, None]
    tl.store(at, (weight * inverse).to(weight_at.dtype.element_ty), mask=inside)


@triton.jit
def _column_squares(
    weight_at,
    squares_at,
    height,
    width,
    first,
    last,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums of squares over CHUNK rows, for each column: (matrices, chunks, width)."""
    column = first + tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    matrix = tl.program_id(2).to(tl.int64)
    start = tl.program_id(0) * CHUNK
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(0, CHUNK, ROWS):
        row = start + step + tl.arange(0, ROWS)
        inside = (row < height)[:, None] & (column < last)[None, :]
        at = (matrix * height + row)[:, None] * width + column[None, :]
        weight = tl.load(weight_at + at, mask=inside, other=0.0).to(tl.float32)
        squares += weight * weight
    place = (matrix * tl.num_programs(0) + tl.program_id(0)) * width + column
    tl.store(squares_at + place, tl.sum(squares, axis=0), mask=column < last)


@triton.jit
def _unit_columns(
    weight_at,
    squares_at,
    height,
    width,
    first,
    last,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    column = first + tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    matrix = tl.program_id(2).to(tl.int64)
    chunks = tl.num_programs(0)
    part = tl.arange(0, PARTS)
    place = (matrix * chunks + part)[:, None] * width + column[None, :]
    known = (part < chunks)[:, None] & (column < last)[None, :]
    inverse = _inverse_length(tl.sum(tl.load(squares_at + place, mask=known, other=0.0), axis=0))[None, :]
    start = tl.program_id(0) * CHUNK
    for step in range(0, CHUNK, ROWS):
        row = start + step + tl.arange(0, ROWS)
        inside = (row < height)[:, None] & (column < last)[None, :]
        at = weight_at + (matrix * height + row)[:, None] * width + column[None, :]
        weight = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, (weight * inverse).to(weight_at.dtype.element_ty), mask=inside)
