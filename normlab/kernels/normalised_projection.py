"""RMSNorm without gain followed by a small linear map, in one pass over the rows.

    u = rms_norm(x)·Wᵀ = (x·Wᵀ) / √(mean x² + eps)

Rows x (..., D) in half precision, W (K, D) and u (..., K) in fp32. The rows are handed on with the result: whoever goes
on with these has their gradient added in the backward kernel.

    dx = gx + r·(du·W) − r²·(du·u)/D·x        dW = Σ (r·du)ᵀ·x over rows        r = 1/√(mean x² + eps)

Traffic, in tensors of x's size (K numbers a row are not counted): forward x is read, 1; backward x and gx are read and
dx is written, 3, and dW comes from the same x. In plain operators x is widened to fp32, normalised, written, and read
again by the product: about 6 forward and 10 backward.
"""

# torch annotates autograd functions, custom operators and some tensor methods only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.errors import NormLabError
from normlab.kernels.backends import choose
from normlab.norms import rms_norm, widen

MAX_OUTPUTS = 64
"""Largest K of the kernel: a program holds K sums for each of its rows, and for each of its columns."""


def normalised_projection(x: Tensor, weight: Tensor, eps: float, *, kernels: str = "auto") -> tuple[Tensor, Tensor]:
    """Returns (x, u) as in the module's formula. Use the returned x from here on.

    What the kernel does not cover uses the reference: rows in fp32 or fp64, whose products would need all their bits,
    and more outputs.
    """
    _check(x, weight)
    if not fuses_projection(kernels, x, weight):
        return x, F.linear(rms_norm(x, eps), widen(weight))
    return _NormalisedProjection.apply(x, weight.float(), eps)[:2]


def fuses_projection(kernels: str, x: Tensor, weight: Tensor) -> bool:
    """Whether the fused kernel runs for these rows; raises if it was asked for and cannot."""
    # The kernel works through a row piece by piece, so it has no limit on the width.
    fused = choose(kernels, x[..., :1]) == "triton"
    return fused and x.dtype in (torch.bfloat16, torch.float16) and weight.shape[0] <= MAX_OUTPUTS


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise NormLabError(
            f"normalised_projection: expected rows (..., D) and a weight (K, D), "
            f"got {tuple(x.shape)} and {tuple(weight.shape)}"
        )


@torch.library.custom_op(
    "normlab::normalised_projection_forward",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, float eps) -> (Tensor u, Tensor inverse)",
)
def _forward_op(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from normlab.kernels.fused import normalised_projection

    return normalised_projection.forward(x, weight, eps)


@_forward_op.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows = x.shape[:-1]
    return weight.new_empty((*rows, weight.shape[0])), weight.new_empty(rows)


@torch.library.custom_op(
    "normlab::normalised_projection_backward",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor u, Tensor inverse, Tensor? d_x, Tensor d_u) -> (Tensor dx, Tensor dw)",
)
def _backward_op(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    from normlab.kernels.fused import normalised_projection

    return normalised_projection.backward(x, weight, *rest)


@_backward_op.register_fake
def _(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise NormLabError("the fused normalised_projection has no second derivative; use kernels='reference'")


_backward_op.register_autograd(_no_second_derivative)


class _NormalisedProjection(torch.autograd.Function):
    """Autograd of the kernel; outputs are a view of the rows, u, and the inverse RMS, which only `backward` uses."""

    # Every input by name: without gradients torch.compile tells by their number that `forward` takes no context.
    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> Any:
        return x.view_as(x), *_forward_op(x, weight, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, _ = inputs
        _, u, inverse = output
        # The gradient of an unused output is then None, not a tensor of zeros.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(inverse)
        ctx.save_for_backward(x, weight, u, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        d_x, d_u, _ = grads
        if d_u is None:
            return d_x, None, None
        saved = ctx.saved_tensors  # once only: a checkpoint recomputes them when they are asked for
        return *_backward_op(*saved, d_x, d_u), None
