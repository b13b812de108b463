"""Triton kernels: writing an update to n residual streams, reading their weighted sum and normalising it.

X'_t = Σ_s comb[s,t]·X_s + post_t·f, h = Σ_t pre_t·X'_t, y = N(h). With G' = G + pre ⊗ dh, where G is the gradient of X'
and dh that of h behind the norm,

    dX_s = Σ_t comb[s,t]·G'_t,  df = Σ_t post_t·G'_t
    dcomb[s,t] = X_s·G'_t,  dpost_t = f·G'_t,  dpre_t = dh·X'_t

All streams of a row are in registers at once, in their own dtype; X' is recomputed in the backward pass, which costs n²
products and saves n tensors of traffic. A coefficient belongs to a token or to all of them. Gradients of coefficients
are stored per token (n² + 2n numbers, under one hundredth of the traffic) and added up by torch where all tokens share
them. Sums over rows have a fixed order: two runs are bitwise equal.
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

from normlab.kernels.fused import launch
from normlab.kernels.fused.norms import column_values, normalise, normalise_back
from normlab.kernels.fused.partials import sum_partials


def forward(x, f, post, comb, pre, gain, bias, kind, eps, offset) -> tuple[Tensor, Tensor]:
    """(X', y); X' is empty without an update, y without `pre`."""
    rows, streams, dim = _sizes(x)
    state = torch.empty(x.shape if f is not None else (0,), dtype=x.dtype, device=x.device)
    shape = (*x.shape[:-2], dim) if pre is not None else (0,)
    seen = torch.empty(shape, dtype=x.dtype, device=x.device)
    # A thread holds its part of every stream.
    plan = launch.tile(dim, per_thread=16)
    if rows:
        with torch.cuda.device_of(x):
            _forward[(triton.cdiv(rows, plan.rows),)](
                launch.as_rows(x), *map(_packed, (f, post, comb, pre)), state, seen, gain, bias, rows, eps,
                streams, dim, *_shared(post, comb, pre), kind, offset, plan.rows, plan.block, num_warps=plan.warps,
            )  # fmt: skip
    return state, seen


def backward(x, f, post, comb, pre, gain, bias, kind, eps, offset, d_state, d_seen) -> tuple[Tensor, ...]:
    """Gradients of x, f, post, comb, pre, and of the gain and bias that exist, stacked; empty for what is absent."""
    rows, streams, dim = _sizes(x)
    reads = pre is not None and d_seen is not None
    upstream = [None if d is None else launch.as_rows(d) for d in (d_state, d_seen if reads else None)]
    flat, update = launch.as_rows(x), _packed(f)
    loads = [*[flat, upstream[0]] * streams, update, upstream[1]]
    # All streams and their gradients take the 255 registers that a thread may have: eight warps on a multiprocessor.
    together = max(1, 8 // launch.tile(dim, per_thread=16).warps)
    walk = launch.sweep(dim, rows, loads, elements=1024, per_thread=16, together=together)
    out = [None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, f)]
    found = [_per_token(c, rows, own) for c, own in ((post, 1), (comb, 2), (pre, 1))]
    wanted = (gain is not None) + (bias is not None)
    # Nothing is written to them if nobody used the read.
    new = torch.empty if rows and reads else torch.zeros
    sums = new(wanted, walk.programs, dim, dtype=torch.float32, device=x.device)
    found[2] = found[2] if reads or found[2] is None else found[2].zero_()
    if rows:
        with torch.cuda.device_of(x):
            _backward[(walk.programs,)](
                flat, update, *map(_packed, (post, comb, pre if reads else None)), *upstream, *out, *found, sums,
                gain, bias, rows, eps, streams, dim, *_shared(post, comb, pre), kind, offset, walk.tile.rows,
                walk.tile.block, walk.stages, num_warps=walk.tile.warps,
            )  # fmt: skip
    given = map(_gathered, found, (post, comb, pre), _shared(post, comb, pre))
    out, given = ([x.new_empty(0) if t is None else t for t in some] for some in (out, given))
    return *out, *given, sum_partials(sums)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """(tokens, streams, width)."""
    streams, dim = x.shape[-2:]
    return x.numel() // max(1, streams * dim), streams, dim


def _packed(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _shared(post: Tensor | None, comb: Tensor | None, pre: Tensor | None) -> list[bool]:
    """Whether all tokens share a coefficient."""
    return [c is not None and c.dim() == own for c, own in ((post, 1), (comb, 2), (pre, 1))]


def _per_token(coefficient: Tensor | None, rows: int, own: int) -> Tensor | None:
    """Memory for the gradient of a coefficient of `own` dimensions, one for every token."""
    if coefficient is None:
        return None
    shape = (rows, *coefficient.shape[-own:])
    return torch.empty(shape, dtype=torch.float32, device=coefficient.device)


def _gathered(gradient: Tensor | None, coefficient: Tensor | None, shared: bool) -> Tensor | None:
    """The gradient in the coefficient's shape: added up if all tokens share it."""
    if gradient is None or coefficient is None:
        return None
    return gradient.sum(0) if shared else gradient.view(coefficient.shape)


@triton.jit
def _streams(at, first, inside, N: tl.constexpr, DIM: tl.constexpr):
    """All streams of a tile, in their own dtype: half the registers of fp32."""
    found = ()
    for s in tl.static_range(N):
        found = found + (tl.load(at + first + s * DIM, mask=inside, other=0.0),)  # noqa: RUF005  # Triton's tuples
    return found


@triton.jit
def _coefficients(at, token, known, SIZE: tl.constexpr, SHARED: tl.constexpr):
    """All coefficients of every token, as columns: each is loaded once, since the compiler repeats equal loads."""
    found = ()
    if at is not None:
        for index in tl.static_range(SIZE):
            if SHARED:
                found = found + (tl.load(at + index),)  # noqa: RUF005
            else:
                found = found + (tl.load(at + token * SIZE + index, mask=known, other=0.0),)  # noqa: RUF005
    return found


@triton.jit
def _written(xs, f, post, comb, t, N: tl.constexpr, POSTS: tl.constexpr, MIXES: tl.constexpr, DTYPE: tl.constexpr):
    """X'_t in fp32, rounded as it is stored: the read sees what a read without fusion would see."""
    if not MIXES:
        value = xs[t].to(tl.float32)
    else:
        value = comb[t] * xs[0].to(tl.float32)
        for s in tl.static_range(1, N):
            value += comb[s * N + t] * xs[s].to(tl.float32)
    if POSTS:
        value += post[t] * f
    return value.to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x_at, f_at, post_at, comb_at, pre_at, state_at, seen_at, gain_at, bias_at, rows, eps,
    N: tl.constexpr, DIM: tl.constexpr, POST: tl.constexpr, COMB: tl.constexpr, PRE: tl.constexpr,
    KIND: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)
    within = column < DIM
    # 64 bits for the start of a tile only: within it 32 are enough and cost half the registers.
    start = tl.program_id(0).to(tl.int64) * ROWS
    token = start + row
    known = token < rows
    inside = known & within[None, :]
    at = start * DIM + (row * DIM + column[None, :])
    first = start * N * DIM + (row * N * DIM + column[None, :])
    post = _coefficients(post_at, token, known, N, POST)
    comb = _coefficients(comb_at, token, known, N * N, COMB)
    pre = _coefficients(pre_at, token, known, N, PRE)
    xs = _streams(x_at, first, inside, N, DIM)
    f = 0.0
    if f_at is not None:
        f = tl.load(f_at + at, mask=inside, other=0.0).to(tl.float32)
    h = tl.zeros((ROWS, BLOCK), tl.float32)
    for t in tl.static_range(N):
        value = _written(xs, f, post, comb, t, N, post_at is not None, comb_at is not None, x_at.dtype.element_ty)
        if f_at is not None:
            tl.store(state_at + first + t * DIM, value.to(state_at.dtype.element_ty), mask=inside)
        if pre_at is not None:
            h += pre[t] * value
    if pre_at is not None:
        n, _ = normalise(h, inside, eps, DIM, KIND)
        y = n * column_values(gain_at, column, within, gain_at is not None, OFFSET, 1.0)[None, :]
        y += column_values(bias_at, column, within, bias_at is not None, False, 0.0)[None, :]
        tl.store(seen_at + at, y.to(seen_at.dtype.element_ty), mask=inside)


