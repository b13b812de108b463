"""Cells of a ladder as arms: the rows of every size and budget are an arm of their own.

12x768,118M           runs that are judged at this size and budget
rates,4x256,29.5M     runs that found a learning rate there
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from normlab.errors import NormLabError
from normlab.pages.numbers import format_count

Row = Mapping[str, Any]

RATES = "rates,"
"""Begins the names of the arms whose rows found learning rates."""


def cell_name(size: str, budget: int) -> str:
    """Name of a size and budget as an arm."""
    return f"{size},{format_count(budget)}"


def by_cell(rows: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """The same rows, with the arm of a ladder cut into its cells."""
    ladders = [arm for arm, own in rows.items() if any(_is_cell(row) for row in own)]
    if len(ladders) > 1:
        raise NormLabError(f"a study has one ladder, whose cells are its arms; got {' and '.join(ladders)}")
    found: dict[str, list[Row]] = {}
    for arm, own in rows.items():
        for row in own:
            name = _cell_of(row) if _is_cell(row) else arm
            found.setdefault(name, []).append({**row, "arm": name})
    return found


def _is_cell(row: Row) -> bool:
    return "size" in row and "budget" in row


def _cell_of(row: Row) -> str:
    if not isinstance(row["budget"], int):
        raise NormLabError(f"the budget of a ladder's row is a whole number, got {row['budget']!r} in {row['run']}")
    name = cell_name(str(row["size"]), row["budget"])
    return f"{RATES}{name}" if row.get("role") in ("tune", "confirm") else name
