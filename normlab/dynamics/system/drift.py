"""Random MLP: a two-layer network with random weights whose output is added to that of attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from normlab.dynamics.system.weights import seeded_generator
from normlab.errors import NormLabError


@dataclass(frozen=True, kw_only=True)
class RandomMLP:
    """x ↦ scale · W₂ gelu(√d W₁ x) / √d, with entries of variance 1/d and 2/hidden: unit vectors nearly keep their
    length (0.92, which is √(2 E gelu²) for a normal number).

    √d is the norm of the tokens that an MLP receives after a norm layer; on unit vectors GELU would be almost linear.
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
        """Matrices (d, hidden) and (hidden, d), stacked over systems if there are several seeds."""
        if isinstance(self.seeds, int):
            return self._drawn(self.seeds)
        ups, downs = zip(*(self._drawn(seed) for seed in self.seeds), strict=True)
        return torch.stack(ups), torch.stack(downs)

    def _drawn(self, seed: int) -> tuple[Tensor, Tensor]:
        # A stream of its own: the attention weights use (seed, layer).
        generator = seeded_generator(seed, 0, 1)
        up = torch.randn(self.dim, self.hidden, generator=generator, device="cpu")
        down = torch.randn(self.hidden, self.dim, generator=generator, device="cpu")
        # x has unit length: √d W₁ x has entries of variance one.
        return up, self.scale * math.sqrt(2 / (self.dim * self.hidden)) * down
