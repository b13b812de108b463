"""Build examples/normlab_tour.ipynb from the cells of docs/tour.py, and execute it. `make notebook`."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "docs" / "tour.py"
NOTEBOOK = ROOT / "examples" / "normlab_tour.ipynb"
MARK = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)
LARGEST = 1_000_000
"""Bytes: a notebook that is opened at once."""


def cells(source: str) -> list[tuple[str, str]]:
    """Kind (markdown, code) and text of every cell of a script with `# %%` lines.

    What stands before the first such line is for readers of the script.
    """
    _, *parts = MARK.split(source)
    kinds = ["markdown" if mark else "code" for mark in parts[::2]]
    return [(kind, _plain(kind, text)) for kind, text in zip(kinds, parts[1::2], strict=True)]


def _plain(kind: str, text: str) -> str:
    """A cell's text; of Markdown without the comment signs."""
    lines = text.strip("\n").splitlines()
    return "\n".join(re.sub("^# ?", "", line) for line in lines) if kind == "markdown" else "\n".join(lines)


def executed() -> dict[str, Any]:
    """The notebook with its outputs."""
    import nbformat  # pyright: ignore[reportMissingImports]  # an extra of its own
    from nbclient import NotebookClient  # pyright: ignore[reportMissingImports]

    book = nbformat.v4.new_notebook()
    for number, (kind, text) in enumerate(cells(SOURCE.read_text("utf-8"))):
        cell = nbformat.v4.new_markdown_cell(text) if kind == "markdown" else nbformat.v4.new_code_cell(text)
        cell["id"] = f"cell-{number}"  # a random one would change with every build
        book.cells.append(cell)
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    os.environ.setdefault("COLUMNS", "120")
    NotebookClient(book, timeout=900, kernel_name="python3").execute()
    return json.loads(nbformat.writes(book))


def tidy(book: dict[str, Any]) -> dict[str, Any]:
    """Without what changes from run to run and says nothing: times, and the version of the machine's Python."""
    book["metadata"] = {"kernelspec": book["metadata"]["kernelspec"], "language_info": {"name": "python"}}
    for cell in book["cells"]:
        cell["metadata"] = {}
    return book


def main() -> None:
    text = json.dumps(tidy(executed()), indent=1, ensure_ascii=False) + "\n"
    if len(text.encode()) > LARGEST:
        sys.exit(f"{NOTEBOOK.name} has {len(text.encode()):,} bytes; expected at most {LARGEST:,}: smaller figures")
    NOTEBOOK.write_text(text, "utf-8")
    print(f"{NOTEBOOK.relative_to(ROOT)}: {len(text.encode()):,} bytes")


if __name__ == "__main__":
    main()
