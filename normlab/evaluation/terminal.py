"""Scores as a table on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from normlab.utils.text import printable

_COLUMNS = ("run", "task", "metric", "score", "standard error", "samples")

_OF_GROUPS = ("by group", "groups")
"""Standard error over groups, where a task has them."""


def print_rows(rows: Sequence[dict[str, Any]], console: Console | None = None) -> None:
    """Print one line per run, task and metric."""
    table = Table(pad_edge=False)
    grouped = any(score.get("groups") for row in rows for score in row["scores"])
    for number, column in enumerate((*_COLUMNS, *(_OF_GROUPS if grouped else ()))):
        table.add_column(column, overflow="fold", justify="right" if number > 2 else "left")
    for row in rows:
        for score in row["scores"]:
            samples = "–" if score["samples"] is None else f"{score['samples']:,}"
            cells = (
                row["run"],
                score["task"],
                score["metric"],
                f"{score['value']:.4f}",
                _error(score["stderr"]),
                samples,
            )
            cells += (_error(score.get("group_stderr")), f"{len(score.get('groups') or ()) or '–'}") if grouped else ()
            table.add_row(*(Text(printable(cell)) for cell in cells))
    (console or Console()).print(table)


def _error(stderr: float | None) -> str:
    return "–" if stderr is None else f"{stderr:.4f}"
