"""The generated parts of docs/architecture.md: the drawing of the packages, and every module with its first line.

The drawing is made from the layers that import-linter enforces (pyproject.toml), so it cannot differ from them.
"""

from __future__ import annotations

import ast
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "normlab"
BEGIN, END = "<!-- modules: begin (make docs) -->", "<!-- modules: end -->"
SEPARATORS = (" | ", " : ")
OLD_NAMES = {"stability", "report"}
"""Modules that only forward names of version 0.1."""

WIDTH, ROW, GAP = 760, 46, 10


def layers() -> list[list[str]]:
    """Packages and modules, the highest layer first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    found = next(contract["layers"] for contract in contracts if contract["name"] == "packages")
    rows = [layer.replace(" : ", " | ").split(" | ") for layer in found]
    kept = [[name for name in row if name not in OLD_NAMES and not name.startswith("__")] for row in rows]
    return [row for row in kept if row]


def drawing() -> str:
    """The layers as an SVG: a row each, imports go down."""
    rows = layers()
    height = len(rows) * (ROW + GAP) + GAP
    boxes = [_box(name, k, place, len(row)) for k, row in enumerate(rows) for place, name in enumerate(row)]
    arrow = (
        f'<path d="M {WIDTH + 28} {GAP} V {height - 2 * GAP}" class="line"/>'
        f'<path d="M {WIDTH + 22} {height - 2 * GAP} h 12 l -6 9 z" class="head"/>'
        f'<text x="{WIDTH + 46}" y="{height / 2}" transform="rotate(90 {WIDTH + 46} {height / 2})" class="note">'
        "imports go down only</text>"
    )
    style = (
        "rect{fill:#eef3f8;stroke:#5b7a99}text{font:15px sans-serif;fill:#1d2b38;text-anchor:middle}"
        ".note{font-size:13px;fill:#5b6b7a}.line{stroke:#5b7a99;stroke-width:2;fill:none}.head{fill:#5b7a99}"
        "@media(prefers-color-scheme:dark){rect{fill:#22303d;stroke:#7f9db9}text{fill:#e6edf3}.note{fill:#a9b8c6}}"
    )
    size = f'viewBox="0 0 {WIDTH + 60} {height}" width="{WIDTH + 60}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{"".join(boxes)}{arrow}</svg>\n'


def _box(name: str, row: int, place: int, count: int) -> str:
    width = (WIDTH - GAP * (count - 1)) / count
    x, y = place * (width + GAP), GAP + row * (ROW + GAP)
    label = name if (PACKAGE / name).is_dir() else f"{name}.py"
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" rx="6"/>'
        f'<text x="{x + width / 2:.1f}" y="{y + ROW / 2 + 5}">{escape(label)}</text>'
    )


def modules() -> str:
    """Every package with its modules, each with the first line of its docstring."""
    parts = [_package(PACKAGE)]
    parts += [_package(path) for path in sorted(PACKAGE.rglob("*")) if (path / "__init__.py").is_file()]
    return "\n\n".join(parts)


def _package(folder: Path) -> str:
    lines = [f"- `{path.name}`: {_first_line(path)}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
    name = folder.relative_to(ROOT).as_posix()
    return "\n".join([f"### {name}/", "", _first_line(folder / "__init__.py"), "", *lines]).rstrip()


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return text.partition("\n\n")[0].replace("\n", " ")
