"""Estimates of parameters, FLOPs and training memory of a model, from its configuration alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from normlab.errors import unknown
from normlab.models.config import TransformerConfig
from normlab.models.cross_entropy import chunk_rows
from normlab.models.moe import MoE
from normlab.models.transformer import Transformer

_PRECISIONS = ("fp32", "bf16")

_COMPILED = 0.55
"""Activations saved by compiled code as a fraction of those of eager code: measured 0.55, 0.56 and 0.51 at 125m, 350m
and 1.3b with Pre-Norm on an H200 (benchmarks/README.md). Schemes with fused kernels that save less need less."""


def num_params(config: TransformerConfig, *, active: bool = False) -> int:
    """Exact number of parameters, those of the scheme included, counted on the meta device."""
    model = config.build(device="meta")
    return count_parameters(model) - (_idle_params(model, config) if active else 0)


def count_parameters(module: nn.Module) -> int:
    """Number of parameters of a module; shared ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def _idle_params(model: Transformer, config: TransformerConfig) -> int:
    """Parameters of the experts that a token is not routed to."""
    experts = [module for module in model.modules() if isinstance(module, MoE)]
    stacked = sum(p.numel() for module in experts for p in module.parameters(recurse=False) if p.ndim == 3)
    return stacked * (config.experts - config.top_k) // max(config.experts, 1)


def flops_per_token(config: TransformerConfig, length: int) -> int:
    """Training FLOPs per token: 2 forward and 4 backward per weight, plus attention over `length` keys."""
    model = config.build(device="meta")
    products = count_parameters(model.stack) - _idle_params(model, config) + model.products_outside()
    return 6 * products + 12 * config.depth * config.heads * config.width_of_head * length


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one training step in bytes, by purpose."""

    weights: int
    optimiser: int
    activations: int
    """Tensors that the forward pass saves for the backward pass."""
    gradients: int
    recomputed: int
    """Activations of one block while it is recomputed; zero without activation checkpointing."""
    loss: int
    """Logits of one chunk and their probabilities in fp32, and the head's gradient, computed at the same time."""

    @property
    def total(self) -> int:
        """Peak memory. The loss is freed before other weights have gradients, so only the larger of the two counts."""
        return self.weights + self.optimiser + self.activations + max(self.gradients + self.recomputed, self.loss)

    def compiled(self) -> MemoryEstimate:
        """The estimate for a compiled model with Triton kernels, which saves about half of the activations."""
        if self.recomputed:
            # With checkpointing the saved tensors are inputs of blocks, which compilation does not reduce.
            return dataclasses.replace(self, recomputed=int(_COMPILED * self.recomputed))
        return dataclasses.replace(self, activations=int(_COMPILED * self.activations))

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value / 2**30:.2f}" for name, value in vars(self).items() if value)
        return f"{self.total / 2**30:.2f} GiB at most ({parts})"


def training_memory(config: TransformerConfig, batch: int, length: int, precision: str) -> MemoryEstimate:
    """Memory for fp32 weights, gradients, AdamW's two moments, and the activations that eager autograd saves."""
    if precision not in _PRECISIONS:
        raise unknown("precision", precision, _PRECISIONS)
    weights = 4 * num_params(config)
    kept, recomputed = _kept_activations(config, batch, length, precision), 0
    if config.checkpointing:
        plain = _kept_activations(dataclasses.replace(config, checkpointing=False), batch, length, precision)
        recomputed = (plain - kept) // config.depth
    return MemoryEstimate(
        weights=weights,
        optimiser=2 * weights,
        activations=kept,
        gradients=weights,
        recomputed=recomputed,
        loss=_loss_bytes(config, batch, length, precision),
    )


def _loss_bytes(config: TransformerConfig, batch: int, length: int, precision: str) -> int:
    _, targets = config.build(device="meta").example(batch, length)
    rows = min(targets.numel(), chunk_rows(config.answers, 2 if precision == "bf16" else 4))
    return 2 * 4 * rows * config.answers + 4 * config.answers * config.dim


def _kept_activations(config: TransformerConfig, batch: int, length: int, precision: str) -> int:
    """Bytes that autograd saves in one forward pass with loss, counted with fake tensors."""
    # Triton kernels do not run on fake tensors; they save as much as the reference or less.
    step = _Loss(dataclasses.replace(config, kernels="reference").build(device="meta"))
    kept: dict[int, int] = {}
    # Depth constants are real zero-dimensional tensors.
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = {
            name: torch.empty(p.shape, dtype=p.dtype, device="cpu", requires_grad=True)
            for name, p in step.named_parameters()
        }
        weights = {p.untyped_storage()._cdata for p in fake.values()}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                kept[storage._cdata] = storage.nbytes()
            return tensor

        example = step.model.example(batch, length)
        with (
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
        ):
            # Kept alive until the end, so that no storage's address is used twice.
            loss = torch.func.functional_call(step, fake, example)
        del loss
    return sum(kept.values())


class _Loss(nn.Module):
    """Makes the training loss the forward pass, for `functional_call`."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.model.loss(inputs, targets)
