"""Triton kernels: gradients of writing to n streams, computing the next read's weights from them, reading, normalising.

With G and gy the gradients of X' and of y, s the inverse RMS of h, r that of what the logits come from (m numbers),

    κ      = s³·Σ (gy·gain)·h / D                dh      = s·gy·gain − κ·h
    dpre_t = Σ dh·X'_t                           d       = r·(du + what dpre adds to it)
    G_t   += pre_t·dh + (d·W)_t − ρ·X'_t         ρ       = r·(d·u)/m
    dX_s   = Σ_t comb[s,t]·G_t                   dcomb   = X_s·G_t
    df     = Σ_t post_t·G_t                      dpost_t = f·G_t            dW = Σ dᵀ·X' over tokens

in three passes. The first, by tokens, reads X' and gy and finds the sums over a token's columns: κ, dpre, d and ρ. The
second, by columns, computes X' and h again and does all the rest but dW: a program has some columns, keeps its part of
the weight, and takes its tokens tile by tile. Its part of dcomb and dpost, sums over columns, is added to that of the
other programs by a small kernel. The third reads X' for dW. That belongs to the second, but a sum that stays in
registers for each output, stream and column takes a quarter of them, and 60 numbers of every thread would spill.

Every sum has a fixed order: two runs are bitwise equal.
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
from torch import Tensor

from normlab.kernels.backends import interpreting
from normlab.kernels.fused import dynamic_streams_columns, launch
from normlab.kernels.fused.dynamic_streams import Plan, activated, replaced, zeros
from normlab.kernels.fused.dynamic_streams_columns import ZEROS
from normlab.kernels.fused.norms import column_values
from normlab.kernels.fused.partials import sum_partials
from normlab.kernels.fused.parts import load_parts, padded, parts, product, transposed
from normlab.kernels.fused.streams import load_coefficients, load_streams, packed, sizes
from normlab.kernels.fused.streams_gradient import folded, thread, weighted

# Compiled for compute capability 9.0 with n = 4, width 768 and bf16 nothing spills. Timed on an H200, 65536 tokens of
# that width (`benchmarks/dynamic_stream_plans.py`): the first pass takes 147 to 158 µs (0.77 to 0.83 of the copy
# bandwidth), and 192 with 184 registers, which leave room for more programs; the third 107 to 110 µs (0.90 to 0.93).
FIRST_PLAN = {"per_thread": 24, "vector": 8, "registers": 255}
WEIGHT_PLAN = Plan(64, 128, 8, 3, 2)


def backward(
    x, f, post, comb, weight, scale, base, gain, activation, inside, offset, state, u, inverse, pre, size, d_state,
    d_seen, d_u,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of x, f, post, comb (empty if absent), weight, and of scale, base and gain in one row."""
    numbers, vectors = _by_tokens(
        state, d_seen, u, inverse, pre, size, d_u, scale, base, gain, activation, inside, offset
    )
    found = dynamic_streams_columns.gradients(
        x, f, post, comb, weight, gain, offset, pre, size, *numbers, d_state, d_seen
    )
    return *found, _of_weight(state, numbers[0], weight), vectors


