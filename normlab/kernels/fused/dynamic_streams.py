"""Triton kernel: write to n residual streams, compute the next read's weights from them, read and normalise.

A program has some tokens. In a first scan over pieces of their columns it writes X', and adds up its squares and its
products with the weight of the logits, on tensor cores, in parts as `parts.py` says. The weights of the read follow
from these. The second scan reads what the first has just written, which the cache still holds: with few tokens to a
program all that is on its way fits there. The sum h of a token stays in registers until its norm is known.

Every program reads the whole weight, from the cache too, as many bytes as 48 tokens of its streams with 24 outputs:
fewer tokens in a program cost more reading of the weight, more of them cost room in the cache. Gradients are in
`dynamic_streams_gradient.py`.
"""

# Triton's language is not Python's: launch options and compile-time values look wrong to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: RUF005  # Triton's tuples grow by addition only

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from normlab.kernels.backends import interpreting
from normlab.kernels.fused import launch
from normlab.kernels.fused.norms import column_values, inverse_size
from normlab.kernels.fused.parts import in_parts, parts
from normlab.kernels.fused.streams import load_streams, packed, sizes, written


class Plan(NamedTuple):
    """Tokens and columns of a tile, warps, pipeline stages, programs together on a multiprocessor."""

    rows: int
    block: int
    warps: int
    stages: int
    together: int


_READ = 16
"""Tokens that a program takes at once in the second scan, with eight columns in a thread."""
_PADDED = 32
"""Outputs with padding. With both parts of the weight the product has 64 rows, which tensor cores take at once from
shared memory; fewer would go through registers, and X' would be computed again in the layout that those need."""


def plan(dim: int, together: bool) -> Plan:
    """Chosen on an H200 with n = 4, width 768 and bf16 (`benchmarks/dynamic_stream_plans.py`).

    482 µs with a weight for all streams together and 497 µs with one for each stream, 0.5 of the copy bandwidth; all
    plans that were timed make between 0.2 and 0.5. Wider streams, with which two programs would spill, were not timed.
    """
    if dim > 768:
        return Plan(16, 64, 16, 2, 1)
    return Plan(32, 64, 8, 2, 2) if together else Plan(32, 32, 8, 3, 2)


def forward(
    x, f, post, comb, weight, scale, base, gain, eps, activation, inside, constant, norm_eps, offset
) -> tuple[Tensor, ...]:
    """(X', y, u, inverse RMS of what u comes from, weights of the read, inverse RMS of h); numbers in fp32."""
    rows, streams, dim = sizes(x)
    assert weight.shape[0] <= _PADDED
    together, tokens = weight.shape[1] != dim, x.shape[:-2]
    groups = () if together else (streams,)
    state = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    seen = torch.empty((*tokens, dim), dtype=x.dtype, device=x.device)
    shapes = ((*tokens, *groups, weight.shape[0]), (*tokens, *groups), (*tokens, streams), tokens)
    numbers = [torch.empty(shape, dtype=torch.float32, device=x.device) for shape in shapes]
    chosen = plan(dim, together)
    if rows:
        with torch.cuda.device_of(x):
            _forward[(triton.cdiv(rows, chosen.rows),)](
                launch.as_rows(x), *map(packed, (f, post, comb)), in_parts(weight), *map(packed, (scale, base, gain)),
                state, seen, *numbers, rows, eps, constant, norm_eps,
                streams, dim, weight.shape[0], _PADDED, together, activation, inside, offset,
                chosen.rows, chosen.block, _READ, 8 * 32 * chosen.warps // _READ, chosen.stages,
                interpreting(), num_warps=chosen.warps,
                maxnreg=launch.most_registers(chosen.warps, chosen.together),
            )  # fmt: skip
    return state, seen, *numbers


@triton.jit
def activated(z, ACTIVATION: tl.constexpr):
    """0: z, 1: sigmoid, 2: tanh."""
    if ACTIVATION == 1:
        z = tl.sigmoid(z)
    if ACTIVATION == 2:
        z = 2.0 * tl.sigmoid(2.0 * z) - 1.0
    return z


