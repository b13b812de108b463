"""A Jupyter notebook as a page of the site: text, code, and the outputs that it was executed with."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any


def as_markdown(notebook: Path, page: Path) -> str:
    """The notebook in Markdown. Pictures are written beside the page."""
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    parts: list[str] = []
    for number, cell in enumerate(cells):
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            parts += _output(output, page.with_name(f"{page.stem}-{number}.png"))
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any], picture: Path) -> list[str]:
    data = output.get("data", {})
    if "image/png" in data:
        picture.write_bytes(base64.b64decode("".join(data["image/png"])))
        # An HTML tag: links in Markdown are those of the repository, and this file is not there.
        return [f'<img src="{picture.name}" alt="output of the cell above">']
    text = "".join(output.get("text", data.get("text/plain", [])))
    return [f"```text\n{text.rstrip()}\n```"] if text.strip() else []
