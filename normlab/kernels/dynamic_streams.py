"""The fused step of n residual streams whose next read depends on them: write, weights of the read, read, normalise.

    X'_t  = Σ_s comb[s,t]·X_s + post_t·f
    u     = rms_norm(X')·Wᵀ                             all streams of a token in one row, or each of them alone
    pre_t = act(scale_t·u_t + base_t) + constant        or base_t + scale_t·act(u_t) + constant
    y     = RMSNorm(Σ_t pre_t·X'_t)·gain

Streams X (..., n, D) in half precision, update f (..., D); post (..., n) and comb (..., n, n), without leading
dimensions if all tokens share them; without comb the streams are not mixed. With W (K, n·D) there is one RMS for each
token, u is (..., K) and u_t is its entry t; with W (K, D) every stream has its own RMS, u is (..., n, K) and u_t is the
first entry of stream t. The other entries of u are for coefficients of the next write, computed from u by the caller.

Traffic, in tensors of the update's size (n = 4 in brackets; a token's few numbers are not counted):

    forward     X, f → X', y; what was written of X' is read again from the cache: 2n + 2 (10)
    backward    X', gy → numbers of every token: n + 1 (5); X, f, G, gy → dX, df: 3n + 3 (15); X' → dW: n (4)

Not in this count: backward, parts of the gradients of post and comb, n² + n numbers in fp32 of a token for every 32
columns, are written and read once, as much as 2.5 tensors more for n = 4 in half precision.

Three kernels in its place (write, `normalised_projection`, read) move 18 forward and 39 backward.
"""

# torch annotates autograd functions, custom operators and some tensor methods only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from normlab.errors import NormLabError
from normlab.kernels import streams
from normlab.kernels.backends import choose
from normlab.kernels.normalised_projection import normalised_projection
from normlab.kernels.residual import Affine

MAX_STREAMS, MAX_OUTPUTS, MAX_WIDTH = 4, 32, 2048
"""Limits of the kernel, which holds all of it in registers: streams, outputs K of the weight, width of a stream."""
_ACTIVATIONS = {"identity": 0, "sigmoid": 1, "tanh": 2}
_HALF = (torch.bfloat16, torch.float16)


class DynamicRead(NamedTuple):
    """How the weights of a read follow from the streams that it reads; see the module's formula."""

    weight: Tensor
    eps: float
    scale: Tensor
    base: Tensor
    """(n,), as the scale."""
    activation: Literal["identity", "sigmoid", "tanh"]
    inside: bool
    """Whether the activation is applied to scale·u + base, or to u alone."""
    constant: float = 0.0


