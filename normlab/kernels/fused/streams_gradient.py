"""Triton kernel: gradients of writing an update to n residual streams, reading their sum and normalising it.

With the shares a_s = Σ_t comb[s,t]·pre_t of X_s and b = Σ_t post_t·pre_t of f, the sum that the norm sees is
h = Σ_s a_s·X_s + b·f. With G the gradient of X' and dh that of h behind the norm,

    dX_s = Σ_t comb[s,t]·G_t + a_s·dh           dcomb[s,t] = X_s·G_t + pre_t·(X_s·dh)
    df   = Σ_t post_t·G_t + b·dh                dpost_t    = f·G_t + pre_t·(f·dh)
                                                dpre_t     = Σ_s comb[s,t]·(X_s·dh) + post_t·(f·dh)

so X' is not computed again, and the products X·G, f·G, X·dh and f·dh are all that has to be summed over columns.
Streams in half precision: the forward pass rounds X' before it reads it, this h is not rounded; gradients differ by
that rounding.

A row is taken in chunks, since few widths are powers of two. A thread first sums what it holds of a product; only these
sums go from thread to thread, all in one reduction, for every token or, where all tokens share all coefficients, once
per program. Every sum has a fixed order: two runs are bitwise equal.
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
from normlab.kernels.fused import launch
from normlab.kernels.fused.norms import column_values, normalise_and_back_chunks
from normlab.kernels.fused.partials import sum_partials
from normlab.kernels.fused.streams import load_coefficients, load_streams, packed, shared_by_tokens, sizes
from normlab.kernels.fused.tuples import joined


def backward(x, f, post, comb, pre, gain, bias, kind, eps, offset, d_state, d_seen) -> tuple[Tensor, ...]:
    """Gradients of x, f, post, comb, pre, and of the gain and bias that exist, stacked; empty for what is absent."""
    rows, streams, dim = sizes(x)
    coefficients, shared = (post, comb, pre), shared_by_tokens(post, comb, pre)
    # If all tokens share all of them, every program sums over its tokens.
    summed = all(own for given, own in zip(coefficients, shared, strict=True) if given is not None)
    reads = pre is not None and d_seen is not None
    upstream = [None if d is None else launch.as_rows(d) for d in (d_state, d_seen if reads else None)]
    flat, update = launch.as_rows(x), packed(f)
    loads = [*[flat, upstream[0]] * streams, update, upstream[1]]
    walk = _walk(x, loads, writes=update is not None, reads=reads)
    out = [None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, f)]
    slots = walk.programs * walk.tile.rows if summed and rows else rows
    found = [_slots(given, slots, own) for given, own in zip(coefficients, (1, 2, 1), strict=True)]
    wanted = (gain is not None) + (bias is not None)
    # Nothing is written to them if nobody used the read.
    new = torch.empty if rows and reads else torch.zeros
    partial = new(wanted, walk.programs, dim, dtype=torch.float32, device=x.device)
    found[2] = found[2] if reads or found[2] is None else found[2].zero_()
    if rows:
        with torch.cuda.device_of(x):
            _backward[(walk.programs,)](
                flat, update, *map(packed, (post, comb, pre if reads else None)), *upstream, *out, *found, partial,
                gain, bias, rows, eps, streams, dim, *shared, kind, offset, walk.tile.rows, walk.tile.block,
                walk.stages, *thread(walk.tile, x), triton.next_power_of_2(streams), summed, not interpreting(),
                num_warps=walk.tile.warps, maxnreg=walk.registers,
            )  # fmt: skip
    given = map(_gathered, found, coefficients, shared)
    out, given = ([x.new_empty(0) if t is None else t for t in some] for some in (out, given))
    return *out, *given, sum_partials(partial)


def _walk(x: Tensor, loads: list[Tensor | None], *, writes: bool, reads: bool) -> launch.Sweep:
    """Grid of the kernel.

    Compiled for compute capability 9.0 with n = 4 and bf16, a thread holds 32 elements of every stream in 128 registers
    if it only writes. A norm needs all of a row at once: 16 elements take all 255. A third stage makes write + norm
    slower (H200: 0.82 instead of 0.95 of copy at width 2048), and the others no slower.
    """
    rows, streams, dim = sizes(x)
    per_thread = (128 if reads else 256) // (triton.next_power_of_2(streams) * x.element_size())
    vector = max(4, min(8, per_thread // 4))
    registers, stages = 255 if reads else 128, 2 if reads and writes else 3
    limits = {"registers": registers, "most_stages": stages}
    return launch.chunks(dim, rows, loads, per_thread=max(vector, per_thread), vector=vector, **limits)


def thread(tile: launch.Tile, x: Tensor) -> tuple[int, int]:
    """(threads that share a row of a chunk, adjacent elements in each of them), as the compiler lays them out."""
    threads = 32 * tile.warps
    vector = min(tile.block, 16 // x.element_size(), max(1, tile.rows * tile.block // threads))
    return min(tile.block // vector, threads), vector


def _slots(coefficient: Tensor | None, slots: int, own: int) -> Tensor | None:
    """Memory for the gradient of a coefficient of `own` dimensions, one for every token or for every part of a sum."""
    if coefficient is None:
        return None
    shape = (slots, *coefficient.shape[-own:])
    return torch.empty(shape, dtype=torch.float32, device=coefficient.device)


def _gathered(gradient: Tensor | None, coefficient: Tensor | None, shared: bool) -> Tensor | None:
    """The gradient in the coefficient's shape: added up if all tokens share it."""
    if gradient is None or coefficient is None:
        return None
    return gradient.sum(0) if shared else gradient.view(coefficient.shape)


