"""The position of a residual step in the network: block, sublayer, depth and width."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Site:
    """Position of a residual step in the network, in blocks and, for refined schemes, in time."""

    block: int
    """Index of the block, from 0."""
    branch: int
    """Index of the branch in its block, from 0: attention, then the MLP."""
    depth: int
    """Blocks in the whole network."""
    dim: int
    """Width of the residual stream."""
    steps: int
    """Steps in this block: one per branch, or one for all of them if they run in parallel."""
    cut: float = 1
    """What every step is divided by; 1 unless the scheme was refined."""

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
    def sublayers(self) -> float:
        """Steps in the whole network; 2L in the equations."""
        return self.steps * self.horizon
