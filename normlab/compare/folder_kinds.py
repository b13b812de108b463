"""Kinds of folders of results: two of them in one folder would share its rows and its page."""

from __future__ import annotations

from pathlib import Path

from normlab.errors import NormLabError

KINDS = {
    "compare.json": "a comparison",
    "ladder.json": "a ladder that was trained here",
    "table.json": "the answer from a table of losses",
}
"""The file by which each kind is known, and what such a folder holds."""


def refuse_another_kind(folder: Path, own: str) -> None:
    """Raise if a folder holds results of another kind than that of the file `own`."""
    other = next((what for file, what in KINDS.items() if file != own and (folder / file).is_file()), None)
    if other is not None:
        raise NormLabError(f"{folder} holds {other}; choose another --out, or remove this folder")
