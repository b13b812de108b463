"""Coordinates of a ladder's cells and of places beyond it, in e-folds relative to the top cell.

Size is measured by FLOPs per token, so that ln C = size + tokens holds exactly, attention and head included.

A path leads from its bottom to its top in one direction: with constant tokens per parameter half of the compute goes
into each, with one size all of it into tokens, with one budget all of it into size. Only a place that lies ahead in
this direction is where the path leads; how far another one lies aside of it, the cells say nothing about.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

Array = np.ndarray
Kind = Literal["path", "grid"]
Side = Literal["size", "tokens"]

SAME = 1.1
"""Sizes, or budgets, up to this factor apart count as one: rounding to whole batches varies nothing."""
MOST_STRETCHED = 100.0
"""Factor beyond which budgets are not drawn further apart: the prior's variance, its cube, would swallow all digits."""


class HasPlace(Protocol):
    """Anything with a place: a cell, a row, a target."""

    @property
    def parameters(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def flops(self) -> float: ...


@dataclass(frozen=True)
class Layout:
    """Cells first, then places."""

    kind: Kind
    cells: int
    sizes: int
    """Number of model sizes among the cells."""
    budgets: int
    """Number of budgets of tokens among the cells."""
    size: Array
    tokens: Array
    tokens_share: float
    """Share of the compute that goes into tokens from the bottom of a path to its top; half of it on a grid."""
    unvaried: tuple[Side, ...]
    """What all cells have in common."""
    scatter_power: float = 0.0
    """How much more seeds scatter with fewer tokens: as this power of top tokens over tokens, at least 0."""

    @property
    def compute(self) -> Array:
        return self.size + self.tokens

    @property
    def ratio(self) -> Array:
        """Tokens per parameter."""
        return self.tokens - self.size

    @property
    def along(self) -> Array:
        """Compute along a path, in e-folds of a path that shares it equally: size alone or tokens alone count twice."""
        return 2.0 * max(self.tokens_share, 1.0 - self.tokens_share) * self.compute

    @property
    def aside(self) -> Array:
        """E-folds of compute in tokens instead of size, against where the path leads with the same compute."""
        return self.tokens - self.tokens_share * self.compute

    @property
    def stretched(self) -> Layout:
        """The layout with budgets below the top's drawn apart as far as seeds scatter more there than at the top."""
        if self.scatter_power == 0.0:
            return self
        below = np.maximum(-self.tokens, 0.0)
        within = np.minimum(below, math.log(MOST_STRETCHED) / self.scatter_power)
        far = np.expm1(self.scatter_power * within) / self.scatter_power + MOST_STRETCHED * (below - within)
        return replace(self, tokens=np.maximum(self.tokens, 0.0) - far)

    @property
    def span(self) -> float:
        """Largest compute of a cell over the smallest."""
        own = self.compute[: self.cells]
        return float(np.exp(own.max() - own.min())) if self.cells else 1.0


def layout_of(cells: Sequence[HasPlace], places: Sequence[HasPlace] = (), scatter_power: float = 0.0) -> Layout:
    """The layout of cells and places; the top is the cell with most compute."""
    tokens = np.log([float(at.tokens) for at in (*cells, *places)])
    compute = np.log([float(at.flops) for at in (*cells, *places)])
    top = int(np.argmax(compute[: len(cells)]))
    size = compute - tokens
    sizes, budgets = _sides(cells)
    return Layout(
        kind_of(cells), len(cells), sizes, budgets, size - size[top], tokens - tokens[top], tokens_share(cells),
        unvaried(cells), scatter_power,
    )  # fmt: skip


def kind_of(cells: Sequence[HasPlace]) -> Kind:
    """A path has one budget for each size, or one size, or one budget; everything else is a grid."""
    sizes, _ = _sides(cells)
    return "path" if sizes == len(cells) or unvaried(cells) else "grid"


def tokens_share(cells: Sequence[HasPlace]) -> float:
    """The share of compute that goes into tokens as a path grows; half of it on a grid, which has no one direction."""
    same = unvaried(cells)
    if len(same) == 1:
        return 1.0 if same == ("size",) else 0.0
    bottom, top = (choose(cells, key=lambda at: at.flops) for choose in (min, max))
    size, tokens = math.log(top.parameters / bottom.parameters), math.log(top.tokens / bottom.tokens)
    if kind_of(cells) == "grid" or size + tokens < math.log(SAME):
        return 0.5
    return min(max(tokens / (size + tokens), 0.0), 1.0)


def unvaried(cells: Sequence[HasPlace]) -> tuple[Side, ...]:
    """Whether all cells have one size, or one budget, or both."""
    sides: dict[Side, list[int]] = {"size": [at.parameters for at in cells], "tokens": [at.tokens for at in cells]}
    return tuple(side for side, own in sides.items() if max(own) <= SAME * min(own))


def _sides(cells: Sequence[HasPlace]) -> tuple[int, int]:
    """Numbers of sizes and of budgets.

    By parameters: FLOPs per token of one size differ from cell to cell where a table has rounded or measured FLOPs.
    """
    return len({at.parameters for at in cells}), len({at.tokens for at in cells})
