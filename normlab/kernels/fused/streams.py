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

from normlab.kernels.backends import interpreting
from normlab.kernels.fused import launch
from normlab.kernels.fused.norms import column_values, normalise, normalise_and_back
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
    walk = _walk(dim, rows, loads)
    out = [None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, f)]
    tile, shared = walk.tile, _shared(post, comb, pre)
    # Where all tokens share all coefficients, every program sums over its tokens.
    summed = all(own for c, own in zip((post, comb, pre), shared, strict=True) if c is not None)
    slots = walk.programs * tile.rows if summed and rows else rows
    found = [_per_token(c, slots, own) for c, own in ((post, 1), (comb, 2), (pre, 1))]
    wanted = (gain is not None) + (bias is not None)
    # Nothing is written to them if nobody used the read.
    new = torch.empty if rows and reads else torch.zeros
    sums = new(wanted, walk.programs, dim, dtype=torch.float32, device=x.device)
    found[2] = found[2] if reads or found[2] is None else found[2].zero_()
    vector = min(tile.block, 16 // x.element_size())
    lanes = min(tile.block // vector, 32 * tile.warps)
    if rows:
        with torch.cuda.device_of(x):
            _backward[(walk.programs,)](
                flat, update, *map(_packed, (post, comb, pre if reads else None)), *upstream, *out, *found, sums,
                gain, bias, rows, eps, streams, dim, *shared, kind, offset, tile.rows, tile.block, walk.stages, lanes,
                vector, triton.next_power_of_2(streams), summed, not interpreting(), num_warps=tile.warps,
            )  # fmt: skip
    given = map(_gathered, found, (post, comb, pre), shared)
    out, given = ([x.new_empty(0) if t is None else t for t in some] for some in (out, given))
    return *out, *given, sum_partials(sums)


def _walk(dim: int, rows: int, loads: list[Tensor | None]) -> launch.Sweep:
    # All streams and their gradients take the 255 registers that a thread may have: eight warps on a multiprocessor.
    together = max(1, 8 // launch.tile(dim, per_thread=16).warps)
    return launch.sweep(dim, rows, loads, elements=1024, per_thread=16, together=together)


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
def _weighted(weights, first, values, N: tl.constexpr):
    """Σ_i weights[first + i]·values[i] in fp32."""
    total = weights[first] * values[0].to(tl.float32)
    for i in tl.static_range(1, N):
        total += weights[first + i] * values[i].to(tl.float32)
    return total


@triton.jit
def _shares(pre, comb, post, N: tl.constexpr, MIXES: tl.constexpr, POSTS: tl.constexpr):
    """(a, b): the shares of every X_s and of f in h."""
    a = ()
    for s in tl.static_range(N):
        if MIXES:
            share = comb[s * N] * pre[0]
            for t in tl.static_range(1, N):
                share += comb[s * N + t] * pre[t]
        else:
            share = pre[s]
        a = a + (share,)  # noqa: RUF005
    b = 0.0
    if POSTS:
        b = post[0] * pre[0]
        for t in tl.static_range(1, N):
            b += post[t] * pre[t]
    return a, b


@triton.jit
def _returned(weights, first, gs, share, d, N: tl.constexpr, MIXES: tl.constexpr, HAS: tl.constexpr, READS: tl.constexpr):
    """What comes back to X_s or f: Σ_t weights[first + t]·G_t + share·dh, or G_first + share·dh without mixing."""
    if not HAS:
        value = share * d
    else:
        if MIXES:
            value = _weighted(weights, first, gs, N)
        else:
            value = gs[first].to(tl.float32)
        if READS:
            value += share * d
    return value


@triton.jit
def _folded(value, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """(rows, columns) to (rows, lanes): the sum of what a thread holds of a row, without a word between threads."""
    ROWS: tl.constexpr = value.shape[0]
    rest: tl.constexpr = value.shape[1] // (LANES * VECTOR)
    return tl.sum(tl.sum(tl.reshape(value, (ROWS, rest, LANES, VECTOR)), axis=3), axis=1)


@triton.jit
def _dots(left, right, L: tl.constexpr, R: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Products of all pairs of L and R rows, (rows, lanes, P·Q), still to be summed over lanes; zero beyond L and R."""
    found = ()
    for place in tl.static_range(P * Q):
        if (place // Q < L) & (place % Q < R):
            product = _folded(left[place // Q].to(tl.float32) * right[place % Q].to(tl.float32), LANES, VECTOR)
        else:
            product = tl.zeros((left[0].shape[0], LANES), tl.float32)
        found = found + (product,)  # noqa: RUF005
    return _stacked(found, P * Q)


@triton.jit
def _halved(values, HALF: tl.constexpr):
    """Half as many tensors with an axis more, whose first part is of the first half."""
    joined = ()
    for i in tl.static_range(HALF):
        joined = joined + (tl.join(values[i], values[i + HALF]),)  # noqa: RUF005
    return joined


@triton.jit
def _stacked(values, SIZE: tl.constexpr):
    """SIZE tensors, a power of two, as one with a last axis: one reduction and one store for all of them."""
    ROWS: tl.constexpr = values[0].shape[0]
    LANES: tl.constexpr = values[0].shape[1]
    for level in tl.static_range(10):
        if SIZE >> (level + 1) > 0:
            values = _halved(values, SIZE >> (level + 1))
    return tl.reshape(values[0], (ROWS, LANES, SIZE))


@triton.jit
def _store_coefficients(
    crossed, update, seen, both, post_at, comb_at, pre_at, d_post_at, d_comb_at, d_pre_at, token, slot, known,
    N: tl.constexpr, P: tl.constexpr, POST: tl.constexpr, COMB: tl.constexpr, PRE: tl.constexpr, HAS: tl.constexpr,
):  # fmt: skip
    """Gradients of the coefficients from the products X·G, f·G, X·dh and f·dh; `slot` is where they go."""
    ROWS: tl.constexpr = crossed.shape[0]
    s = tl.arange(0, P)[None, :]
    one = known[:, None] & (s < N)
    if pre_at is not None:
        pre = tl.load(pre_at + (0 if PRE else token[:, None] * N) + s, mask=one, other=0.0)
        d_pre = tl.sum(seen, axis=1)
    if comb_at is not None:
        place = s[:, :, None] * N + s[:, None, :]
        all = one[:, :, None] & one[:, None, :]
        d_comb = tl.zeros((ROWS, P, P), tl.float32)
        if HAS:
            d_comb += tl.reshape(tl.sum(crossed, axis=1), (ROWS, P, P))
        if pre_at is not None:
            d_comb += d_pre[:, :, None] * pre[:, None, :]
            comb = tl.load(comb_at + (0 if COMB else token[:, None, None] * (N * N)) + place, mask=all, other=0.0)
            d_pre = tl.sum(comb * d_pre[:, :, None], axis=1)
        tl.store(d_comb_at + slot[:, None, None] * (N * N) + place, d_comb, mask=all)
    if post_at is not None:
        d_post = tl.zeros((ROWS, P), tl.float32)
        if HAS:
            d_post += tl.sum(update, axis=1)
        if pre_at is not None:
            common = tl.sum(both, axis=1)
            d_post += common * pre
            d_pre += common * tl.load(post_at + (0 if POST else token[:, None] * N) + s, mask=one, other=0.0)
        tl.store(d_post_at + slot[:, None] * N + s, d_post, mask=one)
    if pre_at is not None:
        tl.store(d_pre_at + slot[:, None] * N + s, d_pre, mask=one)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    x_at, f_at, post_at, comb_at, pre_at, d_state_at, d_seen_at, dx_at, df_at, d_post_at, d_comb_at, d_pre_at,
    partial_at, gain_at, bias_at, rows, eps,
    N: tl.constexpr, DIM: tl.constexpr, POST: tl.constexpr, COMB: tl.constexpr, PRE: tl.constexpr,
    KIND: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr, P: tl.constexpr, SUMMED: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)
    within = column < DIM
    HAS: tl.constexpr = d_state_at is not None
    READS: tl.constexpr = pre_at is not None
    gain = column_values(gain_at, column, within, gain_at is not None, OFFSET, 1.0)[None, :]
    d_gain = tl.zeros((BLOCK,), tl.float32)
    d_bias = tl.zeros((BLOCK,), tl.float32)
    crossed = tl.zeros((ROWS, LANES, P * P), tl.float32)
    update = tl.zeros((ROWS, LANES, P), tl.float32)
    seen = tl.zeros((ROWS, LANES, P), tl.float32)
    both = tl.zeros((ROWS, LANES, 1), tl.float32)
    shared_post = _coefficients(post_at if POST else None, 0, True, N, True)
    shared_comb = _coefficients(comb_at if COMB else None, 0, True, N * N, True)
    shared_pre = _coefficients(pre_at if PRE else None, 0, True, N, True)
    program = tl.program_id(0)
    # Every program visits its tiles in a fixed order, so sums over rows are deterministic.
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        start = tl.cast(tile, tl.int64) * ROWS
        token = start + row
        known = token < rows
        inside = known & within[None, :]
        at = start * DIM + (row * DIM + column[None, :])
        first = start * N * DIM + (row * N * DIM + column[None, :])
        post = shared_post if POST else _coefficients(post_at, token, known, N, False)
        comb = shared_comb if COMB else _coefficients(comb_at, token, known, N * N, False)
        pre = shared_pre if PRE else _coefficients(pre_at, token, known, N, False)
        xs = _streams(x_at, first, inside, N, DIM)
        gs = ()
        if HAS:
            gs = _streams(d_state_at, first, inside, N, DIM)
        f = 0.0
        if f_at is not None:
            f = tl.load(f_at + at, mask=inside, other=0.0).to(tl.float32)
        a = pre
        b = 0.0
        d = 0.0
        if READS:
            a, b = _shares(pre, comb, post, N, comb_at is not None, post_at is not None)
            h = _weighted(a, 0, xs, N)
            if f_at is not None:
                h += b * f
            d = tl.load(d_seen_at + at, mask=inside, other=0.0).to(tl.float32)
            n, back = normalise_and_back(h, d * gain, inside, eps, DIM, KIND, PAIRED)
            if gain_at is not None:
                d_gain += tl.sum(d * n, axis=0)
            if bias_at is not None:
                d_bias += tl.sum(d, axis=0)
            d = back
        if f_at is not None:
            df = _returned(post, 0, gs, b, d, N, True, HAS, READS)
            tl.store(df_at + at, df.to(df_at.dtype.element_ty), mask=inside)
        for s in tl.static_range(N):
            if comb_at is None:
                dx = _returned(comb, s, gs, a[s] if READS else 0.0, d, N, False, HAS, READS)
            else:
                dx = _returned(comb, s * N, gs, a[s] if READS else 0.0, d, N, True, HAS, READS)
            tl.store(dx_at + first + s * DIM, dx.to(dx_at.dtype.element_ty), mask=inside)
        if not SUMMED:
            crossed = tl.zeros((ROWS, LANES, P * P), tl.float32)
            update = tl.zeros((ROWS, LANES, P), tl.float32)
            seen = tl.zeros((ROWS, LANES, P), tl.float32)
            both = tl.zeros((ROWS, LANES, 1), tl.float32)
        if HAS and comb_at is not None:
            crossed += _dots(xs, gs, N, N, P, P, LANES, VECTOR)
        if HAS and f_at is not None:
            update += _dots((f,), gs, 1, N, 1, P, LANES, VECTOR)
        if READS:
            seen += _dots(xs, (d,), N, 1, P, 1, LANES, VECTOR)
        if READS and f_at is not None:
            both += _dots((f,), (d,), 1, 1, 1, 1, LANES, VECTOR)
        if not SUMMED:
            own = start + tl.arange(0, ROWS)
            _store_coefficients(
                crossed, update, seen, both, post_at, comb_at, pre_at, d_post_at, d_comb_at, d_pre_at, own, own,
                own < rows, N, P, POST, COMB, PRE, HAS,
            )  # fmt: skip
    if SUMMED:
        own = program * ROWS + tl.arange(0, ROWS)
        _store_coefficients(
            crossed, update, seen, both, post_at, comb_at, pre_at, d_post_at, d_comb_at, d_pre_at, own, own,
            own >= 0, N, P, POST, COMB, PRE, HAS,
        )  # fmt: skip
    slot = partial_at + program * DIM + column
    if pre_at is not None:
        if gain_at is not None:
            tl.store(slot, d_gain, mask=within)
            slot += tl.num_programs(0) * DIM
        if bias_at is not None:
            tl.store(slot, d_bias, mask=within)
