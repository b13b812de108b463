"""Fit a table to the width of a terminal: words and numbers stay whole, columns that do not fit are left out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

BORDER = 3
"""Characters that a column takes besides its text."""


@dataclass(frozen=True)
class TextColumn:
    """A column of a table, one text for each row."""

    title: str
    texts: Sequence[str]
    lines: int = 1
    """In how many lines a text may be written, broken between words."""

    @property
    def widest(self) -> int:
        return max(map(cell_len, (self.title, *self.texts)))

    @property
    def narrowest(self) -> int:
        """The width below which a word would be broken, or a text would take more lines."""
        least = max(cell_len(piece.strip()) for text in (self.title, *self.texts) for piece in pieces(text))
        return next(width for width in range(least, self.widest + 1) if self._fits(width))

    def _fits(self, width: int) -> bool:
        return all(wrap(text, width).count("\n") < self.lines for text in self.texts)


def fit(columns: Sequence[TextColumn], room: int) -> dict[str, int]:
    """Widths of the columns that have room, by title. `columns`: the most important first; the first two always stay.

    What is left over goes to columns that wrap, first to those that need least to be one line a row.
    """
    widths: dict[str, int] = {}
    for place, column in enumerate(columns):
        # A word of a run's name may be longer than any table can show; it is broken.
        least = min(column.narrowest, max(room // 3, cell_len(column.title)))
        if place < 2 or least <= _left(widths, room) - BORDER:
            widths[column.title] = least
    kept = [column for column in columns if column.title in widths]
    for column in sorted(kept, key=lambda column: column.widest - widths[column.title]):
        widths[column.title] += max(0, min(column.widest - widths[column.title], _left(widths, room)))
    return widths


def _left(widths: dict[str, int], room: int) -> int:
    return room - sum(width + BORDER for width in widths.values())


def pieces(text: str) -> list[str]:
    """Words, and the parts of a name: it may be broken after a slash, comma or dash, but not within 1e-3."""
    return re.split(r"(?<=\s)(?=\S)|(?<=[/,-])(?=[^\d\s])", text)


def wrap(text: str, width: int) -> str:
    """The text with line breaks between pieces."""
    lines = [""]
    for piece in pieces(text):
        if lines[-1] and cell_len((lines[-1] + piece).rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)
