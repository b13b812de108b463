"""Queries, keys and values out of one projection, the first two turned by their positions.

Formula    [q, k, v] = qkv;  (a, b) ← (a cos φ − b sin φ, b cos φ + a sin φ) for each pair of channels of q and k
           (da, db) → (da cos φ + db sin φ, db cos φ − da sin φ)

Forward, the turn is cheap: a compiler makes it part of what is there. Backward, three gradients in the layout that
attention likes become one in the layout of the projection: one kernel reads them as they lie.
"""

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
    # Cast only where it must be: torch 2.11 compiles a cast to the same type into a second name for the result of an
    # autograd function, and looks for the gradient under the first.
    return turned if turned.dtype == x.dtype else turned.to(x.dtype)


def rotated_heads(
    qkv: Tensor, table: Table, heads: int, kv_heads: int, *, kernels: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v, each (B, T, its heads, head_dim), of a projection (B, T, (heads + 2 · kv_heads) · head_dim)."""
    if _fused(kernels, qkv):
        return _RotatedHeads.apply(qkv, *table, heads, kv_heads)
    return _reference(qkv, table, heads, kv_heads)


def _reference(qkv: Tensor, table: Table, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    split = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], dim=-2)
    return rotate(split[0], table), rotate(split[1], table), split[2]


def backward_reference(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of the projection: what the kernel computes, spelt out."""

    def back(d: Tensor) -> Tensor:
        first, second = (d * sin).chunk(2, dim=-1)
        return (d * cos + torch.cat((second, -first), dim=-1)).to(d.dtype)

    return torch.cat((back(dq), back(dk), dv), dim=-2).flatten(-2)


def _fused(kernels: str, qkv: Tensor) -> bool:
    if hasattr(qkv, "full_tensor"):
        return False  # a distributed tensor: its operators are torch's own
    # Heads are taken a few at a time: no width is too large.
    return qkv.ndim == 3 and backends.choose(kernels, qkv[..., :1]) == "triton"


@torch.library.custom_op(
    "normlab::rotary_backward",
    mutates_args=(),
    schema="(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin) -> Tensor",
)
def _backward_op(dq, dk, dv, cos, sin):
    from normlab.kernels.fused import rotary

    return rotary.backward(dq, dk, dv, cos, sin)


@_backward_op.register_fake
def _(dq, dk, dv, cos, sin):
    batch, length, heads, head_dim = dq.shape
    return dq.new_empty(batch, length, (heads + 2 * dk.shape[2]) * head_dim)


def _no_second_derivative(ctx, *grads):
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
