"""Pool: interface of the executors of runs (processes on this machine, or a Ray cluster)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from normlab.compare.plan import PlannedRun
from normlab.compare.run_one import Job
from normlab.errors import NormLabError

EndedRun = tuple[Job, dict[str, Any] | NormLabError | None]
"""A run and its result: its row, None if it was stopped and saved, or an error that affects all runs."""


class Pool(Protocol):
    """Executes runs in parallel."""

    @property
    def running(self) -> Sequence[Job]: ...

    @property
    def is_free(self) -> bool:
        """Whether another run can start."""
        ...

    def choose(self, runs: Sequence[PlannedRun]) -> int:
        """Which of the runs that are due, the most urgent first, a free process should start."""
        ...

    def start(self, job: Job) -> None: ...

    def wait(self, seconds: float) -> list[EndedRun]:
        """Wait until a run has ended or the time is up; return the runs that have ended."""
        ...

    def stop(self) -> None:
        """Ask all runs to save a checkpoint and end."""
        ...

    def close(self) -> None:
        """Kill all remaining runs."""
        ...
