"""Markdown: tables in the pipe syntax, and text from users escaped."""

from __future__ import annotations

import html

from normlab.pages.tables import Table


def table(source: Table) -> str:
    """A table in pipe syntax; numeric columns are right-aligned."""
    heads = [escape(column.title) for column in source.columns]
    rules = ["---:" if column.numeric else "---" for column in source.columns]
    rows = [[escape(cell.text) for cell in row] for row in source.rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [heads, rules, *rows])


def escape(text: str) -> str:
    """Escape user text: no HTML, table cells, line breaks, emphasis, links or code."""
    flat = " ".join(html.escape(text, quote=False).split())
    return "".join(f"\\{character}" if character in "\\|`*_[]~#" else character for character in flat)
