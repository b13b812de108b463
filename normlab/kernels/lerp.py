"""The interpolation step of nGPT (arXiv 2410.01131), and normalisation of weights to unit length."""

# torch annotates autograd functions, custom operators and some tensor methods only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch

from normlab.errors import NormLabError
from normlab.kernels.backends import choose
from normlab.norms import l2_norm, widen


def sphere_lerp(
    h: torch.Tensor, g: torch.Tensor, alpha: torch.Tensor, eps: float, *, kernels: str = "auto"
) -> torch.Tensor:
    """n(h + α ⊙ (n(g) − h)) on the last dimension, n(v) = v/√(Σv² + eps²), in the dtype of `h`."""
    _check(h, g, alpha)
    if _fused(kernels, h, g, alpha):
        return _Lerp.apply(h, g, alpha, eps, h.dtype)
    return _lerp(h, g, alpha, eps)


def sphere_lerp_pair(
    h: torch.Tensor,
    g: torch.Tensor,
    alpha: torch.Tensor,
    eps: float,
    *,
    input_dtype: torch.dtype | None = None,
    kernels: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sphere_lerp` with two equal outputs: the residual stream, and the input of the next sublayer.

    The backward kernel adds up their two gradients, which saves a separate addition in memory. The second output has
    `input_dtype`, by default that of `h`.
    """
    _check(h, g, alpha)
    if _fused(kernels, h, g, alpha):
        return _LerpPair.apply(h, g, alpha, eps, input_dtype or h.dtype)
    y = _lerp(h, g, alpha, eps)
    return y, y.to(input_dtype or h.dtype)


def unit_rows_(weight: torch.Tensor, axis: int = -1, *, kernels: str = "auto") -> None:
    """Scale `weight` in place to unit length along `axis`, -1 or -2; zero rows stay zero.

    Leading dimensions are a batch (stacked experts). Distributed weights use the reference implementation.
    """
    if axis not in (-1, -2) or weight.dim() < -axis:
        raise NormLabError(
            f"unit_rows_: axis must be -1 (rows) or -2 (columns) of a weight that has it, got axis {axis} "
            f"for shape {tuple(weight.shape)}"
        )
    weight = weight.detach()
    if weight.numel() == 0:
        return
    # The kernel for columns works in tiles, so it has no limit on the width.
    if _fused(kernels, weight if axis == -1 else weight.narrow(-1, 0, 1)) and _packed(kernels, weight):
        _unit_op(weight, axis)
    else:
        length = torch.linalg.vector_norm(widen(weight), dim=axis, keepdim=True)
        weight.copy_(widen(weight) / length.clamp_min(torch.finfo(torch.float32).tiny))


def _lerp(h: torch.Tensor, g: torch.Tensor, alpha: torch.Tensor, eps: float) -> torch.Tensor:
    state, target = widen(h), l2_norm(g, eps)
    return l2_norm(state + widen(alpha) * (target - state), eps).to(h.dtype)


def _check(h: torch.Tensor, g: torch.Tensor, alpha: torch.Tensor) -> None:
    if h.shape != g.shape or alpha.shape != h.shape[-1:]:
        raise NormLabError(
            f"sphere_lerp: state and update must have one shape and alpha their width, got {tuple(h.shape)}, "
            f"{tuple(g.shape)} and {tuple(alpha.shape)}"
        )


def _fused(kernels: str, *tensors: torch.Tensor) -> bool:
    if any(hasattr(tensor, "full_tensor") for tensor in tensors):
        return False
    return all(choose(kernels, tensor) == "triton" for tensor in tensors)


def _packed(kernels: str, weight: torch.Tensor) -> bool:
    if kernels == "triton" and not weight.is_contiguous():
        raise NormLabError("unit_rows_: kernels='triton' needs a contiguous weight; use kernels='auto' or 'reference'")
    return weight.is_contiguous()


@torch.library.custom_op(
    "normlab::lerp_forward",
    mutates_args=(),
    schema="(Tensor h, Tensor g, Tensor alpha, float eps, ScalarType input_dtype) -> (Tensor y, Tensor seen)",
)
def _forward_op(
    h: torch.Tensor, g: torch.Tensor, alpha: torch.Tensor, eps: float, input_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, y in `input_dtype`), the second empty if that is the dtype of `h`: an operator returns no tensor twice."""
    from normlab.kernels.fused import lerp

    return lerp.lerp_forward(h, g, alpha, eps, input_dtype)


@_forward_op.register_fake
def _(
    h: torch.Tensor, g: torch.Tensor, alpha: torch.Tensor, eps: float, input_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    return h.new_empty(h.shape), h.new_empty(h.shape if input_dtype != h.dtype else 0, dtype=input_dtype)


@torch.library.custom_op(
    "normlab::lerp_backward",
    mutates_args=(),
    schema="(Tensor h, Tensor g, Tensor alpha, float eps, Tensor? d_state, Tensor? d_input)"
    " -> (Tensor dh, Tensor dg, Tensor dalpha)",
)
def _backward_op(
    h: torch.Tensor,
    g: torch.Tensor,
    alpha: torch.Tensor,
    eps: float,
    d_state: torch.Tensor | None,
    d_input: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from normlab.kernels.fused import lerp

    return lerp.lerp_backward(h, g, alpha, eps, d_state, d_input)


@_backward_op.register_fake
def _(
    h: torch.Tensor, g: torch.Tensor, alpha: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return h.new_empty(h.shape), g.new_empty(g.shape), alpha.new_empty(alpha.shape)


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise NormLabError("the fused sphere_lerp has no second derivative; use kernels='reference'")


_backward_op.register_autograd(_no_second_derivative)


@torch.library.custom_op("normlab::unit_rows_", mutates_args=("weight",), schema="(Tensor(a!) weight, int axis) -> ()")
def _unit_op(weight: torch.Tensor, axis: int) -> None:
    from normlab.kernels.fused import lerp

    lerp.unit_rows_(weight, axis)


@_unit_op.register_fake
def _(weight: torch.Tensor, axis: int) -> None:
    return None


class _Lerp(torch.autograd.Function):
    @staticmethod
    def forward(h: torch.Tensor, g: torch.Tensor, alpha: torch.Tensor, eps: float, input_dtype: torch.dtype) -> Any:
        return _forward_op(h, g, alpha, eps, input_dtype)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        h, g, alpha, ctx.eps, _ = inputs
        # The gradient of an unused output is then None, not a tensor of zeros.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h, g, alpha)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        d_state, d_input = (*grads, None)[:2]
        if d_state is None and d_input is None:
            return (None,) * 5
        return *_backward_op(*ctx.saved_tensors, ctx.eps, d_state, d_input), None, None


class _LerpPair(_Lerp):
    @staticmethod
    def forward(h: torch.Tensor, g: torch.Tensor, alpha: torch.Tensor, eps: float, input_dtype: torch.dtype) -> Any:
        y, seen = _forward_op(h, g, alpha, eps, input_dtype)
        return y, y.view_as(y) if input_dtype == h.dtype else seen
