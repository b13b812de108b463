"""Triton kernel: writing an update to n residual streams, reading their weighted sum and normalising it.

X'_t = Σ_s comb[s,t]·X_s + post_t·f, h = Σ_t pre_t·X'_t, y = N(h). All streams of a row are in registers at once, in
their own dtype. A coefficient belongs to a token or to all of them. Gradients are in `streams_gradient.py`.
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
from normlab.kernels.fused.norms import column_values, normalise


def forward(x, f, post, comb, pre, gain, bias, kind, eps, offset) -> tuple[Tensor, Tensor]:
    """(X', y); X' is empty without an update, y without `pre`."""
    rows, streams, dim = sizes(x)
    state = torch.empty(x.shape if f is not None else (0,), dtype=x.dtype, device=x.device)
    shape = (*x.shape[:-2], dim) if pre is not None else (0,)
    seen = torch.empty(shape, dtype=x.dtype, device=x.device)
    # A thread holds its part of every stream.
    plan = launch.tile(dim, per_thread=16)
    if rows:
        with torch.cuda.device_of(x):
            _forward[(triton.cdiv(rows, plan.rows),)](
                launch.as_rows(x), *map(packed, (f, post, comb, pre)), state, seen, gain, bias, rows, eps,
                streams, dim, *shared_by_tokens(post, comb, pre), kind, offset, plan.rows, plan.block,
                num_warps=plan.warps,
            )  # fmt: skip
    return state, seen


def sizes(x: Tensor) -> tuple[int, int, int]:
    """(tokens, streams, width)."""
    streams, dim = x.shape[-2:]
    return x.numel() // max(1, streams * dim), streams, dim


def packed(tensor: Tensor | None) -> Tensor | None:
    """Contiguous, if there is one."""
    return None if tensor is None else tensor.contiguous()


def shared_by_tokens(post: Tensor | None, comb: Tensor | None, pre: Tensor | None) -> list[bool]:
    """Whether all tokens share a coefficient."""
    return [c is not None and c.dim() == own for c, own in ((post, 1), (comb, 2), (pre, 1))]


@triton.jit
def load_streams(at, first, inside, N: tl.constexpr, DIM: tl.constexpr):
    """All streams of a tile, in their own dtype: half the registers of fp32."""
    found = ()
    for s in tl.static_range(N):
        found = found + (tl.load(at + first + s * DIM, mask=inside, other=0.0),)  # noqa: RUF005  # Triton's tuples
    return found


@triton.jit
def load_coefficients(at, token, known, SIZE: tl.constexpr, SHARED: tl.constexpr):
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
def written(xs, f, post, comb, t, N: tl.constexpr, POSTS: tl.constexpr, MIXES: tl.constexpr, DTYPE: tl.constexpr):
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
    post = load_coefficients(post_at, token, known, N, POST)
    comb = load_coefficients(comb_at, token, known, N * N, COMB)
    pre = load_coefficients(pre_at, token, known, N, PRE)
    xs = load_streams(x_at, first, inside, N, DIM)
    f = 0.0
    if f_at is not None:
        f = tl.load(f_at + at, mask=inside, other=0.0).to(tl.float32)
    h = tl.zeros((ROWS, BLOCK), tl.float32)
    for t in tl.static_range(N):
        value = written(xs, f, post, comb, t, N, post_at is not None, comb_at is not None, x_at.dtype.element_ty)
        if f_at is not None:
            tl.store(state_at + first + t * DIM, value.to(state_at.dtype.element_ty), mask=inside)
        if pre_at is not None:
            h += pre[t] * value
    if pre_at is not None:
        n, _ = normalise(h, inside, eps, DIM, KIND)
        y = n * column_values(gain_at, column, within, gain_at is not None, OFFSET, 1.0)[None, :]
        y += column_values(bias_at, column, within, bias_at is not None, False, 0.0)[None, :]
        tl.store(seen_at + at, y.to(seen_at.dtype.element_ty), mask=inside)
