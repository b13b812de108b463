"""A pool of one that executes runs in the test's own process: nothing to start, and a test can change the rules."""

from __future__ import annotations

from typing import Any

from normlab.compare.pool import EndedRun
from normlab.compare.run_one import Job, execute_job


class Here:
    """Stands in for `executor.ProcessPool`."""

    def __init__(self, _places: Any):
        self._job: Job | None = None

    @property
    def running(self) -> list[Job]:
        return [] if self._job is None else [self._job]

    @property
    def is_free(self) -> bool:
        return self._job is None

    def choose(self, _runs: Any) -> int:
        return 0

    def start(self, job: Job) -> None:
        self._job = job

    def wait(self, _seconds: float) -> list[EndedRun]:
        job, self._job = self._job, None
        return [] if job is None else [(job, execute_job(job))]

    def stop(self) -> None:
        self._job = None

    def close(self) -> None: ...
