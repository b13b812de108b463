"""Runs as a table on a terminal: `normlab watch DIR --once`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from normlab.utils.text import printable
from normlab.watch.fitting import TextColumn, fit, wrap
from normlab.watch.status import TROUBLE
from normlab.watch.view import RunLine

_ORDER = ("run", "state", "step", "left", "loss", "validation", "scores", "tokens/s", "last line", "alarms")
"""Columns from left to right."""


def print_lines(lines: Sequence[RunLine], console: Console | None = None) -> None:
    """Print the table, and below it the columns without room and the reason of every run in trouble."""
    console = console or Console()
    columns = _columns(lines)
    widths = fit(columns, console.width)
    console.print(_table(sorted(columns, key=lambda column: _ORDER.index(column.title)), widths, lines))
    if left_out := [column.title for column in columns if column.title not in widths]:
        console.print(f"No room for: {', '.join(left_out)}. A wider terminal shows more.", highlight=False)
    for line in lines:
        if line.status.reason:
            said = printable(f"{line.name}: {line.status.reason}")
            console.print(said, markup=False, highlight=False, soft_wrap=True)


def _columns(lines: Sequence[RunLine]) -> list[TextColumn]:
    """Columns with text, the most important first."""
    found = [
        TextColumn("run", [printable(line.name) for line in lines], lines=4),
        TextColumn("state", [printable(line.status.words) for line in lines], lines=2),
        TextColumn("step", [line.progress for line in lines]),
        TextColumn("loss", [line.loss for line in lines]),
        TextColumn("alarms", [line.alarms for line in lines], lines=2),
        TextColumn("validation", [line.validation for line in lines]),
        TextColumn("left", [line.left.removesuffix(" left") for line in lines]),
        TextColumn("last line", [line.quiet for line in lines]),
        TextColumn("tokens/s", [line.speed for line in lines]),
        TextColumn("scores", [line.also for line in lines], lines=2),
    ]
    return [column for column in found if any(column.texts)]


def _table(columns: Sequence[TextColumn], widths: dict[str, int], lines: Sequence[RunLine]) -> Table:
    shown = [column for column in columns if column.title in widths]
    table = Table(pad_edge=False)
    for column in shown:
        table.add_column(column.title, width=widths[column.title], overflow="fold")
    for k, line in enumerate(lines):
        style = "red" if line.status.state in TROUBLE else ""
        texts = [(column.title, wrap(column.texts[k], widths[column.title])) for column in shown]
        table.add_row(*(Text(text, style=style if title == "state" else "") for title, text in texts))
    return table
