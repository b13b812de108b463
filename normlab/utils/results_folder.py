"""Results of one command in a folder: a run, a comparison or a ladder, named by the file that describes it."""

from __future__ import annotations

from pathlib import Path

from normlab.errors import NormLabError

RUN, COMPARISON, LADDER = "config.json", "compare.json", "ladder.json"
"""The file that describes what a folder holds."""

_KINDS = {RUN: "a run or a model", COMPARISON: "a comparison", LADDER: "a ladder"}


def refuse_other_results(folder: Path, own: str) -> None:
    """Raise if the folder holds what another command wrote: the rows and reports of both would be mixed."""
    for file, kind in _KINDS.items():
        if file != own and (folder / file).is_file():
            raise NormLabError(f"{folder} holds {kind} ({file}); choose another folder with --out")
