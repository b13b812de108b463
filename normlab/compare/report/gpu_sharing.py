"""Find runs that shared a GPU with another run: their speed is not representative."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

Row = Mapping[str, Any]


def runs_sharing_gpu(rows: Iterable[tuple[str, Row]]) -> set[str]:
    """Names of runs that overlapped in time with another run on the same GPU, from names and rows of runs."""
    timed = [(name, gpu, times) for name, row in rows if (gpu := _gpu(row)) and (times := _times(row))]
    return {
        name
        for name, gpu, (begin, end) in timed
        for other, same, (from_, to) in timed
        if other != name and same == gpu and from_ < end and begin < to
    }


def _gpu(row: Row) -> str | None:
    """Identifier of the GPU, or its model name if the row lacks one; only GPU runs record peak memory."""
    return row.get("gpu") or (row.get("device") if row.get("peak_bytes") is not None else None)


def _times(row: Row) -> tuple[datetime, datetime] | None:
    try:
        return datetime.fromisoformat(row["started"]), datetime.fromisoformat(row["finished"])
    except (KeyError, TypeError, ValueError):
        return None
