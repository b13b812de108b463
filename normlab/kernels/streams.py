"""The fused step of n residual streams: write an update to all of them, read their weighted sum, normalise it.

    X'_t = Σ_s comb[s,t] · X_s + post_t · f
    y    = N(Σ_t pre_t · X'_t)

Streams X (..., n, D), update f (..., D). A coefficient is given for each token, post (..., n), comb (..., n, n) and
pre (..., n), or without leading dimensions if all tokens share it. Without comb the streams are not mixed.

Traffic, in tensors of the update's size (n = 4 in brackets; coefficients, n² + 2n numbers a token, are not counted):

                  forward                          backward
    write, read   X, f → X', y: 2n + 2 (10)        X, f, G, gy → dX, df: 3n + 3 (15)
    write alone   X, f → X': 2n + 1 (9)            X, f, G → dX, df: 3n + 2 (14)
    read alone    X → y: n + 1 (5)                 X, G, gy → dX: 3n + 1 (13)

The backward pass needs X and f in any case and no X' beside them. Coefficients of the next read that depend on X'
(dynamic hyper-connections, mHC) need the whole row of X' first: `dynamic_streams.py` has a kernel that computes them as
well, and for what it does not cover there are a write alone and a read alone.
"""

# torch annotates autograd functions, custom operators and some tensor methods only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normlab.errors import NormLabError
from normlab.kernels.backends import MAX_DIM, choose
from normlab.kernels.residual import KINDS, Affine, apply
from normlab.norms import widen

MAX_ELEMENTS = 2 * MAX_DIM
"""Most elements of a token, in all streams, that one Triton program holds in registers; widths round up to 2^k."""


def write_streams(x: Tensor, f: Tensor, post: Tensor, comb: Tensor | None = None, *, kernels: str = "auto") -> Tensor:
    """X' as in the module's formula, in the dtype of `x`."""
    check(x, f, post, comb, None)
    if not uses_kernel(kernels, x, f):
        return _written(x, f, post, comb)
    return _Streams.apply(x, f, *map(_wide, (post, comb, None)), None, None, *_NO_NORM)[0]


def read_streams(x: Tensor, pre: Tensor, norm: Affine | None = None, *, kernels: str = "auto") -> tuple[Tensor, Tensor]:
    """Returns (X, y) with X' = X in the module's formula.

    Go on with the X that it returns: the backward kernel adds its gradient to that of y.
    """
    check(x, None, None, None, pre)
    if not uses_kernel(kernels, x):
        return x, _read(x, pre, norm)
    return _Streams.apply(x, None, *map(_wide, (None, None, pre)), *_flat(norm))


