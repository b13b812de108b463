"""The position of a residual step in the network: block, sublayer, depth and width."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Site:
    """Where a step stands in the network, in blocks and, for refined schemes, in time."""

    block: int
    branch: int
    depth: int
    dim: int
    steps: int
    """Steps in this block: one per branch, or one for all of them when they run in parallel."""
    cut: int = 1

    @property
    def dt(self) -> float:
        """The share of a whole step that is taken here: one unless the scheme was refined."""
        return 1.0 / self.cut

    @property
    def time(self) -> float:
        """Depth in whole blocks before this one; the k of the equations, counted from zero."""
        return self.block / self.cut

    @property
    def horizon(self) -> float:
        """Depth of the whole network in whole blocks; the L of the equations."""
        return self.depth / self.cut

    @property
    def sublayers(self) -> float:
        """Steps in the whole network; the 2L of the equations."""
        return self.steps * self.horizon
