"""Read files that another process writes, without locks or notifications: the new lines of a log, a small JSON file.

Only size and modification time are asked for while nothing changes, so that a folder may lie on a network mount or be a
copy that is synchronised from another machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

Record = dict[str, Any]

_SEAL = 256
"""Bytes before the place reached that are compared, to see whether the file is still the same."""

_LONGEST = 2**24
"""Bytes of the longest line; what is longer is no record."""


class JsonLinesTail:
    """Reads a growing JSON-lines file from where the last read ended.

    A last line without its line feed is left for the next read, and a line that is no JSON object is skipped. A file
    is read again from its start if it is shorter than what was read, or if the bytes before that place have changed: a
    resumed run has rewritten it, or a log was rotated. An inode says nothing: copying tools replace the file each time.
    """

    def __init__(self, path: Path):
        self.path = path
        self.modified: float | None = None
        """Modification time at the last read; None: there was no file yet."""
        self._seen: tuple[int, int] | None = None
        self._offset, self._seal = 0, b""

    def poll(self, take: Callable[[Record], None], restart: Callable[[], None]) -> bool:
        """Pass new records to `take`, after `restart` if the file has begun anew. Returns whether the file changed."""
        try:
            found = self.path.stat()
            if (found.st_size, found.st_mtime_ns) == self._seen:
                return False
            with self.path.open("rb") as file:
                self._find_place(file, found.st_size, restart)
                self._read_on(file, take)
        except OSError:
            # Gone for the moment, or the mount does not answer: what was read stays, and the next poll tries again.
            return False
        self._seen, self.modified = (found.st_size, found.st_mtime_ns), found.st_mtime
        return True

    def _find_place(self, file: IO[bytes], size: int, restart: Callable[[], None]) -> None:
        file.seek(self._offset - len(self._seal))
        if size < self._offset or file.read(len(self._seal)) != self._seal:
            self._offset, self._seal = 0, b""
            file.seek(0)
            restart()

    def _read_on(self, file: IO[bytes], take: Callable[[Record], None]) -> None:
        before = self._offset
        while (line := file.readline(_LONGEST)).endswith(b"\n") or len(line) == _LONGEST:
            self._offset += len(line)
            if (record := _decoded(line)) is not None:
                take(record)
        if self._offset > before:
            start = max(0, self._offset - _SEAL)
            file.seek(start)
            self._seal = file.read(self._offset - start)


class JsonFile:
    """The content of a small JSON file, read again when its size or modification time has changed.

    A file that is missing, torn or no JSON object leaves what was read before.
    """

    def __init__(self, path: Path):
        self.path, self.content = path, Record()
        self.modified: float | None = None
        """Modification time at the last read."""
        self._seen: tuple[int, int] | None = None

    def poll(self) -> bool:
        """Read the file if it has changed; returns whether its content has."""
        try:
            found = self.path.stat()
            if (found.st_size, found.st_mtime_ns) == self._seen or found.st_size > _LONGEST:
                return False
            content = _decoded(self.path.read_bytes())
        except OSError:
            return False
        self._seen, self.modified = (found.st_size, found.st_mtime_ns), found.st_mtime
        changed = content is not None and content != self.content
        self.content = self.content if content is None else content
        return changed


def _decoded(text: bytes) -> Record | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
