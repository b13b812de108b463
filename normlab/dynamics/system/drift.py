"""What an MLP adds to attention: a random network of two layers, the same for every token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from normlab.dynamics.system.weights import seeded
from normlab.errors import NormLabError


@dataclass(frozen=True, kw_only=True)
class RandomMLP:
    """x ↦ scale · W₂ gelu(√d W₁ x), with entries of variance 1/d and 2/hidden: a unit vector comes out about as long.

    √d is the size of the tokens that a network's norm hands to its MLP; on unit vectors a wide one would be linear.
    """

    dim: int
    hidden: int
    seeds: int | tuple[int, ...] = 0
    """One seed for all systems, or one for each."""
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.dim < 1 or self.hidden < 1:
            raise NormLabError(f"an MLP has positive widths, got {self.dim} and {self.hidden}; try {4 * self.dim}")

    def __call__(self, x: Tensor) -> Tensor:
        where = (x.device, x.dtype)
        if where not in self._cast:
            self._cast[where] = tuple(matrix.to(x) for matrix in self._matrices)
        up, down = self._cast[where]
        return F.gelu(x @ up) @ down

    @cached_property
    def _cast(self) -> dict[tuple[torch.device, torch.dtype], tuple[Tensor, ...]]:
        return {}

    @cached_property
    def _matrices(self) -> tuple[Tensor, Tensor]:
        """(d, hidden) and (hidden, d), of each system where seeds are many."""
        if isinstance(self.seeds, int):
            return self._drawn(self.seeds)
        ups, downs = zip(*(self._drawn(seed) for seed in self.seeds), strict=True)
        return torch.stack(ups), torch.stack(downs)

    def _drawn(self, seed: int) -> tuple[Tensor, Tensor]:
        # Apart from the streams of the weights, which count layers.
        generator = seeded(seed, 0, 1)
        up = torch.randn(self.dim, self.hidden, generator=generator, device="cpu")
        down = torch.randn(self.hidden, self.dim, generator=generator, device="cpu")
        # x has unit length: √d W₁ x has entries of variance one.
        return up, self.scale * math.sqrt(2 / (self.dim * self.hidden)) * down