@triton.jit
def _upstream(gs, d, pre, t, READS: tl.constexpr, HAS: tl.constexpr):
    """G'_t: the gradient of X'_t, from the next write and from the read."""
    if HAS:
        value = gs[t].to(tl.float32)
        if READS:
            value += pre[t] * d
    else:
        value = pre[t] * d
    return value


@triton.jit(do_not_specialize=["rows"])
def _backward(
    x_at, f_at, post_at, comb_at, pre_at, d_state_at, d_seen_at, dx_at, df_at, d_post_at, d_comb_at, d_pre_at,
    partial_at, gain_at, bias_at, rows, eps,
    N: tl.constexpr, DIM: tl.constexpr, POST: tl.constexpr, COMB: tl.constexpr, PRE: tl.constexpr,
    KIND: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)
    within = column < DIM
    HAS: tl.constexpr = d_state_at is not None
    gain = column_values(gain_at, column, within, gain_at is not None, OFFSET, 1.0)[None, :]
    d_gain = tl.zeros((BLOCK,), tl.float32)
    d_bias = tl.zeros((BLOCK,), tl.float32)
    program = tl.program_id(0)
    # Every program visits its tiles in a fixed order, so sums over rows are deterministic.
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        start = tl.cast(tile, tl.int64) * ROWS
        token = start + row
        known = token < rows
        inside = known & within[None, :]
        own = start + tl.arange(0, ROWS)
        mine = own < rows
        at = start * DIM + (row * DIM + column[None, :])
        first = start * N * DIM + (row * N * DIM + column[None, :])
        post = _coefficients(post_at, token, known, N, POST)
        comb = _coefficients(comb_at, token, known, N * N, COMB)
        pre = _coefficients(pre_at, token, known, N, PRE)
        xs = _streams(x_at, first, inside, N, DIM)
        f = 0.0
        if f_at is not None:
            f = tl.load(f_at + at, mask=inside, other=0.0).to(tl.float32)
        d = 0.0
        if pre_at is not None:
            h = tl.zeros((ROWS, BLOCK), tl.float32)
            for t in tl.static_range(N):
                value = _written(
                    xs, f, post, comb, t, N, post_at is not None, comb_at is not None, x_at.dtype.element_ty
                )
                h += pre[t] * value
            n, inverse = normalise(h, inside, eps, DIM, KIND)
            d = tl.load(d_seen_at + at, mask=inside, other=0.0).to(tl.float32)
            if gain_at is not None:
                d_gain += tl.sum(d * n, axis=0)
            if bias_at is not None:
                d_bias += tl.sum(d, axis=0)
            d = normalise_back(d * gain, n, inverse, inside, DIM, KIND)
            for t in tl.static_range(N):
                value = _written(
                    xs, f, post, comb, t, N, post_at is not None, comb_at is not None, x_at.dtype.element_ty
                )
                tl.store(d_pre_at + own * N + t, tl.sum(d * value, axis=1), mask=mine)
        gs = ()
        if HAS:
            gs = _streams(d_state_at, first, inside, N, DIM)
        if f_at is not None:
            df = tl.zeros((ROWS, BLOCK), tl.float32)
            for t in tl.static_range(N):
                g = _upstream(gs, d, pre, t, pre_at is not None, HAS)
                df += post[t] * g
                tl.store(d_post_at + own * N + t, tl.sum(f * g, axis=1), mask=mine)
            tl.store(df_at + at, df.to(df_at.dtype.element_ty), mask=inside)
        for s in tl.static_range(N):
            if comb_at is None:
                dx = _upstream(gs, d, pre, s, pre_at is not None, HAS)
            else:
                dx = tl.zeros((ROWS, BLOCK), tl.float32)
                x = xs[s].to(tl.float32)
                for t in tl.static_range(N):
                    g = _upstream(gs, d, pre, t, pre_at is not None, HAS)
                    dx += comb[s * N + t] * g
                    tl.store(d_comb_at + own * (N * N) + (s * N + t), tl.sum(x * g, axis=1), mask=mine)
            tl.store(dx_at + first + s * DIM, dx.to(dx_at.dtype.element_ty), mask=inside)
    slot = partial_at + program * DIM + column
    if pre_at is not None:
        if gain_at is not None:
            tl.store(slot, d_gain, mask=within)
            slot += tl.num_programs(0) * DIM
        if bias_at is not None:
            tl.store(slot, d_bias, mask=within)
