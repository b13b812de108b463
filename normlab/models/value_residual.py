"""Value residual: later blocks mix the first block's values into their own (ResFormer, arXiv 2410.17897).

Formula    v_ℓ ← λ₁·v₁ + λ₂·v_ℓ, v₁ the values of the first block, before heads mix tokens
Init       λ₁ = λ₂ = ½, fixed or learned; not the model without it, unless λ₁ = 0

Values are local in tokens, so a cache holds the mixed ones and needs nothing more. A slot's norm comes before mixing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.norms import widen


class FirstValues:
    """Hands the first block's values to the later blocks of one forward pass."""

    def __init__(self, values: torch.Tensor | None = None) -> None:
        self.values = values

    def mixed(self, v: torch.Tensor, mix: ValueMix | None) -> torch.Tensor:
        """The values that a block attends with: as they are in the first block, which has no `mix`, and kept."""
        if mix is None:
            self.values = v
            return v
        if self.values is None:
            raise NormLabError("value residual: a block was run before the first one; run the whole model")
        return mix(self.values, v)

    def __deepcopy__(self, memo: dict[int, Any]) -> FirstValues:
        # Tensors inside a graph cannot be copied, and these are not written to.
        return FirstValues(self.values)


class ValueMix(nn.Module):
    """λ₁·v₁ + λ₂·v, both ½ at initialisation; two learned numbers, or none."""

    def __init__(self, *, learned: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, dtype=torch.float32)) if learned else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.5)

    def forward(self, first: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.weight is None:
            return (0.5 * (widen(first) + widen(v))).to(v.dtype)
        weight = widen(self.weight)
        return (weight[0] * widen(first) + weight[1] * widen(v)).to(v.dtype)

    def extra_repr(self) -> str:
        return f"learned={self.weight is not None}"