@triton.jit
def _load(pointer, at, inside):
    """A chunk in fp32."""
    return tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def weighted(weights, first, values, N: tl.constexpr):
    """Σ_i weights[first + i]·values[i] in fp32."""
    total = weights[first] * values[0].to(tl.float32)
    for i in tl.static_range(1, N):
        total += weights[first + i] * values[i].to(tl.float32)
    return total


@triton.jit
def _shares(post, comb, pre, N: tl.constexpr, POSTS: tl.constexpr, MIXES: tl.constexpr):
    """(a_1, …, a_n, b): the shares of every stream and of the update in h."""
    found = ()
    for s in tl.static_range(N):
        found = found + (weighted(comb, s * N, pre, N) if MIXES else pre[s],)
    if POSTS:
        found = found + (weighted(post, 0, pre, N),)
    return found


@triton.jit
def _returned(weights, first, g, share, own, d, N: tl.constexpr, MIXES: tl.constexpr):
    """The gradient of X_s or f: Σ_t weights[first + t]·G_t + share[own]·dh, with G_first alone if nothing is mixed."""
    if g is None:
        value = share[own] * d
    else:
        value = weighted(weights, first, g, N) if MIXES else g[first].to(tl.float32)
        if d is not None:
            value += share[own] * d
    return value


