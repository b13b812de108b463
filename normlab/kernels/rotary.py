"""Rotary position embeddings: split a fused QKV projection, rotate queries and keys.

Formula    [q, k, v] = qkv;  (a, b) ← (a cos φ − b sin φ, b cos φ + a sin φ) for each pair of channels of q and k
           (da, db) → (da cos φ + db sin φ, db cos φ − da sin φ)

The forward rotation is cheap, since torch.compile fuses it with its neighbours. In the backward pass one kernel turns
three gradients in attention's layout into one gradient in the layout of the projection, whatever their strides.
"""

# torch annotates autograd functions, custom operators and some tensor methods only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normlab.errors import NormLabError
from normlab.kernels import backends

Table = tuple[Tensor, Tensor]
"""(cos, sin), each (..., T, 1, head_dim): broadcasts over the heads of (B, T, H, head_dim)."""


def rotate(x: Tensor, table: Table) -> Tensor:
    """Rotate x (B, T, H, head_dim), in the table's precision or better; the result has x's dtype."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    quarter_turn = torch.cat((-second, first), dim=-1)
    turned = x * cos + quarter_turn * sin
    # Cast only if needed: torch 2.11 compiles a cast to the same dtype into an alias of an autograd function's output
    # and then loses its gradient.
    return turned if turned.dtype == x.dtype else turned.to(x.dtype)


def rotated_heads(
    qkv: Tensor, table: Table, heads: int, kv_heads: int, *, kernels: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a projection (B, T, (heads + 2 · kv_heads) · head_dim) into q, k, v, with q and k rotated.

    Each is (B, T, heads or kv_heads, head_dim).
    """
    if _fused(kernels, qkv):
        return _RotatedHeads.apply(qkv, *table, heads, kv_heads)
    return _reference(qkv, table, heads, kv_heads)


def _reference(qkv: Tensor, table: Table, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    split = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], dim=-2)
    return rotate(split[0], table), rotate(split[1], table), split[2]


def backward_reference(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of the projection: the reference for the kernel."""

    def back(d: Tensor) -> Tensor:
        first, second = (d * sin).chunk(2, dim=-1)
        return (d * cos + torch.cat((second, -first), dim=-1)).to(d.dtype)

    return torch.cat((back(dq), back(dk), dv), dim=-2).flatten(-2)


def _fused(kernels: str, qkv: Tensor) -> bool:
    if hasattr(qkv, "full_tensor"):
        return False  # a distributed tensor: its operators are torch's own
    # The kernel works through a few heads at a time, so it has no limit on the width.
    return qkv.ndim == 3 and backends.choose(kernels, qkv[..., :1]) == "triton"


@torch.library.custom_op(
    "normlab::rotary_backward",
    mutates_args=(),
    schema="(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin) -> Tensor",
)
def _backward_op(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    from normlab.kernels.fused import rotary

    return rotary.backward(dq, dk, dv, cos, sin)


@_backward_op.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, length, heads, head_dim = dq.shape
    return dq.new_empty(batch, length, (heads + 2 * dk.shape[2]) * head_dim)


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise NormLabError("the fused rotary heads have no second derivative; use kernels='reference'")


_backward_op.register_autograd(_no_second_derivative)


class _RotatedHeads(torch.autograd.Function):
    @staticmethod
    def forward(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> Any:
        return _reference(qkv, (cos, sin), heads, kv_heads)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[1:3])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _backward_op(*grads, *ctx.saved_tensors), None, None, None, None
