"""Results of one command in a folder, known by the file that describes them."""

from __future__ import annotations

from pathlib import Path

from normlab.errors import NormLabError

RUN, COMPARISON, LADDER, TABLE = "config.json", "compare.json", "ladder.json", "table.json"
"""The file that describes what a folder holds."""

_KINDS = {
    RUN: "a run or a model",
    COMPARISON: "a comparison",
    LADDER: "a ladder",
    TABLE: "the answer from a table of losses",
}


def refuse_other_results(folder: Path, own: str) -> None:
    """Raise if the folder holds what another command wrote: rows and pages of both would be mixed."""
    for file, kind in _KINDS.items():
        if file != own and (folder / file).is_file():
            raise NormLabError(f"{folder} holds {kind} ({file}); choose another folder with --out")
