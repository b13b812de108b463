"""Chunked cross-entropy: the loss of a language-model head without all logits in memory at once.

Formula    z = S W h;  L = mean(log Σ exp z − z_target) + c · mean((log Σ exp z)²)
           ∂L/∂z = (p (1 + 2c log Σ exp z) − onehot) / count,  p = softmax z

Rows are processed in chunks, and the gradients of hidden states and weight are computed while a chunk's logits exist:
three matrix products per chunk, as many as without chunks, and nothing is recomputed. The backward pass only multiplies
by the upstream gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from normlab.errors import NormLabError
from normlab.kernels.cross_entropy_gradient import cross_entropy_gradient_, log_probabilities, of_targets
from normlab.models.sublayer import product_dtype, scale_rows
from normlab.norms import widen
from normlab.schemes.contract.scales import channel_factor

CHUNK_BYTES = 2**29
"""Size of a chunk of logits in the product's dtype: large enough for matrix products to run at full speed."""


class Loss(NamedTuple):
    """A loss with its z-loss and the number of targets."""

    loss: torch.Tensor
    """Mean cross-entropy in nats over the targets that are not ignored, plus the z-loss."""
    z: torch.Tensor
    """The z-loss alone, without gradient; 0 if its weight is 0."""
    count: torch.Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """Number of targets that are not ignored."""

    @property
    def cross_entropy(self) -> torch.Tensor:
        """The mean cross-entropy without the z-loss and without gradient, for reports."""
        return self.loss.detach() - self.z


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    logit_transform: nn.Module | None = None,
    z_loss: float = 0.0,
    chunk: int | None = None,
    ignore_index: int = -100,
    kernels: str = "auto",
) -> Loss:
    """Cross-entropy of hidden states (N, D) with a head's weight (V, D) and targets (N); 0 if all targets are ignored.

    `logit_transform` is applied to the logits. A transform that only scales them is folded into the weight at no cost;
    any other is applied to every chunk and again in the backward pass.
    """
    _check(hidden, weight, targets, z_loss, chunk)
    rows = chunk or chunk_rows(weight.shape[0], product_dtype(hidden, weight).itemsize)
    factor = channel_factor(logit_transform)
    if logit_transform is not None and factor is None:
        return _recomputed(hidden, weight, targets, logit_transform, z_loss, rows, ignore_index)
    if factor is not None:
        weight = scale_rows(weight, factor)
    if not torch.is_grad_enabled() or not (hidden.requires_grad or weight.requires_grad):
        return Loss(*_value(hidden, weight, targets, z_loss, rows, ignore_index))
    loss, z, count = _Chunked.apply(hidden, weight, targets, z_loss, rows, ignore_index, kernels)
    # Marked as not differentiable already, which torch 2.11 forgets when all three are outputs of compiled code.
    return Loss(loss, z.detach(), count.detach())