def dynamic_step(
    x: Tensor,
    f: Tensor,
    post: Tensor,
    comb: Tensor | None,
    read: DynamicRead,
    norm: Affine | None = None,
    *,
    kernels: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (X', y, u) as in the module's formula: X' and y in the dtype of `x`, u in fp32.

    What the kernel does not cover is computed step by step, with the kernels of the steps.
    """
    _check(x, read)
    if not fuses_step(kernels, x, f, read, norm):
        return _steps(x, f, post, comb, read, norm, kernels)
    assert norm is not None
    tokens, n = x.shape[:-2], x.shape[-2]
    streams.check(x, f, post, comb, None)
    post = post.float().expand(*tokens, n)
    comb = None if comb is None else comb.float().expand(*tokens, n, n)
    options = (read.eps, _ACTIVATIONS[read.activation], read.inside, read.constant, norm.eps, norm.offset)
    return _DynamicStreams.apply(
        x, f, post, comb, read.weight.float(), read.scale.float(), read.base.float(), norm.gain, *options
    )[:3]


def fuses_step(kernels: str, x: Tensor, f: Tensor, read: DynamicRead, norm: Affine | None) -> bool:
    """Whether one kernel computes the whole step; raises if kernels were asked for and no kernel can run at all."""
    if choose(kernels, x) != "triton" or x.dtype not in _HALF or f.dtype == torch.float64:
        return False
    if norm is None or norm.kind != "rms" or norm.bias is not None:
        return False
    n, dim = x.shape[-2:]
    outputs = read.weight.shape[0]
    fits = 1 < n <= MAX_STREAMS and dim <= MAX_WIDTH and outputs <= MAX_OUTPUTS
    return fits and n <= outputs * _groups(x, read)


def _groups(x: Tensor, read: DynamicRead) -> int:
    """Rows of a token that are normalised: all streams as one, or each of them."""
    return x.shape[-2] * x.shape[-1] // read.weight.shape[1]


def _steps(
    x: Tensor, f: Tensor, post: Tensor, comb: Tensor | None, read: DynamicRead, norm: Affine | None, kernels: str
) -> tuple[Tensor, Tensor, Tensor]:
    alone = _groups(x, read) > 1
    state = streams.write_streams(x, f, post, comb, kernels=kernels)
    rows, u = normalised_projection(state if alone else state.flatten(-2), read.weight, read.eps, kernels=kernels)
    pre = weights_of(u[..., 0] if alone else u[..., : x.shape[-2]], read)
    state, seen = streams.read_streams(rows.view(state.shape), pre, norm, kernels=kernels)
    return state, seen, u


def weights_of(u: Tensor, read: DynamicRead) -> Tensor:
    """The weights of the read, given the logit of every stream."""
    if read.inside:
        found = _activated(read.scale * u + read.base, read.activation)
    else:
        found = read.base + read.scale * _activated(u, read.activation)
    return found + read.constant


def _activated(z: Tensor, activation: str) -> Tensor:
    if activation == "sigmoid":
        return z.sigmoid()
    return z.tanh() if activation == "tanh" else z


def _check(x: Tensor, read: DynamicRead) -> None:
    n, dim = x.shape[-2:]
    outputs, width = read.weight.shape
    if width not in (dim, n * dim) or (width != dim and outputs < n):
        raise NormLabError(
            f"dynamic_step: streams {tuple(x.shape)} need a weight (K, {dim}), or (K, {n * dim}) with K at least {n}; "
            f"got {tuple(read.weight.shape)}"
        )
    if tuple(read.scale.shape) != (n,) or tuple(read.base.shape) != (n,):
        raise NormLabError(
            f"dynamic_step: {n} streams need a scale and a base ({n},), "
            f"got {tuple(read.scale.shape)} and {tuple(read.base.shape)}"
        )


_TENSORS = "Tensor x, Tensor f, Tensor post, Tensor? comb, Tensor weight, Tensor scale, Tensor base, Tensor? gain"


@torch.library.custom_op(
    "normlab::dynamic_streams_forward",
    mutates_args=(),
    schema=f"({_TENSORS}, float eps, int activation, bool inside, float constant, float norm_eps, bool offset) -> "
    "(Tensor state, Tensor seen, Tensor u, Tensor inverse, Tensor pre, Tensor size)",
)
def _forward_op(*inputs: Any) -> tuple[Tensor, ...]:
    from normlab.kernels.fused import dynamic_streams

    return dynamic_streams.forward(*inputs)


@_forward_op.register_fake
def _(x: Tensor, f: Tensor, post: Tensor, comb: Tensor | None, weight: Tensor, *_: Any) -> tuple[Tensor, ...]:
    tokens, n, dim = x.shape[:-2], *x.shape[-2:]
    groups = (n,) if weight.shape[1] == dim else ()
    shapes = ((*tokens, *groups, weight.shape[0]), (*tokens, *groups), (*tokens, n), tokens)
    return x.new_empty(x.shape), x.new_empty((*tokens, dim)), *(weight.new_empty(shape) for shape in shapes)


@torch.library.custom_op(
    "normlab::dynamic_streams_backward",
    mutates_args=(),
    schema=f"({_TENSORS}, int activation, bool inside, bool offset, Tensor state, Tensor u, Tensor inverse, Tensor pre,"
    " Tensor size, Tensor? d_state, Tensor d_seen, Tensor? d_u) -> (Tensor dx, Tensor df, Tensor d_post,"
    " Tensor d_comb, Tensor d_weight, Tensor d_vectors)",
)
def _backward_op(*inputs: Any) -> tuple[Tensor, ...]:
    from normlab.kernels.fused import dynamic_streams_gradient

    return dynamic_streams_gradient.backward(*inputs)


@_backward_op.register_fake
def _(
    x: Tensor,
    f: Tensor,
    post: Tensor,
    comb: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    base: Tensor,
    gain: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:
    found = [x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (x, f, post, comb, weight)]
    vectors = 2 * x.shape[-2] + (0 if gain is None else x.shape[-1])
    return *found, weight.new_empty(vectors)


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise NormLabError("the fused dynamic_step has no second derivative; use kernels='reference'")


_backward_op.register_autograd(_no_second_derivative)


class _DynamicStreams(torch.autograd.Function):
    """Autograd of the kernel; outputs beyond the third are numbers that only `backward` uses."""

    # Every input by name: without gradients torch.compile tells by their number that `forward` takes no context.
    @staticmethod
    def forward(
        x: Tensor,
        f: Tensor,
        post: Tensor,
        comb: Tensor | None,
        weight: Tensor,
        scale: Tensor,
        base: Tensor,
        gain: Tensor | None,
        eps: float,
        activation: int,
        inside: bool,
        constant: float,
        norm_eps: float,
        offset: bool,
    ) -> Any:
        return _forward_op(
            x, f, post, comb, weight, scale, base, gain, eps, activation, inside, constant, norm_eps, offset
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, activation, inside, _, _, offset = inputs[8:]
        state, _, u, inverse, pre, size = output
        # The gradient of an unused output is then None, not a tensor of zeros.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(inverse, pre, size)
        ctx.options = activation, inside, offset
        ctx.save_for_backward(*inputs[:8], state, u, inverse, pre, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        d_state, d_seen, d_u, *_ = grads
        saved = ctx.saved_tensors  # once only: a checkpoint recomputes them when they are asked for
        x, f, post, comb, _, _, _, gain = saved[:8]
        if d_seen is None and d_u is None:
            written = streams.write_gradients(x, f, post, comb, d_state)
            return *written, *(None,) * 10
        if d_seen is None:
            # Rare: the logits are used and the read is not.
            d_seen = torch.zeros_like(f, dtype=x.dtype)
        dx, df, d_post, d_comb, d_weight, vectors = _backward_op(
            *saved[:8], *ctx.options, *saved[8:], d_state, d_seen, d_u
        )
        n = x.shape[-2]
        d_gain = None if gain is None else vectors[2 * n :].to(gain.dtype)
        d_comb = None if comb is None else d_comb
        return dx, df, d_post, d_comb, d_weight, vectors[:n], vectors[n : 2 * n], d_gain, *(None,) * 6
