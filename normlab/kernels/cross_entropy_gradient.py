"""The slope of a cross-entropy in its logits, made where the logits were.

Formula    log p = z_target − log Σ exp z;  ∂/∂z [−log p + c (log Σ exp z)²] = p (1 + 2c log Σ exp z) − onehot

A chunk of logits is the largest thing in memory when a language model learns: a kernel reads every row once, turns it
into its slope in place, and leaves two numbers a row behind.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from normlab.errors import NormLabError
from normlab.kernels import backends


class Slope(NamedTuple):
    """What there is to know of a chunk of logits; nothing of it is divided by a number of rows."""

    slope: Tensor
    """(N, V) in the logits' format: the gradient of each row's loss, zero where the target is ignored."""
    normaliser: Tensor
    """(N,) log Σ exp z, in fp32 at least; anything where the target is ignored."""
    log_p: Tensor
    """(N,) the target's log-probability, likewise."""


def cross_entropy_gradient_(
    logits: Tensor, targets: Tensor, *, z_loss: float = 0.0, ignore_index: int = -100, kernels: str = "auto"
) -> Slope:
    """The slope of logits (N, V) for targets (N); what becomes of the logits is not said: take the slope.

    A target that is neither ignored nor an entry of the vocabulary is an error, or makes its row NaN.
    """
    if _fused(kernels, logits):
        return Slope(logits, *_slope_op(logits, targets, z_loss, ignore_index).unbind())
    return _reference(logits, targets, z_loss, ignore_index)


def log_probabilities(logits: Tensor) -> Tensor:
    """All of them, in fp32 at least."""
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def of_targets(logits: Tensor, log_p: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """(log Σ exp z, the target's log-probability) of every row."""
    # Entry 0 stands in where there is no target.
    index = torch.where(targets != ignore_index, targets, 0).unsqueeze(-1)
    log_p, logit = log_p.gather(-1, index).squeeze(-1), logits.gather(-1, index).squeeze(-1)
    return logit - log_p, log_p


def _reference(logits: Tensor, targets: Tensor, z_loss: float, ignore_index: int) -> Slope:
    log_p = log_probabilities(logits)
    normaliser, of_target = of_targets(logits, log_p, targets, ignore_index)
    counts = targets != ignore_index
    factor = counts * (1.0 + 2.0 * z_loss * normaliser)
    # No entry of the vocabulary is −1: a row that does not count hits nothing.
    target = torch.where(counts, targets, -1).unsqueeze(-1)
    hits = torch.arange(log_p.shape[-1], device=log_p.device) == target
    # In place: a chunk's logits are the largest thing in memory.
    slope = log_p.exp().mul_(factor.unsqueeze(-1)).add_(hits, alpha=-1)
    return Slope(slope.to(logits.dtype), normaliser, of_target)


def _fused(kernels: str, logits: Tensor) -> bool:
    if hasattr(logits, "full_tensor"):
        return False  # a distributed tensor: its operators are torch's own
    # Rows are taken piece by piece: no width is too large.
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
def _slope_op(logits, targets, z_loss, ignore_index):
    from normlab.kernels.fused import cross_entropy_gradient

    return cross_entropy_gradient.slope_(logits, targets, z_loss, ignore_index)


@_slope_op.register_fake
def _(logits, targets, z_loss, ignore_index):
    return logits.new_empty(2, logits.shape[0], dtype=torch.float32)