def chunk_rows(vocabulary: int, itemsize: int) -> int:
    """Rows whose logits fill `CHUNK_BYTES`; a power of two, so that common batch sizes give equal chunks."""
    return 1 << max(CHUNK_BYTES // (vocabulary * itemsize), 1).bit_length() - 1


class _Chunked(torch.autograd.Function):
    """Autograd function that computes loss and gradients in the forward pass, up to the upstream gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        z_loss: float,
        rows: int,
        ignore: int,
        kernels: str,
    ) -> tuple[torch.Tensor, ...]:
        dtype = product_dtype(hidden, weight)
        matrix = weight.to(dtype)
        for_weight = torch.zeros_like(weight, dtype=_wide(dtype))
        for_hidden, sums = [], []
        for h, target in _chunks(hidden, targets, rows):
            h = h.to(dtype)
            options = {"z_loss": z_loss, "ignore_index": ignore, "kernels": kernels}
            gradient, normaliser, log_p = cross_entropy_gradient_(h @ matrix.T, target, **options)
            sums.append(_sums(normaliser, log_p, target, ignore))
            for_hidden.append((gradient @ matrix).to(hidden.dtype))
            _add_product_(for_weight, gradient, h)
        loss, z, count = _means(sums, z_loss)
        ctx.save_for_backward(torch.cat(for_hidden), for_weight.to(weight.dtype), count)
        ctx.mark_non_differentiable(z, count)
        return loss, z, count

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Compiled code raises for second derivatives itself.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NormLabError("the chunked cross-entropy has no second derivative; try F.cross_entropy on logits")
        for_hidden, for_weight, count = ctx.saved_tensors
        # Not in the forward pass: in fp16 a probability divided by the number of tokens would underflow.
        factor = grads[0] / count.clamp(min=1)
        # In fp32: a GPU rounds a scalar factor to bf16 for a bf16 tensor, which biases all gradients the same way.
        for_hidden, for_weight = ((widen(g) * factor).to(g.dtype) for g in (for_hidden, for_weight))
        return for_hidden, for_weight, None, None, None, None, None


def _value(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, z_loss: float, rows: int, ignore: int
) -> Loss:
    """The loss without gradients: one product per chunk."""
    dtype = product_dtype(hidden, weight)
    matrix = weight.to(dtype)
    sums = []
    for h, target in _chunks(hidden, targets, rows):
        sums.append(_sums_of(h.to(dtype) @ matrix.T, target, ignore))
    return _means(sums, z_loss)


def _recomputed(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    transform: nn.Module,
    z_loss: float,
    rows: int,
    ignore: int,
) -> Loss:
    """For a general transform: activation checkpointing recomputes every chunk's logits in the backward pass."""
    dtype = product_dtype(hidden, weight)

    def sums_of(h: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return _sums_of(transform(h.to(dtype) @ weight.to(dtype).T), target, ignore)

    sums = [checkpoint(sums_of, h, target, use_reentrant=False) for h, target in _chunks(hidden, targets, rows)]
    loss, z, count = _means(sums, z_loss)  # pyright: ignore[reportArgumentType]
    return Loss(loss, z.detach(), count.detach())


def _chunks(hidden: torch.Tensor, targets: torch.Tensor, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(hidden.split(rows), targets.split(rows), strict=True))


def _sums_of(logits: torch.Tensor, targets: torch.Tensor, ignore: int) -> torch.Tensor:
    return _sums(*of_targets(logits, log_probabilities(logits), targets, ignore), targets, ignore)


def _sums(normaliser: torch.Tensor, log_p: torch.Tensor, targets: torch.Tensor, ignore: int) -> torch.Tensor:
    """Over the targets that are not ignored: Σ cross-entropy, Σ (log Σ exp z)², their number."""
    terms = torch.stack([-log_p, normaliser.square(), torch.ones_like(log_p)])
    return torch.where(targets != ignore, terms, 0.0).sum(-1)


# A custom operator, because inductor has no bf16 product that accumulates into fp32 and would keep every chunk's
# product to add all of them at once.
@torch.library.custom_op("normlab::add_product_", mutates_args=("total",))
def _add_product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += aᵀ b in the total's dtype, so that chunks are not rounded more than one product would be."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a.T, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.T.to(total.dtype), b.to(total.dtype))


@_add_product_.register_fake
def _(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    return None


def _means(sums: list[torch.Tensor], z_loss: float) -> Loss:
    nats, squares, count = torch.stack(sums).sum(0).unbind()
    # At least 1: without targets the loss is 0, not 0/0.
    at_least_one = count.clamp(min=1)
    # Not 0 · squares, because squares may overflow.
    z = z_loss * squares / at_least_one if z_loss else torch.zeros_like(nats)
    return Loss(nats / at_least_one + z, z, count)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, z_loss: float, chunk: int | None) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (hidden, weight, targets))
        raise NormLabError(
            f"cross-entropy: expected hidden (N, D), weight (V, D), targets (N), got {shapes}; try .flatten(0, 1)"
        )
    if chunk is not None and chunk < 1:
        raise NormLabError(f"cross-entropy: chunk must be at least 1 row, got {chunk}; leave it out to have it chosen")
    if not 0.0 <= z_loss < float("inf"):
        raise NormLabError(f"cross-entropy: z_loss must be a number from 0 on, got {z_loss}; try 1e-4")
