"""Input sensitivity of a model: relative change of its output per relative change of its input.

Formula    S² = E‖f(e + δ) - f(e)‖² / ‖f(e)‖²  ÷  E‖δ‖² / ‖e‖²,   δ Gaussian and small
             = ‖J‖²_F ‖e‖² / (n ‖f(e)‖²),   J = ∂f/∂e,  n entries in e

e are the embeddings that enter the stack and f the states that leave its exit, of a whole batch. 1: a relative change
of the input is a relative change of the output as large. ‖J‖²_F = E‖Jᵀv‖² for Gaussian v, so that one backward pass
from one random v estimates it (relative variance at most 2 over the number of directions that J keeps); no finite
difference is taken, which bf16 would round away.
"""

# torch annotates hooks, modules and some tensor functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from normlab.models.transformer import Transformer
from normlab.probes import measures
from normlab.probes.untouched import eager_mode, untouched

_SEED = 2510


def sensitivity(model: Transformer, inputs: torch.Tensor, **options: Any) -> float | None:
    """S of the formula above; None if it is not finite. The model is restored afterwards."""
    seen: dict[str, torch.Tensor] = {}

    def enters(_stack: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen["entering"] = args[0]

    def leaves(_stack: nn.Module, _args: Any, output: torch.Tensor) -> None:
        seen["leaving"] = output

    hooks = [model.stack.register_forward_pre_hook(enters), model.stack.register_forward_hook(leaves)]
    try:
        with untouched(model), eager_mode():
            model.features(inputs, **options)
            entering, leaving = seen["entering"], seen["leaving"]
            (moved,) = torch.autograd.grad(leaving, entering, _direction(leaving))
    finally:
        for hook in hooks:
            hook.remove()
    sizes = torch.stack([measures.norm(x.detach()) for x in (moved, entering, leaving)])
    return _ratio(sizes.tolist(), entering.numel())


def _direction(like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(like.device).manual_seed(_SEED)
    return torch.randn(like.shape, device=like.device, generator=generator).to(like.dtype)


def _ratio(sizes: list[float], entries: int) -> float | None:
    moved, entering, leaving = sizes
    value = moved * entering / (leaving * math.sqrt(entries)) if leaving else math.nan
    return value if math.isfinite(value) else None
