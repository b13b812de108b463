"""The main loop of a worker process: execute one run after the other, until the pipe to the parent is closed.

What it sends: `READY` once, then for every run its result and whether the process can execute another one.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import parent_process
from pathlib import Path
from typing import Any

import torch

from normlab.compare.run_one import Job, execute_job
from normlab.errors import NormLabError
from normlab.train.model_cache import keep_models

READY = "ready"


@dataclass(frozen=True)
class WorkerSlot:
    """Resources of one worker process."""

    threads: int
    gpu: str | None = None
    """Value of CUDA_VISIBLE_DEVICES; None: unchanged."""
    on_gpu: bool = False
    """Whether its runs are on a GPU."""


def serve(jobs: Connection, place: WorkerSlot) -> None:
    """Main loop of a worker process: execute runs until the pipe is closed."""
    # Only the comparison receives Ctrl-C; it then stops its workers.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    if place.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = place.gpu
    if place.on_gpu:
        # Otherwise the compiler of every process would start one worker per core.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(2, place.threads)))
        keep_models()
    torch.set_num_threads(place.threads)
    jobs.send(READY)
    with suppress(EOFError, ConnectionError):
        while True:
            answer = _do_next(jobs)
            is_well = not place.on_gpu or free_gpu()
            jobs.send((answer, is_well))
            if not is_well:
                return


def free_gpu() -> bool:
    """Free the memory that a run has left; return whether the GPU answers, which it never does after a device error."""
    # A run and its graphs refer to each other.
    gc.collect()
    # What is left stays: modules, compiled code, kept models. To go through it after every run takes 0.3 s and more.
    gc.freeze()
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


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
