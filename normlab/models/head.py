"""Output head: maps hidden states to logits over the vocabulary or over classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from normlab.models.sublayer import Sublayer, product_dtype, through


class Head(Sublayer):
    """logits = S_z (W h), with a weight of its own or tied to the embedding; S_z is a slot for a logit scale."""

    def __init__(self, dim: int, vocab_size: int, *, tied: bool) -> None:
        super().__init__()
        self.dim, self.vocab_size = dim, vocab_size
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, dim))
        self.offers = frozenset({"logit-scale"} if tied else {"logit-scale", "untied-head"})
        self.logit_scale: nn.Module | None = None

    def accept(self, need: str, module: nn.Module | float) -> None:
        if need == "untied-head" and need in self.offers:
            return  # nothing to do: the head was built untied
        super().accept(need, module)

    def forward(self, hidden: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        weight = embedding if self.weight is None else self.weight
        return through(self.logit_scale, F.linear(hidden.to(product_dtype(hidden, weight)), weight))

    def parameter_roles(self) -> dict[str, str]:
        return {"weight": "head"}
