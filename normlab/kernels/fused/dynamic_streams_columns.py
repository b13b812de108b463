"""Triton kernel: the second pass of the gradients of a dynamic step of n streams, by columns.

The formulas are in `dynamic_streams_gradient.py`, whose first pass has found κ, d and ρ of every token. A program has
some columns, keeps its part of the weight, and takes its tokens tile by tile.
"""

# Triton's language is not Python's: launch options and compile-time values look wrong to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: RUF005  # Triton's tuples grow by addition only

from __future__ import annotations

import torch
import triton
import triton.language as tl

from normlab.kernels.backends import interpreting
from normlab.kernels.fused import launch
from normlab.kernels.fused.dynamic_streams import Plan
from normlab.kernels.fused.norms import column_values
from normlab.kernels.fused.parts import in_parts, load_parts, padded, product, transposed
from normlab.kernels.fused.streams import load_coefficients, load_streams, packed, sizes, written
from normlab.kernels.fused.streams_gradient import row_products, thread, weighted

# Compiled for compute capability 9.0 with n = 4, width 768 and bf16 nothing spills. Timed on an H200, 65536 tokens of
# that width (`benchmarks/dynamic_stream_plans.py`): 656 µs with 24 outputs of all streams and 690 with 6 of each, 0.55
# and 0.52 of the copy bandwidth; (16, 64, 4, 2, 2), of which a tile takes 1472 instructions in each of four warps, 782.
PLAN = Plan(16, 32, 2, 3, 4)
ZEROS = 64
"""Zeros that the first pass writes for this one."""
_SUMMED = 1024
"""Numbers of a program that adds up parts of coefficients' gradients."""


def gradients(x, f, post, comb, weight, gain, offset, pre, size, d, along, kappa, zero, d_state, d_seen):
    """Gradients of x, f, post and comb."""
    rows, streams, dim = sizes(x)
    outputs, together = weight.shape[0], weight.shape[1] != dim
    tiles, pieces = triton.cdiv(rows, PLAN.rows), triton.cdiv(dim, PLAN.block)
    tile = launch.Tile(PLAN.rows, PLAN.block, PLAN.warps)
    programs = launch.shares(tiles, pieces, PLAN.together, x)
    found = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, f, post)]
    d_comb = torch.empty_like(comb, memory_format=torch.contiguous_format) if comb is not None else None
    slots = streams * (1 + streams * (comb is not None))
    dots = torch.empty((pieces, rows * slots), dtype=torch.float32, device=x.device)
    if rows:
        upstream = None if d_state is None else launch.as_rows(d_state)
        with torch.cuda.device_of(x):
            _columns[(pieces, programs)](
                launch.as_rows(x), *map(packed, (f, post, comb)), in_parts(weight), *map(packed, (gain, pre, size)), d,
                along, kappa, zero, upstream, launch.as_rows(d_seen), *found[:2], dots, rows,
                streams, dim, outputs, padded(outputs), together, offset, PLAN.rows, PLAN.block, PLAN.stages,
                triton.next_power_of_2(streams), *thread(tile, x), ZEROS, interpreting(), num_warps=PLAN.warps,
                maxnreg=launch.most_registers(PLAN.warps, PLAN.together),
            )  # fmt: skip
            size = rows * slots
            _gather[(triton.cdiv(size, _SUMMED),)](dots, found[2], d_comb, pieces, rows * streams, size, _SUMMED)
    d_comb = x.new_empty(0) if d_comb is None else d_comb
    return [*found, d_comb]


@triton.jit
def _anchor(zeros_at, column, inside, ZEROS: tl.constexpr, INTERPRETED: tl.constexpr):
    """A tile of zeros, for its layout.

    The compiler computes a sum with a product of tensor cores in the product's layout, in which a thread has a few
    columns of many tokens, and so the coefficients of all these tokens in its registers. A load that comes after the
    product makes it use the load's layout. Pipelined loads do not, so this one must not be: it is of fewer bytes than
    can be loaded ahead, single ones at places that the compiler cannot look through but for pairs.
    """
    place = column[None, :] % ZEROS + tl.zeros(inside.shape, tl.int32)
    if not INTERPRETED:
        place = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [place], tl.int32, is_pure=True, pack=1)
        place = tl.max_contiguous(tl.multiple_of(place, [1, 2]), [1, 2])
    return tl.load(zeros_at + place, mask=inside, other=0).to(tl.float32)


