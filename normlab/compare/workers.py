"""Runs in processes of this machine: one a GPU, or several that share the cores.

A process on the CPU takes one run after the other. On a GPU it takes one and ends: peaks of memory, compiled code and
a broken device do not outlive it. What a run prints goes into `output.txt` in its folder.
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
from typing import Any, Protocol

import torch

from normlab.compare.config import CompareConfig
from normlab.compare.execute import Job, execute, lost
from normlab.errors import NormLabError
from normlab.train.folder import now

Ended = tuple[Job, dict[str, Any] | None]
"""A run and its row; None: it was asked to stop, and has saved what it had."""

_PATIENCE = 5.0
"""Seconds that an idle process has to end by itself."""


class Pool(Protocol):
    """Where runs are done."""

    @property
    def running(self) -> Sequence[Job]: ...

    @property
    def is_free(self) -> bool:
        """Whether another run can start."""
        ...

    def start(self, job: Job) -> None: ...

    def wait(self, seconds: float) -> list[Ended]:
        """The runs that have ended, as soon as there is one or the time is up."""
        ...

    def stop(self) -> None:
        """Ask all runs to save and end."""
        ...

    def close(self) -> None:
        """End at once whatever still runs."""
        ...


@dataclass(frozen=True)
class Place:
    """What a process may use."""

    threads: int
    gpu: str | None = None
    """For CUDA_VISIBLE_DEVICES; None: as it is."""
    once: bool = False
    """Whether a process does one run and ends."""


def places(config: CompareConfig) -> list[Place]:
    """One for each process: the GPUs in turn, or equal shares of the cores.

    Single-threaded processes are faster than one with many threads at sizes that a CPU can train.
    """
    device = config.base.device
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    cores = torch.get_num_threads()
    if gpus:
        # The user who names one GPU gets that one.
        named = [None] if ":" in device else _visible(gpus)
        count = config.workers or len(named)
        return [Place(max(1, cores // count), named[i % len(named)], once=True) for i in range(count)]
    # From the plan and not from what is left of it: the number of threads moves the last digits of a result.
    at_once = len(config.names) * max(config.seeds, len(config.lrs) * config.tune_seeds)
    count = config.workers or min(cores, at_once)
    return [Place(max(1, cores // count))] * count


def _visible(gpus: int) -> list[str | None]:
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [*told.split(",")[:gpus]] if told else [str(i) for i in range(gpus)]


class Workers:
    """A pool of processes, each started when it is first needed and replaced when it has ended."""

    def __init__(self, places: Sequence[Place]):
        self._places = places
        self._workers: dict[int, _Worker] = {}

    @property
    def running(self) -> list[Job]:
        return [worker.job for worker in self._workers.values() if worker.job is not None]

    @property
    def is_free(self) -> bool:
        return len(self.running) < len(self._places)

    def start(self, job: Job) -> None:
        busy = {i for i, worker in self._workers.items() if worker.job is not None}
        free = next(i for i in range(len(self._places)) if i not in busy)
        if free not in self._workers:
            self._workers[free] = _Worker(self._places[free])
        self._workers[free].take(job)

    def wait(self, seconds: float) -> list[Ended]:
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
    """One process, seen from the comparison."""

    def __init__(self, place: Place):
        context = multiprocessing.get_context("spawn")
        self.answers, theirs = context.Pipe()
        self.job: Job | None = None
        self.is_spent = False
        self._place, self._began, self._stopped = place, "", False
        self._process = context.Process(target=_serve, args=(theirs, place), name="normlab run")
        with _ctrl_c_held_back():
            self._process.start()
        # Only then does the end of the process close the pipe.
        theirs.close()

    def take(self, job: Job) -> None:
        self.job, self._began = job, now()
        # A process that has just died says so when it is asked for its answer.
        with suppress(BrokenPipeError):
            self.answers.send(job)

    def answer(self) -> Ended | None:
        """What has become of its run; None where it had none."""
        job, self.job = self.job, None
        try:
            row = self.answers.recv()
            self.is_spent = self._place.once
        except (EOFError, ConnectionError):
            row = self._died(job)
        if isinstance(row, NormLabError):
            raise row
        return None if job is None else (job, row)

    def stop(self) -> None:
        # A second signal would tell the run not to be patient.
        if not self._stopped:
            self._process.terminate()
        self._stopped = True

    def let_go(self) -> None:
        """An idle process ends when nobody can give it a run any more."""
        self.answers.close()

    def end(self) -> None:
        """Wait for an idle process, kill a busy one."""
        self.let_go()
        if self.job is None:
            self._process.join(_PATIENCE)
        self._process.kill()
        self._process.join()

    def _died(self, job: Job | None) -> dict[str, Any] | None:
        self._process.join()
        self.is_spent = True
        # It ends after a run on a GPU, and where it was told to before a run had begun: nothing is lost.
        if job is None or self._stopped:
            return None
        return lost(job, _cause(self._process.exitcode or 0), self._began)


def _cause(code: int) -> str:
    if code == -signal.SIGKILL:
        return "its process was killed (SIGKILL), perhaps because memory ran out"
    if code < 0:
        return f"its process was killed ({signal.Signals(-code).name}); see output.txt in its folder"
    return f"its process ended with code {code}; see output.txt in its folder"


@contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    """A process that is being started must not take Ctrl-C for itself before it can handle it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


# -- in the process ------------------------------------------------------------------------------------------------


def _serve(jobs: Connection, place: Place) -> None:
    """Do runs until there are no more."""
    # Ctrl-C goes to the comparison alone, which then asks its processes.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    if place.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = place.gpu
    torch.set_num_threads(place.threads)
    with suppress(EOFError, ConnectionError):
        while True:
            job: Job = jobs.recv()
            jobs.send(_do(job))
            if place.once:
                return


def _do(job: Job) -> dict[str, Any] | NormLabError | None:
    try:
        with _output_in(job.folder):
            return execute(job)
    except NormLabError as error:
        return error


def _stop_with_parent() -> None:
    """A comparison that was killed asks nobody to stop: its processes must notice, save and go."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _output_in(folder: Path) -> Iterator[None]:
    """Everything that is printed inside the block, also by native code, goes into a file."""
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
