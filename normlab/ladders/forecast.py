"""forecast.json: the forecast of the held-out size, written before its first run begins; its runs carry its hash.

Schemes that are added to a ladder later have a forecast of their own, written before their first run at that size:
forecast-2.json, and so on.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from normlab.errors import NormLabError
from normlab.ladders.statistics.answer import CellForecast
from normlab.utils.files import read_json, write_json
from normlab.utils.records import from_plain, to_plain

FILE = "forecast.json"


@dataclass(frozen=True, kw_only=True)
class StoredForecast:
    """A forecast with its date and what it was made from."""

    written: str
    """Date and time in ISO format."""
    commit: str | None
    versions: dict[str, str]
    baseline: str
    level: float
    size: str
    """The held-out size."""
    made_from: str
    """Hash of the rows that it was made from."""
    rows: int
    """Number of those rows."""
    losses: dict[str, float | None] | None = None
    """The losses of those rows by name; None in files of versions that stored their hash alone."""
    schemes: list[str] = field(default_factory=list)
    """Schemes whose runs may begin once it is written; empty in files of versions that had one forecast a ladder."""
    cells: list[CellForecast] = field(default_factory=list)
    without: dict[str, str] = field(default_factory=dict)
    """Schemes that could not be forecast, with the reason."""
    reason: str | None = None
    """Why there is no forecast at all, where the smaller sizes allow none."""
    hash: str = ""

    @property
    def covered(self) -> set[str]:
        """Schemes whose rows carry its hash."""
        return set(self.schemes) or {self.baseline, *(cell.scheme for cell in self.cells)}

    def signed(self) -> StoredForecast:
        """The forecast with the hash of its content."""
        return replace(self, hash=_content_hash(to_plain(self)))


def write_forecast(folder: Path, forecast: StoredForecast) -> Path:
    """Write a forecast beside those that are there, never a second one of a scheme; return its path."""
    there = read_forecasts(folder)
    known = {scheme for one in there for scheme in one.covered}
    if twice := sorted(forecast.covered & known):
        raise NormLabError(f"{folder} has a forecast of {', '.join(twice)} already; one is never written twice")
    path = folder / file_name(len(there) + 1)
    write_json(path, to_plain(forecast))
    return path


def read_forecasts(folder: Path) -> list[StoredForecast]:
    """The forecasts of a ladder's folder in the order in which they were written; raises if one was changed."""
    paths = (folder / file_name(number) for number in itertools.count(1))
    return [_read(path) for path in itertools.takewhile(Path.is_file, paths)]


def file_name(number: int) -> str:
    """The name of a forecast's file, counted from 1."""
    return FILE if number == 1 else f"forecast-{number}.json"


def hash_by_scheme(forecasts: Sequence[StoredForecast], rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The hash that the runs of each scheme carry at the held-out size.

    A scheme that was trained there without a forecast, as older versions did, keeps the hash that its rows have: a
    forecast now would come after its results.
    """
    carried = {row["scheme"]: row["forecast"] for row in rows if row.get("forecast")}
    return carried | {scheme: one.hash for one in forecasts for scheme in one.covered}


def _read(path: Path) -> StoredForecast:
    record: Any = read_json(path)
    found = from_plain(StoredForecast, record, str(path))
    # Of the file, not of the object: fields that a later version adds are no part of an older file's hash.
    if found.hash != _content_hash(record):
        raise NormLabError(f"{path} was changed after it was written; restore it")
    return found


def _content_hash(record: Mapping[str, Any]) -> str:
    content = {name: value for name, value in record.items() if name != "hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
