"""Table, Column and Cell: tables for HTML pages and Markdown, with text to show and values to sort by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from normlab.pages.numbers import NONE, finite_or_none


@dataclass(frozen=True)
class Cell:
    """Text, its sort key (a number, or the text itself), and its style on the page."""

    text: str
    sort: float | str | None = None
    tone: str = ""
    scheme: int | None = None
    """Position of the scheme whose colour is shown beside the text."""

    whole: bool = False
    """Whether the text must not wrap."""


@dataclass(frozen=True)
class Column:
    title: str
    numeric: bool = False


def columns(*titles: str) -> list[Column]:
    """Columns from titles; a title that ends in # marks a numeric column."""
    return [Column(title.removesuffix("#"), title.endswith("#")) for title in titles]


@dataclass(frozen=True)
class Table:
    """A caption, columns and rows; `sortable` adds a sort button to every heading of the page."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    sortable: bool = True
    note: str = ""

    def filled(self) -> Table:
        """A copy without empty columns."""
        kept = [k for k in range(len(self.columns)) if any(row[k].text not in ("", NONE) for row in self.rows)]
        rows = [[row[k] for k in kept] for row in self.rows]
        return replace(self, columns=[self.columns[k] for k in kept], rows=rows) if self.rows else self


def numeric_cell(text: str, value: Any) -> Cell:
    """A cell with a formatted number that sorts by its value."""
    return Cell(text, finite_or_none(value))


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested dictionaries to `outer.inner` keys, with values as text."""
    found: dict[str, str] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return found
