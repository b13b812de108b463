"""Find the runs in a folder: a run, a comparison, a ladder, or any folder that holds some."""

from __future__ import annotations

import os
from pathlib import Path

from normlab.errors import NormLabError
from normlab.utils.text import counted

LOGS = ("metrics.jsonl", "profiles.jsonl")
"""Files of records: of `normlab train`, and of `normlab.checks.Watch`."""

MOST_RUNS = 500
_DEPTH = 6
"""Folders below the given one that are searched."""
_SKIPPED = ("checkpoints", "branches", "trouble", "tensorboard", "wandb", "node_modules", "__pycache__")


def find_runs(root: Path) -> dict[str, Path]:
    """Folders of runs by name, the path below their common folder; at most `MOST_RUNS`. Links are not followed."""
    found: list[Path] = []
    folders = [(root, 0)]
    while folders and len(found) < MOST_RUNS:
        folder, depth = folders.pop()
        names, inner = _entries(folder)
        if is_run := bool(names & set(LOGS)) or {"config.json", "status.json"} <= names:
            found.append(folder)
        # The folder of a run holds no other runs; a plain loop's profiles may lie beside some.
        if depth < _DEPTH and not (is_run and "config.json" in names):
            folders += [(folder / name, depth + 1) for name in sorted(inner, reverse=True)]
    return _named(root, sorted(found))


def check_folder(root: Path) -> dict[str, Path]:
    """The runs in a folder; raises if there is no such folder or no run in it."""
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise NormLabError(f"{root} {what}; expected the folder of a run, a comparison or a ladder")
    found = find_runs(root)
    if not found:
        raise NormLabError(
            f"{root} holds no runs, {counted(_DEPTH, 'level')} deep; expected folders of normlab train, compare or "
            f"ladder, or a {LOGS[1]} of normlab.checks.Watch"
        )
    return found


def _entries(folder: Path) -> tuple[set[str], list[str]]:
    """Names of the files in a folder, and of the folders to search."""
    try:
        with os.scandir(folder) as found:
            entries = list(found)
        files = {entry.name for entry in entries if entry.is_file()}
        folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        # Removed meanwhile, or not ours to read.
        return set(), []
    return files, [name for name in folders if name not in _SKIPPED and not name.startswith(".")]


def _named(root: Path, found: list[Path]) -> dict[str, Path]:
    if not found:
        return {}
    common = Path(os.path.commonpath([path.parent if path != root else path for path in found]))
    return {path.relative_to(common).as_posix() if path != common else _own_name(path): path for path in found}


def _own_name(path: Path) -> str:
    return path.resolve().name or str(path)
