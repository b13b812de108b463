"""Coordinates of a ladder's cells and of places beyond it, in e-folds relative to the top cell.

Size is measured by FLOPs per token, so that ln C = size + tokens holds exactly, attention and head included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

Array = np.ndarray
Kind = Literal["path", "grid"]


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

    @property
    def compute(self) -> Array:
        return self.size + self.tokens

    @property
    def ratio(self) -> Array:
        """Tokens per parameter."""
        return self.tokens - self.size

    @property
    def span(self) -> float:
        """Largest compute of a cell over the smallest."""
        own = self.compute[: self.cells]
        return float(np.exp(own.max() - own.min())) if self.cells else 1.0


def layout_of(cells: Sequence[HasPlace], places: Sequence[HasPlace] = ()) -> Layout:
    """The layout of cells and places; the top is the cell with most compute."""
    tokens = np.log([float(at.tokens) for at in (*cells, *places)])
    compute = np.log([float(at.flops) for at in (*cells, *places)])
    top = int(np.argmax(compute[: len(cells)]))
    size = compute - tokens
    sizes, budgets = _sides(cells)
    return Layout(kind_of(cells), len(cells), sizes, budgets, size - size[top], tokens - tokens[top])


def kind_of(cells: Sequence[HasPlace]) -> Kind:
    """A path has one budget for each size, or one size, or one budget; everything else is a grid."""
    sizes, budgets = _sides(cells)
    return "path" if sizes in (1, len(cells)) or budgets == 1 else "grid"


def _sides(cells: Sequence[HasPlace]) -> tuple[int, int]:
    """Numbers of sizes and of budgets.

    By parameters: FLOPs per token of one size differ from cell to cell where a table has rounded or measured FLOPs.
    """
    return len({at.parameters for at in cells}), len({at.tokens for at in cells})
