"""Runs as a table on a terminal: `normlab watch DIR --once`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from normlab.watch.status import TROUBLE
from normlab.watch.view import RunLine

_COLUMNS = ("run", "state", "step", "loss", "validation", "tokens/s", "last line", "alarms")


def print_lines(lines: Sequence[RunLine], console: Console | None = None) -> None:
    """Print the table, and below it the reason of every run in trouble."""
    console = console or Console()
    table = Table(pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, overflow="fold")
    for line in lines:
        style = "red" if line.status.state in TROUBLE else ""
        step = f"{line.progress}, {line.left}" if line.left else line.progress
        scores = f"{line.validation}, {line.also}" if line.also else line.validation
        cells = (line.name, line.status.words, step, line.loss, scores, line.speed, line.quiet, line.alarms)
        table.add_row(*(Text(_printable(cell), style=style if k == 1 else "") for k, cell in enumerate(cells)))
    console.print(table)
    for line in lines:
        if line.status.reason:
            said = _printable(f"{line.name}: {line.status.reason}")
            console.print(said, markup=False, highlight=False, soft_wrap=True)


def _printable(text: str) -> str:
    """Text of a run without control characters, which a terminal would obey."""
    return "".join(character if character.isprintable() else "�" for character in text)