@triton.jit
def _store_dots(
    post_at, comb_at, values, xs, f, row, known, N: tl.constexpr, P: tl.constexpr, MIXES: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """This program's part of dpost for all tokens, and behind it that of dcomb."""
    t = tl.arange(0, P)[None, :]
    d_post = tl.sum(row_products((f,), values, 1, N, 1, P, LANES, VECTOR), axis=1)
    tl.store(post_at + row * N + t, d_post, mask=known & (t < N))
    if MIXES:
        both = tl.arange(0, P * P)[None, :]
        place = both // P * N + both % P
        d_comb = tl.sum(row_products(xs, values, N, N, P, P, LANES, VECTOR), axis=1)
        tl.store(comb_at + row * (N * N) + place, d_comb, mask=known & (both // P < N) & (both % P < N))


@triton.jit(do_not_specialize=["rows"])
def _columns(
    x_at, f_at, post_at, comb_at, weight_at, gain_at, pre_at, size_at, d_at, along_at, kappa_at, zeros_at, d_state_at,
    d_seen_at, dx_at, df_at, dots_at, rows,
    N: tl.constexpr, DIM: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, TOGETHER: tl.constexpr,
    OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, P: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr, ZEROS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    MIXES: tl.constexpr = comb_at is not None
    GROUPS: tl.constexpr = 1 if TOGETHER else N
    COUNT: tl.constexpr = N // GROUPS
    DTYPE: tl.constexpr = x_at.dtype.element_ty
    row = tl.arange(0, ROWS)[:, None]
    output = tl.arange(0, PADDED)
    piece = tl.program_id(0)
    share = tl.program_id(1)
    column = piece * BLOCK + tl.arange(0, BLOCK)
    within = (column < DIM)[None, :]
    # Transposed: tensor cores take 64 rows at once from shared memory, here those of the weight's columns.
    place = output[None, :] * (COUNT * DIM) + column[:, None]
    real = (output < K)[None, :] & (column < DIM)[:, None]
    gain = column_values(gain_at, column, column < DIM, gain_at is not None, OFFSET, 1.0)[None, :]
    at = row * DIM + column[None, :]
    first = row * (N * DIM) + column[None, :]
    weight = ()
    for t in tl.static_range(COUNT):
        weight = weight + (load_parts(weight_at, place + t * DIM, real, K * COUNT * DIM),)
    dots_at += piece.to(tl.int64) * rows * (N * (N + 1) if MIXES else N)
    for tile in tl.range(share, tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        # 64 bits for the start of a tile only: within it 32 are enough and cost half the registers.
        start = tl.cast(tile, tl.int64) * ROWS
        known = row < rows - start
        inside = known & within
        d = ()
        for g in tl.static_range(GROUPS):
            own = d_at + start * (GROUPS * 2 * PADDED)
            d = d + (load_parts(own, (row * GROUPS + g) * (2 * PADDED) + output[None, :], known, PADDED),)
        back = ()
        for t in tl.static_range(N):
            own = transposed(d[0 if TOGETHER else t])
            empty = tl.zeros((BLOCK, ROWS), tl.float32)
            back = back + (tl.trans(product(weight[t if TOGETHER else 0], own, empty, INTERPRETED)),)
        post = load_coefficients(post_at + start * N, row, known, N, False)
        comb = load_coefficients(comb_at + start * (N * N) if MIXES else None, row, known, N * N, False)
        pre = load_coefficients(pre_at + start * N, row, known, N, False)
        along = load_coefficients(along_at + start * GROUPS, row, known, GROUPS, False)
        size = tl.load(size_at + start + row, mask=known, other=0.0)
        kappa = tl.load(kappa_at + start + row, mask=known, other=0.0)
        xs = load_streams(x_at + start * (N * DIM), first, inside, N, DIM)
        f = tl.load(f_at + start * DIM + at, mask=inside, other=0.0).to(tl.float32)
        d_seen = tl.load(d_seen_at + start * DIM + at, mask=inside, other=0.0).to(tl.float32)
        state = ()
        for t in tl.static_range(N):
            state = state + (written(xs, f, post, comb, t, N, True, MIXES, DTYPE).to(DTYPE),)
        d_seen += _anchor(zeros_at, column, inside, ZEROS, INTERPRETED)
        dh = size * gain * d_seen - kappa * weighted(pre, 0, state, N)
        values = ()
        for t in tl.static_range(N):
            value = pre[t] * dh - along[0 if TOGETHER else t] * state[t].to(tl.float32)
            if d_state_at is not None:
                own = d_state_at + start * (N * DIM) + t * DIM
                value += tl.load(own + first, mask=inside, other=0.0).to(tl.float32)
            values = values + (value + back[t],)
        for s in tl.static_range(N):
            dx = weighted(comb, s * N, values, N) if MIXES else values[s]
            own = dx_at + start * (N * DIM) + s * DIM
            tl.store(own + first, dx.to(dx_at.dtype.element_ty), mask=inside)
        tl.store(df_at + start * DIM + at, weighted(post, 0, values, N).to(df_at.dtype.element_ty), mask=inside)
        own = dots_at + start * N
        _store_dots(
            own,
            own + rows.to(tl.int64) * N + start * (N * N - N),
            values,
            xs,
            f,
            row,
            known,
            N,
            P,
            MIXES,
            LANES,
            VECTOR,
        )


@triton.jit(do_not_specialize=["pieces"])
def _gather(dots_at, d_post_at, d_comb_at, pieces, posts, size, BLOCK: tl.constexpr):
    """Add up the parts of dpost and dcomb, piece by piece of the columns."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for piece in tl.range(0, pieces):
        total += tl.load(dots_at + tl.cast(piece, tl.int64) * size + place, mask=place < size, other=0.0)
    tl.store(d_post_at + place, total, mask=place < posts)
    if d_comb_at is not None:
        tl.store(d_comb_at + (place - posts), total, mask=(place >= posts) & (place < size))
