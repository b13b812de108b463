"""All runs in a folder, polled on request; a response holds only what changed since the previous one."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from normlab.watch.discover import MOST_RUNS, check_folder, find_runs
from normlab.watch.view import RunLine, details, run_line
from normlab.watch.watched_run import WatchedRun

_POLL = 1.0
"""Smallest interval between two reads of the files in seconds, however many pages are open."""
_SEARCH = 5.0
"""Smallest interval between two searches for new runs in seconds."""


class Watcher:
    """The runs below a folder. Files are read only on request; thread-safe."""

    def __init__(self, root: Path, *, clock: Callable[[], float] = time.monotonic):
        self.root, self._clock = root, clock
        self.epoch = secrets.token_hex(8)
        """Identifies this server, so that a page notices a restart."""
        self._lock = threading.Lock()
        self._runs: dict[Path, WatchedRun] = {}
        self._numbers: dict[Path, int] = {}
        self._versions: dict[Path, int] = {}
        self._version = 0
        self._searched = self._polled = -float("inf")
        self._names = check_folder(root)

    def _refresh(self) -> None:
        """Read what is new, unless that was done a moment ago."""
        now = self._clock()
        if now - self._searched >= _SEARCH:
            # A mount that is gone for a moment does not make the page forget its runs.
            self._names, self._searched = find_runs(self.root) or self._names, now
        if now - self._polled < _POLL:
            return
        for path in self._names.values():
            if path not in self._runs:
                self._runs[path] = WatchedRun(path)
            if self._runs[path].poll() or path not in self._versions:
                self._version += 1
                self._versions[path] = self._version
        self._polled = self._clock()

    def lines(self) -> list[RunLine]:
        """One table row for every run."""
        with self._lock:
            self._refresh()
            return [run_line(name, self._runs[path]) for name, path in self._known()]

    def answer(self, epoch: str = "", since: int = 0) -> dict[str, Any]:
        """All lines, and the plots of the runs that have changed since version `since` of the same epoch."""
        with self._lock:
            self._refresh()
            since = since if epoch == self.epoch else 0
            runs, changed = [], {}
            for name, path in self._known():
                number, run = self._numbers.setdefault(path, len(self._numbers)), self._runs[path]
                runs.append({"id": number} | asdict(run_line(name, run)))
                if self._versions[path] > since:
                    changed[str(number)] = details(run)
            full = len(self._names) >= MOST_RUNS
            return {"epoch": self.epoch, "version": self._version, "runs": runs, "changed": changed, "full": full}

    def _known(self) -> list[tuple[str, Path]]:
        return [(name, path) for name, path in self._names.items() if path in self._runs]
