"""RayPool: execute the runs of a comparison or ladder on a Ray cluster (`pip install "normlab[cluster]"`).

Every machine needs NormLab, the data, and the comparison's folder at the same path on a shared disk: runs write to it
and resume from it, and the comparison reads their progress from it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from normlab.compare.plan import PlannedRun
from normlab.compare.pool import EndedRun
from normlab.compare.run_one import Job, execute_job, lost_run_row
from normlab.compare.run_options import RunSettings
from normlab.errors import NormLabError
from normlab.train.storage.folder import now


@dataclass(frozen=True)
class _Task:
    job: Job
    began: str


class RayPool:
    """Runs as Ray tasks: one GPU each if the cluster has any, else one core, or several with fewer workers."""

    def __init__(self, settings: RunSettings):
        self._ray = _import_ray()
        if not self._ray.is_initialized():
            # Connects to the cluster of RAY_ADDRESS or of this machine, or starts a local one.
            self._ray.init(include_dashboard=False, log_to_driver=False)
        has = self._ray.cluster_resources()
        gpus = int(has.get("GPU", 0)) if settings.device != "cpu" else 0
        self._slots = settings.options.workers or gpus or max(1, int(has.get("CPU", 1)))
        cores = max(1, int(has.get("CPU", 1)) // self._slots)
        needs = {"num_cpus": cores, "num_gpus": min(1.0, gpus / self._slots)}
        # Ray must not retry: a failed run is a result, and the comparison itself restarts lost ones. On GPUs every run
        # has a new process here; the workers of one machine are kept for several runs.
        self._remote = self._ray.remote(max_retries=0, max_calls=1 if gpus else 0, **needs)(_perform)
        self._threads = cores
        self._tasks: dict[Any, _Task] = {}
        self._stopped = False

    @property
    def running(self) -> list[Job]:
        return [task.job for task in self._tasks.values()]

    @property
    def is_free(self) -> bool:
        return len(self._tasks) < self._slots

    def choose(self, runs: Sequence[PlannedRun]) -> int:
        return 0

    def start(self, job: Job) -> None:
        self._tasks[self._remote.remote(job, self._threads)] = _Task(job, now())

    def wait(self, seconds: float) -> list[EndedRun]:
        if not self._tasks:
            return []
        ready, _ = self._ray.wait(list(self._tasks), timeout=seconds)
        return [self._ended(reference, self._tasks.pop(reference)) for reference in ready]

    def stop(self) -> None:
        """Cancel the tasks. A run receives this as Ctrl-C: it saves and ends."""
        if not self._stopped:
            for reference in self._tasks:
                self._ray.cancel(reference, force=False)
        self._stopped = True

    def close(self) -> None:
        for reference in self._tasks:
            self._ray.cancel(reference, force=True)
        self._tasks.clear()

    def _ended(self, reference: Any, task: _Task) -> EndedRun:
        errors = self._ray.exceptions
        try:
            return task.job, self._ray.get(reference)
        except errors.TaskCancelledError:
            return task.job, None
        except errors.RayTaskError as error:
            # Errors while arguments are unpickled, e.g. of a scheme whose file is missing, have a prefix.
            return task.job, NormLabError(str(error.cause).removeprefix("System error: ").partition("\n")[0])
        except errors.RayError as error:
            if self._stopped:
                return task.job, None
            reason = f"Ray lost it: {str(error).strip().partition(chr(10))[0]}"
            return task.job, lost_run_row(task.job, "interrupted", reason, task.began)


def _perform(job: Job, threads: int) -> dict[str, Any] | None:
    """Execute a job in a Ray worker process."""
    if not job.folder.parent.parent.is_dir():
        raise NormLabError(
            f"{os.uname().nodename} does not see {job.folder.parent.parent}; Ray's machines must share that folder"
        )
    torch.set_num_threads(threads)
    return execute_job(job)


def _import_ray() -> ModuleType:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise NormLabError('running on a cluster needs Ray; pip install "normlab[cluster]"') from None
