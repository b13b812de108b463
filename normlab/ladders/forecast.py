"""forecast.json: the forecast of the held-out size, written before its first run begins; its runs carry its hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from normlab.errors import NormLabError
from normlab.ladders.rows import LadderRow
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
    cells: list[CellForecast] = field(default_factory=list)
    reason: str | None = None
    """Why there is no forecast, where the smaller sizes allow none."""
    hash: str = ""

    def signed(self) -> StoredForecast:
        """The forecast with the hash of its content."""
        return replace(self, hash=self._content_hash())

    def _content_hash(self) -> str:
        content = {name: value for name, value in to_plain(self).items() if name != "hash"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def check(self, path: Path) -> None:
        """Raise if the content was changed after it was written."""
        if self.hash != self._content_hash():
            raise NormLabError(f"{path} was changed after it was written; restore it")


def hash_of_rows(rows: Sequence[LadderRow]) -> str:
    """Hash of the losses that a forecast is made from; their order does not matter."""
    lines = sorted(f"{row.scheme} {row.size} {row.tokens} {row.seed} {row.state} {row.loss!r}" for row in rows)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def write_forecast(folder: Path, forecast: StoredForecast) -> None:
    """Write forecast.json; never over another one."""
    path = folder / FILE
    if path.exists():
        raise NormLabError(f"{path} exists already; a forecast is never written twice")
    write_json(path, to_plain(forecast))


def read_forecast(folder: Path) -> StoredForecast | None:
    """The stored forecast of a ladder's folder; None if there is none yet."""
    path = folder / FILE
    if not path.is_file():
        return None
    record: Any = read_json(path)
    found = from_plain(StoredForecast, record, str(path))
    found.check(path)
    return found


def refuse_lost_forecast(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Raise if stored rows carry the hash of a forecast that is not there: another one would come after its results."""
    known = next((row["forecast"] for row in rows if row.get("forecast")), None)
    if known is not None:
        raise NormLabError(f"{folder / FILE} is missing, but rows were run after the forecast {known}; restore it")


def check_rows_follow(
    rows: Sequence[LadderRow], forecast: StoredForecast | None, path: Path, held_out: str | None = None
) -> None:
    """Raise if a row of the held-out size has no forecast, began before it, or carries another one's hash."""
    for row in rows:
        if row.size != (forecast.size if forecast is not None else held_out):
            continue
        name = f"{row.scheme}, {row.size}, {row.tokens:,} tokens, seed {row.seed}"
        if forecast is None:
            raise NormLabError(f"{path}: the row of {name} has no {FILE} that it was forecast in; restore that file")
        if row.forecast != forecast.hash:
            raise NormLabError(
                f"{path}: the row of {name} carries the hash {row.forecast}, not that of the forecast "
                f"({forecast.hash}); restore forecast.json or remove the row"
            )
        if row.started is not None and row.started < forecast.written:
            raise NormLabError(f"{path}: {name} began before the forecast was written; remove the row")
