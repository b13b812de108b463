"""Expected duration of runs, from those that have ended in the same call: a slice of time starts what it can end."""

from __future__ import annotations

import time
from collections.abc import Callable

from normlab.compare.plan import PlannedRun

_MARGIN = 1.1
"""A run takes this much longer than the last one of its kind, at most."""


class RunDurations:
    """Seconds per unit of work of the runs that have ended, by scheme and size."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._began: dict[str, tuple[float, float]] = {}
        """When each run began in this call, and the work that earlier calls had done by then."""
        self._paces: dict[tuple[str | int, ...], float] = {}
        self._last: float | None = None

    def begin(self, run: PlannedRun, step: int = 0) -> None:
        """Record that a run begins, or goes on from a step."""
        self._began[run.name] = (self._clock(), run.work_until(step))

    def end(self, run: PlannedRun, steps: int) -> None:
        """Record a run that has ended after so many steps; one that was stopped early counts up to there."""
        began, before = self._began.pop(run.name, (None, 0.0))
        work = run.work_until(steps) - before
        if began is not None and work > 0.0:
            self._last = self._paces[_kind(run)] = (self._clock() - began) / work

    def expected(self, run: PlannedRun) -> float:
        """Seconds that a run should take; 0 if no run has ended yet.

        The pace of another scheme or size stands in for a kind of which no run has ended. The first run of a kind
        also compiles its model, so that the second is expected to take longer than it does.
        """
        pace = self._paces.get(_kind(run), self._last)
        return 0.0 if pace is None else _MARGIN * pace * run.work


def _kind(run: PlannedRun) -> tuple[str | int, ...]:
    config = run.config
    return run.scheme, config.model.depth, config.model.dim, config.sequence, config.batch
