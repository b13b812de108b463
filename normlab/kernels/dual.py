"""The fused step of ResiDual (arXiv 2304.14802): a normalised and an accumulating residual stream in one pass.

    p' = N(p + step · f)
    u' = u + scale · step · f

State (..., 2, D) = (p, u), update f (..., D). Forward it reads 3 and writes 2 tensors of the update's size; backward it
reads p, f and the 3 gradients that come in (both streams', the next branch's) and writes 3: 8. The branch's input is a
view of the first stream, so it costs nothing.
"""

# torch annotates autograd functions, custom operators and some tensor methods only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normlab.errors import NormLabError
from normlab.kernels.backends import choose
from normlab.kernels.residual import KINDS, Affine, apply, weighted
from normlab.norms import widen


def dual_step(
    state: Tensor,
    update: Tensor,
    norm: Affine,
    *,
    step: Tensor | None = None,
    scale: Tensor | None = None,
    kernels: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Returns (next state, its first stream), as in the module's formula.

    `norm` is of kind rms or layer; `step` and `scale` are zero-dimensional tensors, None stands for 1. The backward
    kernel adds up the gradients of both outputs.
    """
    _check(state, update)
    if choose(kernels, state) == "triton" and choose(kernels, update) == "triton":
        # A kernel cannot read scalars from host memory.
        constants = (None if c is None else c.to(state.device) for c in (step, scale))
        return _Dual.apply(state, update, *constants, norm.gain, norm.bias, KINDS[norm.kind], norm.eps, norm.offset)
    post, collected = widen(state).unbind(-2)
    wide = weighted(step, widen(update))
    streams = apply(norm, post + wide), collected + weighted(scale, wide)
    state = torch.stack(streams, dim=-2).to(state.dtype)
    return state, state[..., 0, :]


def _check(state: Tensor, update: Tensor) -> None:
    if state.dim() < 2 or state.shape[-2] != 2 or update.shape != (*state.shape[:-2], state.shape[-1]):
        raise NormLabError(
            "dual_step: expected a state (..., 2, D) and an update (..., D), "
            f"got {tuple(state.shape)} and {tuple(update.shape)}"
        )


_OPTIONS = "Tensor? step, Tensor? scale, Tensor? gain, Tensor? bias, int kind, float eps, bool offset"


@torch.library.custom_op(
    "normlab::dual_forward", mutates_args=(), schema=f"(Tensor state, Tensor update, {_OPTIONS}) -> Tensor"
)
def _forward_op(state: Tensor, update: Tensor, *options: Any) -> Tensor:
    from normlab.kernels.fused import dual

    return dual.forward(state, update, *options)


@_forward_op.register_fake
def _(state: Tensor, *_: Any) -> Tensor:
    return state.new_empty(state.shape)


@torch.library.custom_op(
    "normlab::dual_backward",
    mutates_args=(),
    schema=f"(Tensor state, Tensor update, {_OPTIONS}, Tensor? d_state, Tensor? d_input)"
    " -> (Tensor d_state, Tensor d_update, Tensor d_affine)",
)
def _backward_op(state: Tensor, update: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    from normlab.kernels.fused import dual

    return dual.backward(state, update, *rest)


@_backward_op.register_fake
def _(
    state: Tensor, update: Tensor, step: Any, scale: Any, gain: Tensor | None, bias: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    wanted = (gain is not None) + (bias is not None)
    affine = state.new_empty((wanted, state.shape[-1]), dtype=torch.float32)
    return state.new_empty(state.shape), update.new_empty(update.shape), affine


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise NormLabError("the fused dual_step has no second derivative; use kernels='reference'")


_backward_op.register_autograd(_no_second_derivative)


class _Dual(torch.autograd.Function):
    """Autograd of the fused step. The second output views the first stream, with a gradient of its own."""

    # Every input by name: without gradients torch.compile tells by their number that `forward` takes no context.
    @staticmethod
    def forward(
        state: Tensor,
        update: Tensor,
        step: Tensor | None,
        scale: Tensor | None,
        gain: Tensor | None,
        bias: Tensor | None,
        kind: int,
        eps: float,
        offset: bool,
    ) -> Any:
        after = _forward_op(state, update, step, scale, gain, bias, kind, eps, offset)
        return after, after.select(-2, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        state, update, step, scale, gain, bias, *ctx.norm = inputs
        # The gradient of an unused output is then None, not a tensor of zeros.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(state, update, step, scale, gain, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if all(grad is None for grad in grads):
            return (None,) * 9
        saved = ctx.saved_tensors  # once only: a checkpoint recomputes them when they are asked for
        d_state, d_update, d_affine = _backward_op(*saved, *ctx.norm, *grads)
        rest = iter(d_affine.unbind(0))
        affine = [None if a is None else next(rest).to(a.dtype) for a in saved[-2:]]
        return d_state, d_update, None, None, *affine, None, None, None
