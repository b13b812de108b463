"""ProcessPool: execute runs in worker processes of this machine, one per GPU, or several that share the cores.

A process executes runs one after the other. On a GPU it keeps the models that it has compiled, and gets runs of the
same shape first (`normlab/train/model_cache.py`); after a device error it is replaced. Output of a run goes to
`output.txt` in its folder.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any

import torch

from normlab.compare.plan import PlannedRun
from normlab.compare.pool import EndedRun
from normlab.compare.run_one import Job, lost_run_row
from normlab.compare.run_options import RunSettings
from normlab.compare.worker_process import READY, WorkerSlot, serve
from normlab.errors import NormLabError
from normlab.train.model_cache import shape_of
from normlab.train.storage.folder import now
from normlab.utils import machine

_PATIENCE = 5.0
"""Seconds to wait for an idle process to end."""


def worker_slots(settings: RunSettings) -> list[WorkerSlot]:
    """One slot per process: the GPUs round-robin, or equal shares of the cores.

    Several single-threaded processes are faster than one with many threads at sizes that a CPU can train.
    """
    device, workers = settings.device, settings.options.workers
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device.startswith("cuda") and not gpus:
        raise NormLabError(f"device {device} was asked for, but there is no GPU; try cpu, or auto")
    cores, most = _cores(), _most_threads()
    if gpus:
        # If the user names one GPU, only that one is used.
        named = [None] if ":" in device else _visible(gpus)
        count = workers or len(named)
        return [WorkerSlot(min(most, max(1, cores // count)), named[i % len(named)], on_gpu=True) for i in range(count)]
    count = workers or min(cores, settings.at_once)
    return [WorkerSlot(min(most, max(1, cores // count)))] * count


def _cores() -> int:
    """Number of cores to divide. torch defaults to the number of physical cores, unless the user limited it."""
    return machine.cores() if _threads_are_limited() else torch.get_num_threads()


def _most_threads() -> int:
    """Largest number of threads of one process."""
    return torch.get_num_threads() if _threads_are_limited() else _cores()


def _threads_are_limited() -> bool:
    return any(os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))


def _visible(gpus: int) -> list[str | None]:
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [*told.split(",")[:gpus]] if told else [str(i) for i in range(gpus)]


class ProcessPool:
    """Pool of worker processes, started on demand and replaced when they have ended."""

    def __init__(self, places: Sequence[WorkerSlot]):
        self._places = places
        self._workers: dict[int, _Worker] = {}
        self._shapes: dict[str, str] = {}
        """Shapes of runs, by their names."""
        self._overtaken: Counter[str] = Counter()
        """Number of runs that were started before their turn, while this one was the first."""

    @property
    def running(self) -> list[Job]:
        return [worker.job for worker in self._workers.values() if worker.job is not None]

    @property
    def is_free(self) -> bool:
        return bool(self._free_places())

    def choose(self, runs: Sequence[PlannedRun]) -> int:
        """The first run whose model a free process has compiled; none is overtaken more often than there are places."""
        known = {shape for i in self._free_places() if i in self._workers for shape in self._workers[i].shapes}
        if not known or self._overtaken[runs[0].name] >= len(self._places):
            return 0
        found = next((i for i, run in enumerate(runs) if self._shape(run) in known), 0)
        self._overtaken[runs[0].name] += found > 0
        return found

    def start(self, job: Job) -> None:
        shape = self._shape(job.run)
        free = min(self._free_places(), key=lambda i: self._distance(i, shape), default=None)
        if free is None:
            raise NormLabError("every place is taken; wait until a run has ended")
        if free not in self._workers:
            self._workers[free] = _Worker(self._places[free])
        self._workers[free].take(job, shape)

    def _free_places(self) -> list[int]:
        return [i for i in range(len(self._places)) if i not in self._workers or self._workers[i].job is None]

    def _distance(self, place: int, shape: str) -> int:
        """Prefer a process that has compiled the shape, then a process that has compiled little."""
        worker = self._workers.get(place)
        return 0 if worker is None else -1 if shape in worker.shapes else len(worker.shapes)

    def _shape(self, run: PlannedRun) -> str:
        if not any(place.on_gpu for place in self._places):
            return ""
        if run.name not in self._shapes:
            self._shapes[run.name] = shape_of(run.config)
        return self._shapes[run.name]

    def wait(self, seconds: float) -> list[EndedRun]:
        wait([worker.answers for worker in self._workers.values()], seconds)
        ended = []
        for i, worker in list(self._workers.items()):
            if worker.answers.poll():
                answer = worker.answer()
                if answer is not None:
                    ended.append(answer)
                if worker.is_spent:
                    self._workers.pop(i).end()
        return ended

    def stop(self) -> None:
        for worker in self._workers.values():
            worker.stop()

    def close(self) -> None:
        for worker in self._workers.values():
            worker.let_go()
        for worker in self._workers.values():
            worker.end()
        self._workers.clear()


class _Worker:
    """Parent side of one worker process."""

    def __init__(self, place: WorkerSlot):
        context = multiprocessing.get_context("spawn")
        self.answers, theirs = context.Pipe()
        self.job: Job | None = None
        self.shapes: set[str] = set()
        """Shapes of the runs that it has executed on a GPU."""
        self.is_spent = False
        self._place, self._began = place, ""
        self._is_ready = self._stopped = False
        self._process = context.Process(target=serve, args=(theirs, place), name="normlab run")
        with _ctrl_c_held_back():
            self._process.start()
        # Otherwise the pipe would stay open after the process ends.
        theirs.close()

    def take(self, job: Job, shape: str) -> None:
        self.job, self._began = job, now()
        if self._place.on_gpu:
            self.shapes.add(shape)
        # If the process has just died, `answer` reports it.
        with suppress(BrokenPipeError):
            self.answers.send(job)

    def answer(self) -> EndedRun | None:
        """Result of the worker's run; None if there is no run to report."""
        try:
            message = self.answers.recv()
            if message == READY:
                self._is_ready = True
                return None
            answer, is_well = message
            self.is_spent = not is_well
        except (EOFError, OSError):
            # OSError: killed while it was sending, so that the message ends early.
            answer = self._died()
        job, self.job = self.job, None
        return None if job is None else (job, answer)

    def stop(self) -> None:
        # A second signal would make the run stop at once.
        if not self._stopped:
            self._process.terminate()
        self._stopped = True

    def let_go(self) -> None:
        """Close the pipe, which makes an idle process end."""
        self.answers.close()

    def end(self) -> None:
        """Wait for an idle process; kill a busy one."""
        self.let_go()
        if self.job is None:
            self._process.join(_PATIENCE)
        self._process.kill()
        self._process.join()

    def _died(self) -> dict[str, Any] | NormLabError | None:
        self._process.join()
        self.is_spent = True
        # Stopped before its run had begun, or idle: nothing is lost.
        if self.job is None or self._stopped:
            return None
        code = self._process.exitcode or 0
        if not self._is_ready and code >= 0:
            return NormLabError(
                f"a worker cannot start ({_cause(code)}); "
                "a script that calls compare or ladder must do so under if __name__ == '__main__'"
            )
        return lost_run_row(self.job, "interrupted", _cause(code), self._began)


def _cause(code: int) -> str:
    if code == -signal.SIGKILL:
        return "its process was killed (SIGKILL), perhaps because memory ran out"
    if code < 0:
        return f"its process was killed ({signal.Signals(-code).name})"
    return f"its process ended with code {code}"


@contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    """Block SIGINT while a process starts, until it can handle it."""
    # Started with the first process, the tracker would unblock SIGINT again.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
