"""Terminal output of a comparison: ranking, cautions and headline."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from normlab.compare.report.results import load_results
from normlab.compare.report.tables import ranking_table
from normlab.compare.report.verdict import verdict

_PLAIN_WIDTH = 160
"""Width of the output if it is not a terminal; lines of a file need no wrapping."""


def print_ranking(folder: str | Path, console: Console | None = None) -> None:
    """Print the ranking, the cautions and the headline of a comparison."""
    results = load_results(folder)
    words = verdict(results)
    console = console or _console()
    if results.standings:
        source = ranking_table(results)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in source.columns:
            table.add_column(column.title, justify="right" if column.numeric else "left")
        for row in source.rows:
            table.add_row(*(Text(cell.text) for cell in row))
        console.print(table)
    for line in words.cautions:
        console.print(Text(f"- {line}"))
    console.print(Text(words.headline, style="bold"))


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)