def write_and_read_streams(
    x: Tensor,
    f: Tensor,
    post: Tensor,
    comb: Tensor | None,
    pre: Tensor,
    norm: Affine | None = None,
    *,
    kernels: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Returns (X', y) as in the module's formula, in the dtype of `x`; `pre` must not depend on X'."""
    check(x, f, post, comb, pre)
    if not uses_kernel(kernels, x, f):
        state = _written(x, f, post, comb)
        return state, _read(state, pre, norm)
    return _Streams.apply(x, f, *map(_wide, (post, comb, pre)), *_flat(norm))


def uses_kernel(kernels: str, x: Tensor, f: Tensor | None = None) -> bool:
    """Whether the fused kernel runs for these streams; raises if it was asked for and cannot."""
    if choose(kernels, x) != "triton" or (f is not None and choose(kernels, f) != "triton"):
        return False
    streams, dim = x.shape[-2:]
    fits = streams * 2 ** (dim - 1).bit_length() <= MAX_ELEMENTS
    if not fits and kernels == "triton":
        raise NormLabError(
            f"kernels='triton' cannot run: {streams} streams of width {dim} exceed {MAX_ELEMENTS} elements a token; "
            "use kernels='auto' or 'reference'"
        )
    return fits


def _written(x: Tensor, f: Tensor, post: Tensor, comb: Tensor | None) -> Tensor:
    wide, mixed = widen(x), widen(x)
    if comb is not None:
        # Stream by stream: a product of matrices would round to half precision under autocast.
        parts = [comb[..., s, :, None] * wide[..., s, None, :] for s in range(x.shape[-2])]
        mixed = torch.stack(parts).sum(0)
    return (mixed + post.unsqueeze(-1) * widen(f).unsqueeze(-2)).to(x.dtype)


def _read(x: Tensor, pre: Tensor, norm: Affine | None) -> Tensor:
    return apply(norm, (pre.unsqueeze(-1) * widen(x)).sum(-2)).to(x.dtype)


def check(x: Tensor, f: Tensor | None, post: Tensor | None, comb: Tensor | None, pre: Tensor | None) -> None:
    """Raise an error that names what does not fit the streams."""
    shape = tuple(x.shape)
    tokens, streams, dim = shape[:-2], *shape[-2:]
    # Tuples: the compiler of torch 2.11 finds equal lists of sizes unequal.
    named = {"post": (post, (streams,)), "comb": (comb, (streams, streams)), "pre": (pre, (streams,))}
    for name, (given, own) in named.items():
        if given is not None and tuple(given.shape) not in (own, tokens + own):
            raise NormLabError(
                f"streams {shape} need {name} of shape {tokens + own}, or {own} if all tokens share it; "
                f"got {tuple(given.shape)}"
            )
    if f is not None and tuple(f.shape) != (*tokens, dim):
        raise NormLabError(f"streams {shape} need an update {(*tokens, dim)}, got {tuple(f.shape)}")


_NO_NORM = (KINDS["scale"], 0.0, False)


def _wide(coefficient: Tensor | None) -> Tensor | None:
    """In fp32, as the kernel reads it."""
    return None if coefficient is None else coefficient.float()


def _flat(norm: Affine | None) -> tuple[Any, ...]:
    if norm is None:
        return None, None, *_NO_NORM
    return norm.gain, norm.bias, KINDS[norm.kind], norm.eps, norm.offset


_INPUTS = (
    "Tensor x, Tensor? f, Tensor? post, Tensor? comb, Tensor? pre, Tensor? gain, Tensor? bias, int kind, float eps,"
    " bool offset"
)


@torch.library.custom_op(
    "normlab::streams_forward", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor state, Tensor seen)"
)
def _forward_op(*inputs: Any) -> tuple[Tensor, Tensor]:
    from normlab.kernels.fused import streams

    return streams.forward(*inputs)


@_forward_op.register_fake
def _(x: Tensor, f: Tensor | None, post: Any, comb: Any, pre: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    state = x.new_empty(x.shape if f is not None else (0,))
    return state, x.new_empty((*x.shape[:-2], x.shape[-1]) if pre is not None else (0,))


@torch.library.custom_op(
    "normlab::streams_backward",
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor? d_state, Tensor? d_seen) -> "
    "(Tensor dx, Tensor df, Tensor d_post, Tensor d_comb, Tensor d_pre, Tensor d_affine)",
)
def _backward_op(*inputs: Any) -> tuple[Tensor, ...]:
    from normlab.kernels.fused import streams_gradient

    return streams_gradient.backward(*inputs)


@_backward_op.register_fake
def _(
    x: Tensor,
    f: Tensor | None,
    post: Tensor | None,
    comb: Tensor | None,
    pre: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:
    found = [x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (x, f, post, comb, pre)]
    wanted = (gain is not None) + (bias is not None)
    return *found, x.new_empty((wanted, x.shape[-1]), dtype=torch.float32)


def write_gradients(x: Tensor, f: Tensor, post: Tensor, comb: Tensor | None, d_state: Tensor | None) -> Any:
    """Gradients of x, f, post and comb of a write alone, None for what is absent; for steps that fuse more with it."""
    if d_state is None:
        return (None,) * 4
    dx, df, d_post, d_comb, *_ = _backward_op(x, f, post, comb, None, None, None, *_NO_NORM, d_state, None)
    return dx, df, d_post, None if comb is None else d_comb


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise NormLabError("the fused step of streams has no second derivative; use kernels='reference'")


_backward_op.register_autograd(_no_second_derivative)


class _Streams(torch.autograd.Function):
    """Autograd of the fused step; outputs are the streams, and the normalised sum if there is a `pre`."""

    # Every input by name: without gradients torch.compile tells by their number that `forward` takes no context.
    @staticmethod
    def forward(
        x: Tensor,
        f: Tensor | None,
        post: Tensor | None,
        comb: Tensor | None,
        pre: Tensor | None,
        gain: Tensor | None,
        bias: Tensor | None,
        kind: int,
        eps: float,
        offset: bool,
    ) -> Any:
        state, seen = _forward_op(x, f, post, comb, pre, gain, bias, kind, eps, offset)
        state = x.view_as(x) if f is None else state
        return (state,) if pre is None else (state, seen)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # The gradient of an unused output is then None, not a tensor of zeros.
        ctx.set_materialize_grads(False)
        ctx.norm = inputs[7:]
        ctx.save_for_backward(*inputs[:7])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        d_state, d_seen = (*grads, None)[:2]
        if d_state is None and d_seen is None:
            return (None,) * 10
        saved = ctx.saved_tensors  # once only: a checkpoint recomputes them when they are asked for
        *found, d_affine = _backward_op(*saved, *ctx.norm, d_state, d_seen)
        rest = iter(d_affine.unbind(0))
        found = [None if t is None else d for t, d in zip(saved[:5], found, strict=True)]
        affine = [None if t is None else next(rest).to(t.dtype) for t in saved[5:]]
        return *found, *affine, None, None, None
