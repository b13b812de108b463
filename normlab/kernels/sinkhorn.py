"""Sinkhorn's algorithm on a small matrix for each token: rows and columns are divided by their sums in turn.

    M = softmax(z) + eps over each row
    M ← M / (column sums + eps), then rounds − 1 times: M ← M / (row sums + eps), M ← M / (column sums + eps)

Logits z (..., n, n). In plain operators each of the 2·rounds − 1 divisions is several nodes of a graph and keeps its
result for the backward pass. The kernel reads n² numbers a token and writes as many; backward it reads 2n² and writes
n², and computes all divisions again.
"""

# torch annotates autograd functions, custom operators and some tensor methods only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normlab.errors import NormLabError
from normlab.kernels.backends import choose

MAX_SIZE = 4
"""Largest n of the kernel: a thread holds the matrix of a token and its gradient in registers."""
MAX_SUMS = 160
"""Most sums, n for every division, that a thread of the backward kernel holds: 20 rounds with n = 4."""


def sinkhorn(logits: Tensor, rounds: int, eps: float, *, kernels: str = "auto") -> Tensor:
    """A matrix ≥ 0 whose columns sum to 1 and whose rows do as far as `rounds` go; logits (..., n, n).

    What the kernel does not cover uses the reference: larger matrices, more rounds, float64, or no epsilon, without
    which a sum may be so small that its inverse overflows.
    """
    _check(logits, rounds)
    if not _covered(logits, rounds, eps) or choose(kernels, logits) != "triton":
        return _sinkhorn(logits, rounds, eps)
    return _Sinkhorn.apply(logits.float(), rounds, eps)


def _sinkhorn(logits: Tensor, rounds: int, eps: float) -> Tensor:
    matrix = logits.softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def _covered(logits: Tensor, rounds: int, eps: float) -> bool:
    size = logits.shape[-1]
    return logits.dtype == torch.float32 and size <= MAX_SIZE and 2 * rounds * size <= MAX_SUMS and eps > 0.0


def _check(logits: Tensor, rounds: int) -> None:
    if logits.dim() < 2 or logits.shape[-1] != logits.shape[-2]:
        raise NormLabError(f"sinkhorn: expected logits (..., n, n), got {tuple(logits.shape)}")
    if rounds < 1:
        raise NormLabError(f"sinkhorn: rounds must be at least 1, got {rounds}")


@torch.library.custom_op(
    "normlab::sinkhorn_forward", mutates_args=(), schema="(Tensor logits, int rounds, float eps) -> Tensor"
)
def _forward_op(logits: Tensor, rounds: int, eps: float) -> Tensor:
    from normlab.kernels.fused import sinkhorn

    return sinkhorn.forward(logits, rounds, eps)


@_forward_op.register_fake
def _(logits: Tensor, rounds: int, eps: float) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.custom_op(
    "normlab::sinkhorn_backward",
    mutates_args=(),
    schema="(Tensor logits, Tensor d_matrix, int rounds, float eps) -> Tensor",
)
def _backward_op(logits: Tensor, d_matrix: Tensor, rounds: int, eps: float) -> Tensor:
    from normlab.kernels.fused import sinkhorn

    return sinkhorn.backward(logits, d_matrix, rounds, eps)


@_backward_op.register_fake
def _(logits: Tensor, d_matrix: Tensor, rounds: int, eps: float) -> Tensor:
    return logits.new_empty(logits.shape)


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise NormLabError("the fused sinkhorn has no second derivative; use kernels='reference'")


_backward_op.register_autograd(_no_second_derivative)


class _Sinkhorn(torch.autograd.Function):
    """Autograd of the kernel. Only the logits are saved."""

    # Every input by name: without gradients torch.compile tells by their number that `forward` takes no context.
    @staticmethod
    def forward(logits: Tensor, rounds: int, eps: float) -> Any:
        return _forward_op(logits, rounds, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        logits, ctx.rounds, ctx.eps = inputs
        ctx.save_for_backward(logits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        return _backward_op(logits, grads[0], ctx.rounds, ctx.eps), None, None