@triton.jit
def _seen(
    x, f, d, gain, share, inside, eps, N: tl.constexpr, DIM: tl.constexpr, POSTS: tl.constexpr, KIND: tl.constexpr,
    CHUNKS: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """(normalised h, dh) in chunks; d is the gradient behind norm and gain."""
    h = ()
    gained = ()
    for c in tl.static_range(CHUNKS):
        value = weighted(share, 0, x[c], N)
        if POSTS:
            value += share[N] * f[c]
        h = h + (value,)
        gained = gained + (d[c] * gain[c],)
    return normalise_and_back_chunks(h, gained, inside, eps, DIM, KIND, CHUNKS, PAIRED)


@triton.jit
def _column_sums(totals, d, n, CHUNKS: tl.constexpr):
    """Sums over rows of d·n, or of d, for every column, with one more tile."""
    found = ()
    for c in tl.static_range(CHUNKS):
        found = found + (totals[c] + tl.sum(d[c] if n is None else d[c] * n[c], axis=0),)
    return found


@triton.jit
def folded(value, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """(rows, columns) to (rows, lanes): the sum of what one thread holds of a row."""
    ROWS: tl.constexpr = value.shape[0]
    TURNS: tl.constexpr = value.shape[1] // (LANES * VECTOR)
    return tl.sum(tl.sum(tl.reshape(value, (ROWS, TURNS, LANES, VECTOR)), axis=3), axis=1)


@triton.jit
def _stacked(values, SIZE: tl.constexpr):
    """2^k tensors as one with a last axis: a sum over another axis is then one reduction for all of them."""
    ROWS: tl.constexpr = values[0].shape[0]
    LANES: tl.constexpr = values[0].shape[1]
    return tl.reshape(joined(values, SIZE), (ROWS, LANES, SIZE))


@triton.jit
def row_products(
    left, right, L: tl.constexpr, R: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Products of L and R tensors, (rows, lanes, P·Q), still to be summed over lanes; zero beyond L and R."""
    found = ()
    for place in tl.static_range(P * Q):
        if (place // Q < L) & (place % Q < R):
            product = left[place // Q].to(tl.float32) * right[place % Q].to(tl.float32)
            found = found + (folded(product, LANES, VECTOR),)
        else:
            found = found + (tl.zeros((left[0].shape[0], LANES), tl.float32),)
    return _stacked(found, P * Q)


@triton.jit
def _no_dots(ROWS: tl.constexpr, LANES: tl.constexpr, P: tl.constexpr):
    """Sums of X·G, f·G, X·dh and f·dh before the first column."""
    return (
        tl.zeros((ROWS, LANES, P * P), tl.float32),
        tl.zeros((ROWS, LANES, P), tl.float32),
        tl.zeros((ROWS, LANES, P), tl.float32),
        tl.zeros((ROWS, LANES, 1), tl.float32),
    )


@triton.jit
def _add_dots(
    dots, x, f, g, d, N: tl.constexpr, P: tl.constexpr, MIXES: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr
):
    """The sums with one more chunk, as far as a gradient needs them."""
    xg, fg, xd, fd = dots
    if g is not None:
        if MIXES:
            xg += row_products(x, g, N, N, P, P, LANES, VECTOR)
        if f is not None:
            fg += row_products((f,), g, 1, N, 1, P, LANES, VECTOR)
    if d is not None:
        xd += row_products(x, (d,), N, 1, P, 1, LANES, VECTOR)
        if f is not None:
            fd += row_products((f,), (d,), 1, 1, 1, 1, LANES, VECTOR)
    return xg, fg, xd, fd


@triton.jit
def _store_coefficients(
    dots, post_at, comb_at, pre_at, d_post_at, d_comb_at, d_pre_at, slot, known,
    N: tl.constexpr, P: tl.constexpr, POST: tl.constexpr, COMB: tl.constexpr, PRE: tl.constexpr,
):  # fmt: skip
    """Gradients of the coefficients from the sums; a slot is a token, or a part of the sum over all of them."""
    READS: tl.constexpr = pre_at is not None
    xg, fg, xd, fd = dots
    s = tl.arange(0, P)[None, :]
    valid = known[:, None] & (s < N)
    d_post = tl.sum(fg, axis=1)
    if READS:
        pre = tl.load(pre_at + s + (0 if PRE else slot[:, None] * N), mask=valid, other=0.0)
        seen = tl.sum(xd, axis=1)
        d_pre = seen
    if comb_at is not None:
        place = s[:, :, None] * N + s[:, None, :]
        both = valid[:, :, None] & valid[:, None, :]
        d_comb = tl.reshape(tl.sum(xg, axis=1), (xg.shape[0], P, P))
        if READS:
            comb = tl.load(comb_at + place + (0 if COMB else slot[:, None, None] * (N * N)), mask=both, other=0.0)
            d_comb += seen[:, :, None] * pre[:, None, :]
            d_pre = tl.sum(comb * seen[:, :, None], axis=1)
        tl.store(d_comb_at + slot[:, None, None] * (N * N) + place, d_comb, mask=both)
    if post_at is not None:
        if READS:
            seen_update = tl.sum(fd, axis=1)
            d_post += seen_update * pre
            d_pre += seen_update * tl.load(post_at + s + (0 if POST else slot[:, None] * N), mask=valid, other=0.0)
        tl.store(d_post_at + slot[:, None] * N + s, d_post, mask=valid)
    if READS:
        tl.store(d_pre_at + slot[:, None] * N + s, d_pre, mask=valid)


@triton.jit
def _store_columns(at, values, program, column, DIM: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """A program's sum for every column; returns the place of the next such sum."""
    for c in tl.static_range(CHUNKS):
        place = c * BLOCK + column
        tl.store(at + program * DIM + place, values[c], mask=place < DIM)
    return at + tl.num_programs(0) * DIM


@triton.jit(do_not_specialize=["rows"])
def _backward(
    x_at, f_at, post_at, comb_at, pre_at, d_state_at, d_seen_at, dx_at, df_at, d_post_at, d_comb_at, d_pre_at,
    partial_at, gain_at, bias_at, rows, eps,
    N: tl.constexpr, DIM: tl.constexpr, POST: tl.constexpr, COMB: tl.constexpr, PRE: tl.constexpr,
    KIND: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr, P: tl.constexpr, SUMMED: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    HAS: tl.constexpr = d_state_at is not None
    POSTS: tl.constexpr = post_at is not None
    MIXES: tl.constexpr = comb_at is not None
    READS: tl.constexpr = pre_at is not None
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)
    gain = ()
    d_gain = ()
    d_bias = ()
    for c in tl.static_range(CHUNKS):
        place = c * BLOCK + column
        gain = gain + (column_values(gain_at, place, place < DIM, gain_at is not None, OFFSET, 1.0)[None, :],)
        d_gain = d_gain + (tl.zeros((BLOCK,), tl.float32),)
        d_bias = d_bias + (tl.zeros((BLOCK,), tl.float32),)
    # Out of the loop: the compiler would load them again for every token.
    shared_post = load_coefficients(post_at if POST else None, 0, True, N, True)
    shared_comb = load_coefficients(comb_at if COMB else None, 0, True, N * N, True)
    shared_pre = load_coefficients(pre_at if PRE else None, 0, True, N, True)
    dots = _no_dots(ROWS, LANES, P)
    program = tl.program_id(0)
    # Every program visits its tiles in a fixed order, so sums over rows are deterministic.
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        # 64 bits for the start of a tile only: within it 32 are enough and cost half the registers.
        start = tl.cast(tile, tl.int64) * ROWS
        token = start + row
        known = token < rows
        at = start * DIM + (row * DIM + column[None, :])
        first = start * N * DIM + (row * N * DIM + column[None, :])
        post = shared_post if POST else load_coefficients(post_at, token, known, N, False)
        comb = shared_comb if COMB else load_coefficients(comb_at, token, known, N * N, False)
        pre = shared_pre if PRE else load_coefficients(pre_at, token, known, N, False)
        inside = ()
        x = ()
        g = ()
        f = ()
        d = ()
        for c in tl.static_range(CHUNKS):
            inside = inside + (known & (c * BLOCK + column < DIM)[None, :],)
            x = x + (load_streams(x_at, first + c * BLOCK, inside[c], N, DIM),)
            if HAS:
                g = g + (load_streams(d_state_at, first + c * BLOCK, inside[c], N, DIM),)
            if POSTS:
                f = f + (_load(f_at, at + c * BLOCK, inside[c]),)
            if READS:
                d = d + (_load(d_seen_at, at + c * BLOCK, inside[c]),)
        share = ()
        if READS:
            share = _shares(post, comb, pre, N, POSTS, MIXES)
            n, back = _seen(x, f, d, gain, share, inside, eps, N, DIM, POSTS, KIND, CHUNKS, PAIRED)
            if gain_at is not None:
                d_gain = _column_sums(d_gain, d, n, CHUNKS)
            if bias_at is not None:
                d_bias = _column_sums(d_bias, d, None, CHUNKS)
            d = back
        if not SUMMED:
            dots = _no_dots(ROWS, LANES, P)
        for c in tl.static_range(CHUNKS):
            upper = g[c] if HAS else None
            dh = d[c] if READS else None
            for s in tl.static_range(N):
                dx = _returned(comb, s * N if MIXES else s, upper, share, s, dh, N, MIXES)
                tl.store(dx_at + first + (c * BLOCK + s * DIM), dx.to(dx_at.dtype.element_ty), mask=inside[c])
            if POSTS:
                df = _returned(post, 0, upper, share, N, dh, N, True)
                tl.store(df_at + at + c * BLOCK, df.to(df_at.dtype.element_ty), mask=inside[c])
            dots = _add_dots(dots, x[c], f[c] if POSTS else None, upper, dh, N, P, MIXES, LANES, VECTOR)
        if not SUMMED:
            own = start + tl.arange(0, ROWS)
            _store_coefficients(
                dots, post_at, comb_at, pre_at, d_post_at, d_comb_at, d_pre_at, own, own < rows,
                N, P, POST, COMB, PRE,
            )  # fmt: skip
    if SUMMED:
        own = program * ROWS + tl.arange(0, ROWS)
        _store_coefficients(
            dots, post_at, comb_at, pre_at, d_post_at, d_comb_at, d_pre_at, own, own >= 0, N, P, POST, COMB, PRE
        )
    if READS:
        if gain_at is not None:
            partial_at = _store_columns(partial_at, d_gain, program, column, DIM, BLOCK, CHUNKS)
        if bias_at is not None:
            _store_columns(partial_at, d_bias, program, column, DIM, BLOCK, CHUNKS)
