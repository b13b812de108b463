"""SwiGLU with the linear layer after it, fused in the backward pass.

Formula    y = h Wᵀ + b,  h = silu(gate) ⊙ up,  [gate, up] = raw,  silu(z) = z σ(z)
           dh = dy W,  d up = dh silu(gate),  d gate = dh up σ (1 + gate (1 − σ)),  dW = dyᵀ h,  σ = σ(gate)

Together the two save only `raw` for the backward pass, where one kernel reads raw and dh once and computes the gradient
of both halves, and h again for dW.
"""

# torch annotates autograd functions, custom operators and some tensor methods only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.errors import NormLabError
from normlab.kernels import backends
from normlab.norms import widen


def gated(raw: Tensor) -> Tensor:
    """silu(gate) ⊙ up: (..., 2 · hidden), the gate first, to (..., hidden)."""
    gate, up = raw.chunk(2, dim=-1)
    return F.silu(gate) * up


def gated_linear(raw: Tensor, weight: Tensor, bias: Tensor | None = None, *, kernels: str = "auto") -> Tensor:
    """`gated(raw)` followed by a linear layer, in the weight's dtype."""
    if _fused(kernels, raw, weight):
        return _GatedLinear.apply(raw, weight, bias)
    return F.linear(gated(raw).to(weight.dtype), weight, bias)


def _fused(kernels: str, raw: Tensor, weight: Tensor) -> bool:
    if hasattr(raw, "full_tensor") or hasattr(weight, "full_tensor"):
        return False  # a distributed tensor: its operators are torch's own
    # The kernel works through a row piece by piece, so it has no limit on the width.
    return all(backends.choose(kernels, tensor[..., :1]) == "triton" for tensor in (raw, weight))


def backward_reference(raw: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of raw, h), in the dtypes of raw and dh: the reference for the kernel."""
    gate, up = widen(raw).chunk(2, dim=-1)
    wide, sigmoid = widen(dh), gate.sigmoid()
    d_gate = wide * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    d_up = wide * gate * sigmoid
    return torch.cat((d_gate, d_up), dim=-1).to(raw.dtype), (gate * sigmoid * up).to(dh.dtype)


@torch.library.custom_op(
    "normlab::swiglu_backward", mutates_args=(), schema="(Tensor raw, Tensor dh) -> (Tensor d_raw, Tensor h)"
)
def _backward_op(raw: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    from normlab.kernels.fused import swiglu

    return swiglu.backward(raw, dh)


@_backward_op.register_fake
def _(raw: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    return raw.new_empty(raw.shape), dh.new_empty(dh.shape)


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise NormLabError("the fused gated_linear has no second derivative; use kernels='reference'")


_backward_op.register_autograd(_no_second_derivative)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(raw: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        # Plain operators: torch.compile fuses them.
        return F.linear(gated(raw).to(weight.dtype), weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        raw, weight, bias = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(raw, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raw, weight = ctx.saved_tensors
        dy = grads[0].reshape(-1, weight.shape[0])
        d_raw, h = _backward_op(raw.reshape(-1, raw.shape[-1]), dy @ weight)
        d_weight = dy.T @ h if ctx.needs_input_grad[1] else None
        return d_raw.view_as(raw), d_weight, dy.sum(0) if ctx.has_bias else None
