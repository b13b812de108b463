"""The results file of a benchmark: JSON with command, hardware and versions, also while it is incomplete."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from normlab.bench.facts import dated, facts
from normlab.errors import NormLabError
from normlab.utils.files import write_json


def check_writable(out: Path | None) -> None:
    """Raise if results cannot be written to `out`; called before anything is measured."""
    if out is None:
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise NormLabError(f"cannot write to {out.parent}: {error.strerror}; name another file with --out") from None
    if out.is_dir():
        raise NormLabError(f"{out} is a folder; expected a file, e.g. {out / 'figures.json'}")


def keep(out: Path | None, rows: list[dict[str, Any]], *packages: str, complete: bool, **more: Any) -> None:
    """Write the results atomically, also incomplete ones, so that an interrupted benchmark loses nothing."""
    if out is None:
        return
    write_json(out, {**dated(*packages), **more, "complete": complete, "rows": rows})
    if complete:
        print(f"figures in {out}")


def kept(out: Path | None) -> list[dict[str, Any]]:
    """Rows of an interrupted benchmark with the same command, hardware and versions."""
    if out is None or not out.exists():
        return []
    try:
        before = json.loads(out.read_text())
        same = not before["complete"] and all(before.get(name) == value for name, value in facts().items())
        return before["rows"] if same else []
    except (ValueError, KeyError, TypeError):
        # Another or an older file: measure again.
        return []