@triton.jit
def _weight_of(u, scale, base, constant, ACTIVATION: tl.constexpr, INSIDE: tl.constexpr):
    """The weight of a stream in the read, from its logit."""
    if INSIDE:
        found = activated(scale * u + base, ACTIVATION) + constant
    else:
        found = base + scale * activated(u, ACTIVATION) + constant
    return found


@triton.jit
def replaced(values, index: tl.constexpr, value):
    """A tuple with another value in one place."""
    found = ()
    for i in tl.static_range(len(values)):
        found = found + (value if i == index else values[i],)
    return found


@triton.jit
def _numbers(at, rows, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """All numbers of every token, as columns, from the first token on."""
    row = tl.arange(0, ROWS)
    found = ()
    for index in tl.static_range(SIZE):
        # Loaded as a vector: of a column, Triton 3.6 loads each number once for every column of the tile.
        found = found + (tl.load(at + row * SIZE + index, mask=row < rows, other=0.0)[:, None],)
    return found


@triton.jit
def zeros(COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums initialised to zero."""
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + (tl.zeros((ROWS, COLUMNS), tl.float32),)
    return found


@triton.jit
def _projected(weight, values, total, INTERPRETED: tl.constexpr):
    """total + weight·valuesᵀ, for a weight with both of its parts, one below the other."""
    for i in tl.static_range(len(values)):
        # The interpreter takes bf16 for integers.
        a = weight.to(tl.float32) if INTERPRETED else weight
        b = values[i].to(tl.float32) if INTERPRETED else values[i]
        total = tl.dot(a, tl.trans(b), total)
    return total


@triton.jit
def _load_weights(
    weight_at, column, within, DIM: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr
):
    """The weight's columns for each stream, or for all of them; its second part is below the first."""
    both = tl.arange(0, 2 * PADDED)
    output = both % PADDED
    at = (both // PADDED * K + output)[:, None] * (COUNT * DIM) + column[None, :]
    found = ()
    for t in tl.static_range(COUNT):
        found = found + (tl.load(weight_at + at + t * DIM, mask=(output < K)[:, None] & within, other=0.0),)
    return found


@triton.jit
def _write(
    x_at, f_at, state_at, weight_at, post, comb, start, known, eps,
    N: tl.constexpr, DIM: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, TOGETHER: tl.constexpr,
    MIXES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The first scan: (logits, inverse RMS) of every token, or of every stream."""
    GROUPS: tl.constexpr = 1 if TOGETHER else N
    DTYPE: tl.constexpr = x_at.dtype.element_ty
    row = tl.arange(0, ROWS)[:, None]
    # One for each stream: products that are added to one another take the compiler another layout, and conversions.
    totals = zeros(N, 2 * PADDED, ROWS)
    squares = zeros(GROUPS, ROWS, BLOCK)
    for first in tl.range(0, DIM, BLOCK, num_stages=STAGES):
        column = first + tl.arange(0, BLOCK)
        within = (column < DIM)[None, :]
        inside = known & within
        at = start * N * DIM + (row * (N * DIM) + column[None, :])
        f = tl.load(f_at + start * DIM + (row * DIM + column[None, :]), mask=inside, other=0.0).to(tl.float32)
        xs = load_streams(x_at, at, inside, N, DIM)
        weights = _load_weights(weight_at, column, within, DIM, K, PADDED, N if TOGETHER else 1)
        for t in tl.static_range(N):
            value = written(xs, f, post, comb, t, N, True, MIXES, DTYPE)
            tl.store(state_at + at + t * DIM, value.to(DTYPE), mask=inside)
            weight = weights[t if TOGETHER else 0]
            totals = replaced(totals, t, _projected(weight, parts(value.to(DTYPE)), totals[t], INTERPRETED))
            # Streams that are normalised together share a sum.
            squares = replaced(squares, 0 if TOGETHER else t, squares[0 if TOGETHER else t] + value * value)
    found = ()
    inverses = ()
    for g in tl.static_range(GROUPS):
        inverse = inverse_size(tl.sum(squares[g], axis=1), eps, DIM * (N // GROUPS))
        total = totals[g]
        for t in tl.static_range(1, N // GROUPS):
            total += totals[t]
        # The products with both parts of the weight.
        total = tl.sum(tl.reshape(total, (2, PADDED, ROWS)), axis=0)
        found = found + (total * inverse[None, :],)
        inverses = inverses + (inverse,)
    return found, inverses


@triton.jit
def _read(
    state_at, seen_at, gain_at, size_at, pre_at, start, rows, eps,
    N: tl.constexpr, DIM: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """The second scan: the normalised sum of the streams that the first has written, for some of its tokens."""
    CHUNKS: tl.constexpr = (DIM + SCAN - 1) // SCAN
    row = tl.arange(0, ROWS)[:, None]
    known = start + row < rows
    pre = _numbers(pre_at + start * N, rows - start, N, ROWS)
    h = ()
    squares = tl.zeros((ROWS, SCAN), tl.float32)
    for c in tl.static_range(CHUNKS):
        column = (c * SCAN + tl.arange(0, SCAN))[None, :]
        at = start * N * DIM + (row * (N * DIM) + column)
        xs = load_streams(state_at, at, known & (column < DIM), N, DIM)
        value = pre[0] * xs[0].to(tl.float32)
        for t in tl.static_range(1, N):
            value += pre[t] * xs[t].to(tl.float32)
        squares += value * value
        h = h + (value,)
    size = inverse_size(tl.sum(squares, axis=1), eps, DIM)[:, None]
    tl.store(size_at + start + row, size, mask=known)
    for c in tl.static_range(CHUNKS):
        column = c * SCAN + tl.arange(0, SCAN)
        within = column < DIM
        y = h[c] * size * column_values(gain_at, column, within, gain_at is not None, OFFSET, 1.0)[None, :]
        at = start * DIM + (row * DIM + column[None, :])
        tl.store(seen_at + at, y.to(seen_at.dtype.element_ty), mask=known & within[None, :])


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x_at, f_at, post_at, comb_at, weight_at, scale_at, base_at, gain_at, state_at, seen_at, u_at, inverse_at, pre_at,
    size_at, rows, eps, constant, norm_eps,
    N: tl.constexpr, DIM: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, TOGETHER: tl.constexpr,
    ACTIVATION: tl.constexpr, INSIDE: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    READ: tl.constexpr, SCAN: tl.constexpr, STAGES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = 1 if TOGETHER else N
    # 64 bits for the start of a tile only: within it 32 are enough and cost half the registers.
    start = tl.program_id(0).to(tl.int64) * ROWS
    token = start + tl.arange(0, ROWS)
    known = token < rows
    post = _numbers(post_at + start * N, rows - start, N, ROWS)
    comb = ()
    if comb_at is not None:
        comb = _numbers(comb_at + start * (N * N), rows - start, N * N, ROWS)
    u, inverse = _write(
        x_at, f_at, state_at, weight_at, post, comb, start, known[:, None], eps,
        N, DIM, K, PADDED, TOGETHER, comb_at is not None, ROWS, BLOCK, STAGES, INTERPRETED,
    )  # fmt: skip
    output = tl.arange(0, PADDED)
    for g in tl.static_range(GROUPS):
        at = (token * GROUPS + g)[None, :] * K + output[:, None]
        tl.store(u_at + at, u[g], mask=known[None, :] & (output < K)[:, None])
        tl.store(inverse_at + token * GROUPS + g, inverse[g], mask=known)
    for t in tl.static_range(N):
        place = output[:, None] == (t if TOGETHER else 0)
        logit = tl.sum(tl.where(place, u[0 if TOGETHER else t], 0.0), axis=0)
        weight = _weight_of(logit, tl.load(scale_at + t), tl.load(base_at + t), constant, ACTIVATION, INSIDE)
        tl.store(pre_at + token * N + t, weight, mask=known)
    # The second scan reads what other threads wrote in the first.
    tl.debug_barrier()
    for part in tl.static_range(ROWS // READ):
        own = start + part * READ
        _read(state_at, seen_at, gain_at, size_at, pre_at, own, rows, norm_eps, N, DIM, OFFSET, READ, SCAN)
