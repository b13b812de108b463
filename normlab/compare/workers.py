"""ProcessPool: execute runs in worker processes of this machine, one per GPU, or several that share the cores.

A process on the CPU executes runs one after the other. On a GPU every run has a new process, so that peak memory,
compiled code and device errors do not affect the next run. Output of a run goes to `output.txt` in its folder.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import parent_process
from pathlib import Path
from typing import Any

import torch

from normlab.compare.pool import EndedRun
from normlab.compare.run_one import Job, execute_job, last_step, lost_run_row
from normlab.compare.run_options import RunSettings
from normlab.errors import NormLabError
from normlab.train.storage.folder import now
from normlab.utils import machine

_READY = "ready"

_PATIENCE = 5.0
"""Seconds to wait for an idle process to end."""


@dataclass(frozen=True)
class WorkerSlot:
    """Resources of one worker process."""

    threads: int
    gpu: str | None = None
    """Value of CUDA_VISIBLE_DEVICES; None: unchanged."""
    once: bool = False
    """Whether the process ends after one run."""


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
        return [WorkerSlot(min(most, max(1, cores // count)), named[i % len(named)], once=True) for i in range(count)]
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

    @property
    def running(self) -> list[Job]:
        return [worker.job for worker in self._workers.values() if worker.job is not None]

    @property
    def is_free(self) -> bool:
        return self._free_place() is not None

    def _free_place(self) -> int | None:
        """A slot without a run; on a shared GPU only after the others have compiled and started to train."""
        busy = {i: worker.job for i, worker in self._workers.items() if worker.job is not None}
        compiling = {self._places[i].gpu for i, job in busy.items() if last_step(job.folder) is None}
        for i, place in enumerate(self._places):
            if i not in busy and not (place.once and place.gpu in compiling):
                return i
        return None

    def start(self, job: Job) -> None:
        free = self._free_place()
        if free is None:
            raise NormLabError("every place is taken; wait until a run has ended")
        if free not in self._workers:
            self._workers[free] = _Worker(self._places[free])
        self._workers[free].take(job)

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
        self.is_spent = False
        self._place, self._began = place, ""
        self._is_ready = self._stopped = False
        self._process = context.Process(target=_serve, args=(theirs, place), name="normlab run")
        with _ctrl_c_held_back():
            self._process.start()
        # Otherwise the pipe would stay open after the process ends.
        theirs.close()

    def take(self, job: Job) -> None:
        self.job, self._began = job, now()
        # If the process has just died, `answer` reports it.
        with suppress(BrokenPipeError):
            self.answers.send(job)

    def answer(self) -> EndedRun | None:
        """Result of the worker's run; None if there is no run to report."""
        try:
            answer = self.answers.recv()
            self.is_spent = self._place.once and answer != _READY
        except (EOFError, ConnectionError):
            answer = self._died()
        if answer == _READY:
            self._is_ready = True
            return None
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
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


# -- in the process ------------------------------------------------------------------------------------------------


def _serve(jobs: Connection, place: WorkerSlot) -> None:
    """Main loop of a worker process: execute runs until the pipe is closed."""
    # Only the comparison receives Ctrl-C; it then stops its workers.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    if place.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = place.gpu
    torch.set_num_threads(place.threads)
    jobs.send(_READY)
    with suppress(EOFError, ConnectionError):
        while True:
            jobs.send(_do_next(jobs))
            if place.once:
                return


def _do_next(jobs: Connection) -> dict[str, Any] | NormLabError | None:
    try:
        job: Job = jobs.recv()
    except (AttributeError, ImportError) as error:
        return NormLabError(f"a worker does not know the scheme ({error}); name it by its file: path/to/file.py:Name")
    except NormLabError as error:
        return error
    try:
        with _output_in(job.folder):
            return execute_job(job)
    except NormLabError as error:
        return error


def _stop_with_parent() -> None:
    """Send SIGTERM to this process when the parent dies: a killed comparison cannot stop its workers."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _output_in(folder: Path) -> Iterator[None]:
    """Redirect all output inside the block, also of native code, to a file."""
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    kept, path = (os.dup(1), os.dup(2)), folder / "output.txt"
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        for own, standard in zip(kept, (1, 2), strict=True):
            os.dup2(own, standard)
            os.close(own)
        if not path.stat().st_size:
            path.unlink()
