"""The position of a residual step in the network: block, sublayer, depth and width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["attention", "mlp"]
"""What a branch is: attention (self- or cross-attention) or an MLP."""


@dataclass(frozen=True)
class Site:
    """Position of a residual step in the network, in blocks and, for refined schemes, in time."""

    block: int
    """Index of the block, from 0."""
    branch: int
    """Index of the branch in its block, from 0: attention, then the MLP; `kind` says which of the two it is."""
    depth: int
    """Blocks in the whole network."""
    dim: int
    """Width of the residual stream."""
    steps: int
    """Steps in this block: one per branch, or one for all of them if they run in parallel."""
    cut: float = 1
    """What every step is divided by; 1 unless the scheme was refined."""
    kind: Kind = "attention"
    """What the branch is: as its module says in `branch_kind`, else the last of several is the MLP."""
    before: int = 0
    """Steps of the whole network before this block."""
    in_all: int = 0
    """Steps of the whole network."""

    @property
    def dt(self) -> float:
        """Fraction of a whole step taken here; 1 unless the scheme was refined."""
        return 1.0 / self.cut

    @property
    def time(self) -> float:
        """Whole blocks before this one; k in the equations, counted from zero."""
        return self.block / self.cut

    @property
    def horizon(self) -> float:
        """Depth of the network in whole blocks; L in the equations."""
        return self.depth / self.cut

    @property
    def step(self) -> int:
        """Steps of the whole network before this one."""
        return self.before + (self.branch if self.steps > 1 else 0)

    @property
    def sublayers(self) -> float:
        """Steps in the whole network, in whole ones; 2L in the equations."""
        return self.in_all / self.cut