def _by_tokens(
    state, d_seen, u, inverse, pre, size, d_u, scale, base, gain, activation, inside, offset
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """((d in two parts, ρ, κ, some zeros), gradients of scale, base and gain in a row)."""
    rows, streams, dim = sizes(state)
    together, outputs = u.dim() < state.dim(), u.shape[-1]
    groups, width = 1 if together else streams, padded(outputs)
    flat, upstream = launch.as_rows(state), launch.as_rows(d_seen)
    walk = launch.chunks(dim, rows, [*[flat] * streams, upstream], **FIRST_PLAN)
    d = torch.empty((rows, groups, 2, width), dtype=torch.bfloat16, device=u.device)
    zero = torch.empty(ZEROS, dtype=torch.int8, device=u.device)
    along, kappa = (torch.empty(shape, dtype=torch.float32, device=u.device) for shape in ((rows, groups), (rows,)))
    new = torch.empty if rows else torch.zeros
    vectors = 2 * streams + dim * (gain is not None)
    partial = new(1, walk.programs, vectors, dtype=torch.float32, device=u.device)
    if rows:
        with torch.cuda.device_of(state):
            _sums[(walk.programs,)](
                flat, upstream, *map(packed, (u, inverse, pre, size, d_u, scale, base, gain)), d, along, kappa, zero,
                partial, rows, streams, dim, outputs, width, together, activation, inside, offset, walk.tile.rows,
                walk.tile.block, walk.stages, *thread(walk.tile, state), ZEROS, num_warps=walk.tile.warps,
                maxnreg=walk.registers,
            )  # fmt: skip
    return [d, along, kappa, zero], sum_partials(partial)[0]


def _of_weight(state, d, weight) -> Tensor:
    """The gradient of the weight."""
    outputs, width = weight.shape
    rows = state.numel() // max(1, width)
    tiles, pieces = triton.cdiv(rows, WEIGHT_PLAN.rows), triton.cdiv(width, WEIGHT_PLAN.block)
    programs = launch.shares(tiles, pieces, WEIGHT_PLAN.together, state)
    new = torch.empty if rows else torch.zeros
    partial = new(1, programs, weight.numel(), dtype=torch.float32, device=state.device)
    if rows:
        with torch.cuda.device_of(state):
            _weight[(pieces, programs)](
                launch.as_rows(state), d, partial, rows, width, outputs, padded(outputs), WEIGHT_PLAN.rows,
                WEIGHT_PLAN.block, WEIGHT_PLAN.stages, interpreting(), num_warps=WEIGHT_PLAN.warps,
            )  # fmt: skip
    return sum_partials(partial).view(outputs, width)


@triton.jit
def _through_weight(u, d, scale, base, ACTIVATION: tl.constexpr, INSIDE: tl.constexpr):
    """Gradients of a logit, of its scale and of its base, given that of the weight of the read."""
    value = activated(scale * u + base if INSIDE else u, ACTIVATION)
    slope = 1.0
    if ACTIVATION == 1:
        slope = value * (1.0 - value)
    if ACTIVATION == 2:
        slope = 1.0 - value * value
    if INSIDE:
        found = (d * slope * scale, d * slope * u, d * slope)
    else:
        found = (d * slope * scale, d * value, d)
    return found


@triton.jit
def _picked(values, index, place):
    """One column of a tile of numbers."""
    return tl.sum(tl.where(place[None, :] == index, values, 0.0), axis=1)


@triton.jit
def _add_sums(sums, xs, g, h, N: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Σ g·X'_t, Σ h·X'_t and Σ g·h with one more chunk, still to be summed over threads."""
    found = ()
    for t in tl.static_range(N):
        found = found + (sums[t] + folded(g * xs[t].to(tl.float32), LANES, VECTOR),)
    for t in tl.static_range(N):
        found = found + (sums[N + t] + folded(h * xs[t].to(tl.float32), LANES, VECTOR),)
    return found + (sums[2 * N] + folded(g * h, LANES, VECTOR),)


@triton.jit
def _store_logits(
    u_at, inverse_at, d_u_at, d_at, along_at, d_pre, scale_at, base_at, token, known, totals,
    N: tl.constexpr, DIM: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, TOGETHER: tl.constexpr,
    ACTIVATION: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Store d and ρ of every token; returns the sums for scale and base with these tokens."""
    GROUPS: tl.constexpr = 1 if TOGETHER else N
    output = tl.arange(0, PADDED)
    exists = known[:, None] & (output < K)[None, :]
    for g in tl.static_range(GROUPS):
        own = token * GROUPS + g
        u = tl.load(u_at + own[:, None] * K + output[None, :], mask=exists, other=0.0)
        inverse = tl.load(inverse_at + own, mask=known, other=0.0)
        d = tl.zeros(u.shape, tl.float32)
        if d_u_at is not None:
            d += tl.load(d_u_at + own[:, None] * K + output[None, :], mask=exists, other=0.0)
        for i in tl.static_range(N // GROUPS):
            # One of g and i is always 0: together they count the streams.
            scale = tl.load(scale_at + g + i)
            base = tl.load(base_at + g + i)
            logit = _picked(u, i, output)
            more, d_scale, d_base = _through_weight(logit, d_pre[g + i], scale, base, ACTIVATION, INSIDE)
            d += tl.where(output[None, :] == i, more[:, None], 0.0)
            totals = replaced(totals, g + i, totals[g + i] + tl.where(known, d_scale, 0.0))
            totals = replaced(totals, N + g + i, totals[N + g + i] + tl.where(known, d_base, 0.0))
        d = tl.where(exists, d, 0.0) * inverse[:, None]
        high, low = parts(d)
        at = own[:, None] * (2 * PADDED) + output[None, :]
        tl.store(d_at + at, high, mask=known[:, None])
        tl.store(d_at + at + PADDED, low, mask=known[:, None])
        tl.store(along_at + own, tl.sum(d * u, axis=1) * inverse / (DIM * (N // GROUPS)), mask=known)
    return totals


@triton.jit(do_not_specialize=["rows"])
def _sums(
    state_at, d_seen_at, u_at, inverse_at, pre_at, size_at, d_u_at, scale_at, base_at, gain_at, d_at, along_at,
    kappa_at, zeros_at, partial_at, rows,
    N: tl.constexpr, DIM: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, TOGETHER: tl.constexpr,
    ACTIVATION: tl.constexpr, INSIDE: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    gain = ()
    for c in tl.static_range(CHUNKS):
        place = c * BLOCK + column
        gain = gain + (column_values(gain_at, place, place < DIM, gain_at is not None, OFFSET, 1.0)[None, :],)
    d_gain = zeros(CHUNKS, ROWS, BLOCK)
    totals = ()
    for _ in tl.static_range(2 * N):
        totals = totals + (tl.zeros((ROWS,), tl.float32),)
    program = tl.program_id(0)
    tl.store(zeros_at + tl.arange(0, ZEROS), tl.zeros((ZEROS,), tl.int8), mask=tl.arange(0, ZEROS) >= program * ZEROS)
    # Every program visits its tiles in a fixed order, so sums over tokens are deterministic.
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        start = tl.cast(tile, tl.int64) * ROWS
        token = start + row
        known = token < rows
        pre = load_coefficients(pre_at, token[:, None], known[:, None], N, False)
        size = tl.load(size_at + token, mask=known, other=0.0)
        sums = zeros(2 * N + 1, ROWS, LANES)
        for c in tl.static_range(CHUNKS):
            place = c * BLOCK + column
            inside = known[:, None] & (place < DIM)[None, :]
            at = row[:, None] * DIM + place[None, :]
            xs = load_streams(state_at, start * N * DIM + (at + row[:, None] * ((N - 1) * DIM)), inside, N, DIM)
            d = tl.load(d_seen_at + start * DIM + at, mask=inside, other=0.0).to(tl.float32)
            h = weighted(pre, 0, xs, N)
            sums = _add_sums(sums, xs, d * gain[c], h, N, LANES, VECTOR)
            if gain_at is not None:
                d_gain = replaced(d_gain, c, d_gain[c] + d * h * size[:, None])
        kappa = tl.sum(sums[2 * N], axis=1) * size * size * size / DIM
        tl.store(kappa_at + token, kappa, mask=known)
        d_pre = ()
        for t in tl.static_range(N):
            d_pre = d_pre + (tl.sum(size[:, None] * sums[t] - kappa[:, None] * sums[N + t], axis=1),)
        totals = _store_logits(
            u_at, inverse_at, d_u_at, d_at, along_at, d_pre, scale_at, base_at, token, known, totals,
            N, DIM, K, PADDED, TOGETHER, ACTIVATION, INSIDE,
        )  # fmt: skip
    partial_at += program.to(tl.int64) * (2 * N + (DIM if gain_at is not None else 0))
    for i in tl.static_range(2 * N):
        tl.store(partial_at + i, tl.sum(totals[i], axis=0))
    if gain_at is not None:
        for c in tl.static_range(CHUNKS):
            place = c * BLOCK + column
            tl.store(partial_at + 2 * N + place, tl.sum(d_gain[c], axis=0), mask=place < DIM)


@triton.jit(do_not_specialize=["rows"])
def _weight(
    state_at, d_at, partial_at, rows,
    WIDTH: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """This program's part of dW: some columns, and the rows that its share of tiles has."""
    row = tl.arange(0, ROWS)[:, None]
    output = tl.arange(0, PADDED)[None, :]
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    share = tl.program_id(1)
    total = tl.zeros((BLOCK, PADDED), tl.float32)
    for tile in tl.range(share, tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        start = tl.cast(tile, tl.int64) * ROWS
        known = row < rows - start
        at = state_at + start * WIDTH
        x = tl.load(at + (row * WIDTH + column[None, :]), mask=known & (column < WIDTH)[None, :], other=0.0)
        d = load_parts(d_at + start * (2 * PADDED), row * (2 * PADDED) + output, known, PADDED)
        total = product(transposed(parts(x)), d, total, INTERPRETED)
    place = output * WIDTH + column[:, None]
    real = (output < K) & (column < WIDTH)[:, None]
    tl.store(partial_at + share.to(tl.int64) * (K * WIDTH) + place, total, mask=real)
