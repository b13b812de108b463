"""Scores as a table on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_COLUMNS = ("run", "task", "metric", "score", "standard error", "samples")


def print_rows(rows: Sequence[dict[str, Any]], console: Console | None = None) -> None:
    """Print one line per run, task and metric."""
    table = Table(pad_edge=False)
    for number, column in enumerate(_COLUMNS):
        table.add_column(column, overflow="fold", justify="right" if number > 2 else "left")
    for row in rows:
        for score in row["scores"]:
            stderr = "–" if score["stderr"] is None else f"{score['stderr']:.4f}"
            samples = "–" if score["samples"] is None else f"{score['samples']:,}"
            cells = (row["run"], score["task"], score["metric"], f"{score['value']:.4f}", stderr, samples)
            table.add_row(*(Text(_printable(cell)) for cell in cells))
    (console or Console()).print(table)


def _printable(text: str) -> str:
    """Without control characters, which a terminal would obey."""
    return "".join(character if character.isprintable() else "�" for character in text)
