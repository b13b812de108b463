"""One watched run: its files, their content so far, and the time since the last change."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from normlab.pages.numbers import finite_or_none
from normlab.watch.discover import LOGS
from normlab.watch.history import History
from normlab.watch.status import Status, patience, status
from normlab.watch.tail import JsonFile, JsonLinesTail


class WatchedRun:
    """A run's folder; `poll` reads what is new in its files.

    The time since the last line is counted from when a change was seen. Only for what was there before does it
    rest on the file's own time, so that the clock of another machine matters little.
    """

    def __init__(
        self, path: Path, *, wall: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
    ):
        self.path, self._wall, self._clock = path, wall, clock
        self.histories = [History() for _ in LOGS]
        self._tails = [JsonLinesTail(path / name) for name in LOGS]
        self._config, self._status = JsonFile(path / "config.json"), JsonFile(path / "status.json")
        self._age, self._age_at = 0.0, clock()
        self._longest_gap, self._polled = 0.0, False

    def poll(self) -> bool:
        """Read what is new; returns whether anything has changed."""
        told = [self._config.poll(), self._status.poll()]
        grown = [self._tails[k].poll(self._take(k), self._restart(k)) for k in range(len(LOGS))]
        if any(grown) or not self._polled:
            self._heard()
        self._polled = True
        return any((*told, *grown))

    def _take(self, k: int) -> Callable[[dict[str, Any]], None]:
        return lambda record: self.histories[k].take(record)

    def _restart(self, k: int) -> Callable[[], None]:
        def restart() -> None:
            self.histories[k] = History()

        return restart

    def _heard(self) -> None:
        if self._polled:
            self._longest_gap = max(self._longest_gap, self.quiet)
            self._age = 0.0
        else:
            # A run that was killed before its first line has been silent since it wrote its status.
            files = (self._tails, (self._config, self._status))
            times = ([file.modified for file in kind if file.modified is not None] for kind in files)
            written = next((max(known) for known in times if known), self._wall())
            self._age = max(0.0, self._wall() - written)
        self._age_at = self._clock()

    @property
    def quiet(self) -> float:
        """Seconds since the last line."""
        return self._age + self._clock() - self._age_at

    @property
    def history(self) -> History:
        """Summary of metrics.jsonl, or of the file of `Watch` if there is none."""
        return next((history for history in self.histories if not history.is_empty), self.histories[0])

    @property
    def steps(self) -> int | None:
        """Steps that the run is to take; None: not known."""
        config = self._config.content.get("config")
        of = self._status.content.get("of")
        known = of if of is not None else config.get("steps") if isinstance(config, dict) else None
        return known if isinstance(known, int) and not isinstance(known, bool) else None

    @property
    def seconds_a_step(self) -> float | None:
        """Mean time of a step so far."""
        seconds, step = (finite_or_none(self.history.last.get(name)) for name in ("seconds", "step"))
        return seconds / step if seconds and step else None

    @property
    def status(self) -> Status:
        return status(
            self._status.content,
            stuck=next((history.stuck for history in self.histories if history.stuck is not None), None),
            recovered=any(history.recovered for history in self.histories),
            empty=all(history.is_empty for history in self.histories),
            quiet=self.quiet,
            patience=patience(self.seconds_a_step, self._longest_gap),
        )
