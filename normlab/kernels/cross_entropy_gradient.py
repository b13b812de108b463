"""Gradient of the cross-entropy with respect to the logits, written over the logits.

Formula    log p = z_target − log Σ exp z;  ∂/∂z [−log p + c (log Σ exp z)²] = p (1 + 2c log Σ exp z) − onehot

A chunk of logits is the largest tensor in the training of a language model. The kernel reads every row once, replaces
it by its gradient in place, and returns two numbers per row.
"""

# torch annotates autograd functions, custom operators and some tensor methods only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from normlab.errors import NormLabError
from normlab.kernels import backends


class LogitGradient(NamedTuple):
    """Gradient, normaliser and log-probability of a chunk of logits, per row: not divided by the number of rows."""

    gradient: Tensor
    """(N, V) in the logits' dtype: the gradient of each row's loss, zero for ignored targets."""
    normaliser: Tensor
    """(N,) log Σ exp z, in fp32 at least; undefined for ignored targets."""
    log_p: Tensor
    """(N,) log-probability of the target, in fp32 at least; undefined for ignored targets."""


def cross_entropy_gradient_(
    logits: Tensor, targets: Tensor, *, z_loss: float = 0.0, ignore_index: int = -100, kernels: str = "auto"
) -> LogitGradient:
    """Gradient of the loss for logits (N, V) and targets (N). The logits may be overwritten; use the result only.

    A target outside the vocabulary that is not `ignore_index` raises an error or makes its row NaN.
    """
    if _fused(kernels, logits):
        normaliser, log_p = _gradient_op(logits, targets, z_loss, ignore_index).unbind()
        return LogitGradient(logits, normaliser, log_p)
    return _reference(logits, targets, z_loss, ignore_index)


def log_probabilities(logits: Tensor) -> Tensor:
    """log softmax of the logits, in fp32 at least."""
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def of_targets(logits: Tensor, log_p: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """(log Σ exp z, log-probability of the target) of every row."""
    # Entry 0 replaces an ignored target.
    index = torch.where(targets != ignore_index, targets, 0).unsqueeze(-1)
    log_p, logit = log_p.gather(-1, index).squeeze(-1), logits.gather(-1, index).squeeze(-1)
    return logit - log_p, log_p


def _reference(logits: Tensor, targets: Tensor, z_loss: float, ignore_index: int) -> LogitGradient:
    log_p = log_probabilities(logits)
    normaliser, of_target = of_targets(logits, log_p, targets, ignore_index)
    counts = targets != ignore_index
    factor = counts * (1.0 + 2.0 * z_loss * normaliser)
    # −1 is no entry of the vocabulary, so the one-hot row of an ignored target is zero.
    target = torch.where(counts, targets, -1).unsqueeze(-1)
    hits = torch.arange(log_p.shape[-1], device=log_p.device) == target
    # In place: a chunk's logits are the largest tensor in memory.
    gradient = log_p.exp().mul_(factor.unsqueeze(-1)).add_(hits, alpha=-1)
    return LogitGradient(gradient.to(logits.dtype), normaliser, of_target)


def _fused(kernels: str, logits: Tensor) -> bool:
    if hasattr(logits, "full_tensor"):
        return False  # a distributed tensor: its operators are torch's own
    # The kernel works through a row piece by piece, so it has no limit on the width.
    if backends.choose(kernels, logits[:, :1]) == "reference":
        return False
    if kernels == "triton" and logits.stride(-1) != 1:
        raise NormLabError(
            "cross_entropy_gradient_: kernels='triton' needs rows without gaps; use kernels='auto' or 'reference'"
        )
    return logits.stride(-1) == 1


@torch.library.custom_op(
    "normlab::cross_entropy_gradient_",
    mutates_args=("logits",),
    schema="(Tensor(a!) logits, Tensor targets, float z_loss, int ignore_index) -> Tensor",
)
def _gradient_op(logits: Tensor, targets: Tensor, z_loss: float, ignore_index: int) -> Tensor:
    from normlab.kernels.fused import cross_entropy_gradient

    return cross_entropy_gradient.gradient_(logits, targets, z_loss, ignore_index)


@_gradient_op.register_fake
def _(logits: Tensor, targets: Tensor, z_loss: float, ignore_index: int) -> Tensor:
    return logits.new_empty(2, logits.shape[0], dtype=torch.float32)
