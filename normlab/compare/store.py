"""Result store (rows.jsonl): one line of JSON for every run that ended; append-only, safe for many processes."""

from __future__ import annotations

import fcntl
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from normlab.errors import NormLabError
from normlab.utils.files import sync

Row = dict[str, Any]
Fields = Mapping[str, tuple[Callable[[Any], bool], str]]
"""For each field, a check of its value and a description of the expected value."""


class Store:
    """The rows of one comparison folder.

    Safe for concurrent appends: each row is one write of a whole line at the end of the file, under a lock, and is
    synced to disk when `append` returns. If a run has several rows, the last one counts.
    """

    def __init__(self, folder: str | os.PathLike[str], *, fields: Fields | None = None):
        """`fields` are the required fields of every row; None: those of a training run."""
        self.folder = Path(folder)
        self.path = self.folder / "rows.jsonl"
        self._fields = _FIELDS if fields is None else fields

    def append(self, row: Mapping[str, Any]) -> None:
        """Add the row of a run that has ended: done, failed, or interrupted (its process was killed)."""
        self.append_all([row])

    def append_all(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows that belong together, in one write."""
        for row in rows:
            wrong = _fault(row, self._fields)
            if wrong:
                raise NormLabError(f"cannot store the row of run {row.get('run')!r}: {wrong}")
        # ASCII, because a file name may contain characters that UTF-8 cannot encode.
        lines = b"".join(json.dumps(dict(row)).encode() + b"\n" for row in rows)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked(os.O_RDWR | os.O_CREAT | os.O_APPEND, fcntl.LOCK_EX) as file:
                _mend(file)
                _write(file, lines)
            # A new file is durable only after its folder has been synced.
            sync(self.folder)
        except OSError as error:
            raise NormLabError(
                f"cannot write to {self.path}: {error.strerror}; free some space or check its rights"
            ) from None

    def rows(self) -> list[Row]:
        """The last row of every run, in the order in which the runs first ended."""
        if not self.path.exists():
            return []
        with self._locked(os.O_RDONLY, fcntl.LOCK_SH) as file:
            lines = _read(file).split(b"\n")
        torn = lines.pop()
        found = [self._parse(line, number) for number, line in enumerate(lines, start=1)]
        if torn:
            found.extend(self._parse_torn(torn))
        return list({row["run"]: row for row in found}.values())

    @contextmanager
    def _locked(self, flags: int, kind: int) -> Iterator[int]:
        # Closing the file releases the lock, also when the process is killed.
        file = os.open(self.path, flags, 0o644)
        try:
            fcntl.flock(file, kind)
            yield file
        finally:
            os.close(file)

    def _parse(self, line: bytes, number: int) -> Row:
        row = _decode(line)
        wrong = "not a line of JSON" if row is None else _fault(row, self._fields)
        if row is None or wrong:
            raise NormLabError(f"{self.path}, line {number}: {wrong}; restore the line, or delete it and run again")
        return row

    def _parse_torn(self, line: bytes) -> list[Row]:
        """Parse a last line without a line feed. It is complete, or truncated by a crash; its run is then repeated."""
        row = _decode(line)
        if row is not None and not _fault(row, self._fields):
            return [row]
        warnings.warn(f"{self.path}: the last line is torn and is ignored; its run counts as not ended", stacklevel=3)
        return []


def _decode(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _mend(file: int) -> None:
    """Before a row is appended: remove a truncated last line, or add a missing line feed."""
    if not _ends_torn(file):
        return
    content = _read(file)
    start = content.rfind(b"\n") + 1
    if _decode(content[start:]) is None:
        os.ftruncate(file, start)
    else:
        _write(file, b"\n")


def _ends_torn(file: int) -> bool:
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"


def _read(file: int) -> bytes:
    with os.fdopen(os.dup(file), "rb") as stream:
        stream.seek(0)
        return stream.read()


def _write(file: int, line: bytes) -> None:
    """Write the whole line or nothing, also on a full disk."""
    before = os.fstat(file).st_size
    try:
        if os.write(file, line) < len(line):
            raise OSError(0, "the disk took only a part of the row")
        os.fsync(file)
    except OSError:
        os.ftruncate(file, before)
        raise


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_rate(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value) and value > 0


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


_FIELDS: Fields = {
    "run": (_is_text, "a name"),
    "scheme": (_is_text, "a name"),
    "label": (_is_text, "a name"),
    "lr": (_is_rate, "a positive number"),
    "seed": (_is_count, "a whole number"),
    "role": (lambda value: value in ("tune", "confirm", "judge"), "'tune', 'confirm' or 'judge'"),
    "state": (lambda value: value in ("done", "failed", "interrupted"), "'done', 'failed' or 'interrupted'"),
    "reason": (_or_none(_is_text), "text or null"),
    "metric": (_is_text, "a name"),
    "value": (_or_none(_is_number), "a number or null"),
    "loss": (_or_none(_is_number), "a number or null"),
    "tokens": (_is_count, "a whole number"),
    "steps": (_is_count, "a whole number"),
    "seconds": (_is_number, "a number"),
    "tokens_per_s": (_or_none(_is_number), "a number or null"),
    "peak_bytes": (_or_none(_is_count), "a whole number or null"),
    "device": (_is_text, "a name"),
    "versions": (_is_table, "a table"),
    "config": (_is_table, "a table"),
    "started": (_is_text, "a time"),
    "finished": (_is_text, "a time"),
}

RESULT_FIELDS: Fields = {
    name: _FIELDS[name] for name in ("run", "scheme", "seed", "state", "reason", "versions", "started", "finished")
}
"""Required fields of a row that is not a training run: a check, a simulation, a benchmark."""


def _fault(row: Mapping[str, Any], fields: Fields) -> str | None:
    """Describe what is wrong with a row; None if it is valid. Unknown fields are allowed."""
    for name, (check, expected) in fields.items():
        if name not in row:
            return f"{name} is missing, expected {expected}"
        if not check(row[name]):
            return f"{name} must be {expected}, got {row[name]!r}"
    if "value" in fields and row["state"] == "done" and (row["value"] is None or not math.isfinite(row["value"])):
        return f"a run that is done has a finite value, got {row['value']}; store it as failed"
    return None
