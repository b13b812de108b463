"""Stored scores: one JSON file, written atomically after every run × task, so that an evaluation can go on.

{"normlab_evaluation": 1, "results": [{"key", "run", "weights", "task", "settings", "scores", "command", "versions",
"date"}]}. The key is a hash of weights, task and settings: the same question is not asked twice.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from normlab.errors import NormLabError
from normlab.evaluation.score import Score
from normlab.utils.files import read_json, write_json

_FORMAT = 1


def key_of(identity: str, facts: Mapping[str, Any]) -> str:
    """The key of the scores of a model on a task."""
    return hashlib.sha256(json.dumps([identity, facts], sort_keys=True).encode()).hexdigest()[:24]


class Store:
    """The results in a file; those of other calls stay."""

    def __init__(self, path: Path):
        self.path = path
        self._rows: dict[str, dict[str, Any]] = {row["key"]: row for row in _read(path)}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All results, in the order in which they were made."""
        return list(self._rows.values())

    def get(self, key: str) -> dict[str, Any] | None:
        """The row of a key, if it was evaluated."""
        return self._rows.get(key)

    def rename(self, key: str, task: str) -> dict[str, Any]:
        """The row of a key under the newest name of its questions, which the file then has, too.

        Their file may have been renamed or copied.
        """
        row = self._rows[key]
        if row.get("task") == task:
            return row
        scores = [score | {"task": task} if score["task"] == row.get("task") else score for score in row["scores"]]
        self._rows[key] = row | {"task": task, "scores": scores}
        self._write()
        return self._rows[key]

    def add(self, key: str, scores: Sequence[Score], **facts: Any) -> dict[str, Any]:
        """Add a row and write the file."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        row = {"key": key, **facts, "scores": [dataclasses.asdict(score) for score in scores], "date": date}
        self._rows[key] = row
        self._write()
        return row

    def _write(self) -> None:
        write_json(self.path, {"normlab_evaluation": _FORMAT, "results": self.rows})


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = read_json(path)
    if not isinstance(found, dict) or found.get("normlab_evaluation") != _FORMAT:
        raise NormLabError(f"{path} holds something that this normlab eval did not write; choose another --out")
    rows = found.get("results")
    if not isinstance(rows, list):
        raise NormLabError(f"{path}: results must be a list, got {rows!r:.60}; restore the file, or remove it")
    for number, row in enumerate(rows, start=1):
        if wrong := _fault(row):
            raise NormLabError(f"{path}: result {number}: {wrong}; restore the file, or remove it")
    return rows


def _fault(row: Any) -> str | None:
    """What is wrong with a stored result, if anything is: of a file that was edited, or merged by hand."""
    if not isinstance(row, dict):
        return f"expected a table, got {row!r:.60}"
    wrong = _wrong(row, {"key": str, "run": str, "settings": dict, "scores": list})
    scores = () if wrong else row["scores"]
    return wrong or next((f"a score {fault}" for score in scores if (fault := _fault_of_score(score))), None)


def _fault_of_score(score: Any) -> str | None:
    if not isinstance(score, dict):
        return f"must be a table, got {score!r:.60}"
    return _wrong(score, {"task": str, "metric": str, "value": (int, float)})


def _wrong(table: Mapping[str, Any], kinds: Mapping[str, type | tuple[type, ...]]) -> str | None:
    """The first field of a table that is missing or of another kind."""
    name = next((name for name, kind in kinds.items() if not isinstance(table.get(name), kind)), None)
    return None if name is None else f"has no valid {name!r} ({table.get(name)!r:.60})"
