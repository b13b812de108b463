"""Processes of this machine: who gets what, and what is said of one that dies."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from normlab.compare import CompareConfig, worker_process, workers
from normlab.compare.plan import PlannedRun
from normlab.compare.run_one import Job, last_step
from normlab.compare.worker_process import WorkerSlot, _output_in, free_gpu, serve
from normlab.compare.workers import ProcessPool, _cause, worker_slots
from normlab.errors import NormLabError
from normlab.utils import machine
from tests.compare import small


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def configuration(device: str = "auto", **changes: Any) -> CompareConfig:
    return small.configuration("text", of_base={"device": device}, **({"workers": None} | changes))


@pytest.mark.usefixtures("gpus")
def test_a_process_a_gpu() -> None:
    assert worker_slots(configuration().run_settings) == [WorkerSlot(2, str(i), on_gpu=True) for i in range(3)]
    five = worker_slots(configuration("cuda", workers=5).run_settings)
    assert [place.gpu for place in five] == ["0", "1", "2", "0", "1"]


@pytest.mark.usefixtures("gpus")
def test_gpus_that_the_user_left_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-5f,2")
    assert [place.gpu for place in worker_slots(configuration().run_settings)] == ["7", "GPU-5f", "2"]


@pytest.mark.usefixtures("gpus")
def test_a_gpu_that_the_user_named_is_the_only_one() -> None:
    assert worker_slots(configuration("cuda:1").run_settings) == [WorkerSlot(8, None, on_gpu=True)]


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("workers", "count", "threads"),
    # Two schemes with two rates or seeds each: never more than four at once.
    [(None, 4, 2), (1, 1, 8), (3, 3, 2), (16, 16, 1)],
)
def test_processes_share_the_cores(workers: int | None, count: int, threads: int) -> None:
    assert worker_slots(configuration("cpu", workers=workers).run_settings) == [WorkerSlot(threads)] * count


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_limit_on_threads_is_no_limit_on_processes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(machine, "cores", lambda: 8)
    assert worker_slots(configuration("cpu").run_settings) == [WorkerSlot(1)] * 4
    assert worker_slots(configuration("cpu", workers=1).run_settings) == [WorkerSlot(1)]
    assert worker_slots(configuration().run_settings) == [WorkerSlot(1, str(i), on_gpu=True) for i in range(3)]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-signal.SIGKILL, "killed (SIGKILL), perhaps because memory ran out"),
        (-signal.SIGSEGV, "killed (SIGSEGV)"),
        (3, "ended with code 3"),
    ],
)
def test_the_cause_of_death_is_named(code: int, words: str) -> None:
    assert words in _cause(code)


def test_what_is_printed_goes_into_the_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with _output_in(tmp_path / "run"):
        os.write(1, b"out ")
        subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write('err')"], timeout=60)
    assert (tmp_path / "run" / "output.txt").read_text() == "out err"
    assert capfd.readouterr() == ("", "")
    with _output_in(tmp_path / "silent"):
        pass
    assert list((tmp_path / "silent").iterdir()) == []


def test_the_newest_step_is_read_from_metrics_that_are_being_written(tmp_path: Path) -> None:
    assert last_step(tmp_path) is None
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "step": 4}\n{"kind": "profile", "layers": []}\n{"kind": "step", "st')
    assert last_step(tmp_path) == {"kind": "step", "step": 4}
    path.write_text('{"kind": "step", "step": 1}\n' * 10_000 + '{"kind": "step", "step": 9}\n')
    assert last_step(tmp_path) == {"kind": "step", "step": 9}


@pytest.mark.full
def test_other_text_than_at_the_beginning_is_an_error_and_no_failed_run(text: Path, tmp_path: Path) -> None:
    run = small.configuration(text).plan().tune()[0]
    pool = ProcessPool([WorkerSlot(1)])
    job = Job(run, tmp_path / "run", "another fingerprint")
    pool.start(job)
    assert pool.running == [job]
    assert not pool.is_free
    ended = []
    while pool.running:
        ended += pool.wait(60.0)
    pool.close()
    assert isinstance(ended[0][1], NormLabError)
    assert "other data than the comparison began with" in str(ended[0][1])


def test_a_process_that_is_killed_before_it_is_ready_is_interrupted(text: Path, tmp_path: Path) -> None:
    run = small.configuration(text).plan().tune()[0]
    pool = ProcessPool([WorkerSlot(1)])
    pool.start(Job(run, tmp_path / "run", ""))
    process = next(iter(pool._workers.values()))._process
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    ended = pool.wait(60.0)
    pool.close()
    assert isinstance(ended[0][1], dict)
    assert ended[0][1]["state"] == "interrupted"
    assert "killed (SIGKILL)" in ended[0][1]["reason"]


def test_ctrl_c_does_not_end_the_first_process_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a new interpreter: the tracker of multiprocessing starts with the first process, and then unblocks SIGINT.
    tracker = resource_tracker.ResourceTracker()
    for name in ("ensure_running", "getfd"):
        monkeypatch.setattr(resource_tracker, name, getattr(tracker, name))
    worker = workers._Worker(WorkerSlot(1))
    os.kill(worker._process.pid or 0, signal.SIGINT)
    try:
        assert worker.answers.recv() == worker_process.READY
    finally:
        worker.end()


def test_a_process_that_is_killed_while_it_answers_is_interrupted(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = workers._Worker.__new__(workers._Worker)
    ours, theirs = multiprocessing.Pipe()
    # A message of 100 bytes of which three arrive.
    os.write(theirs.fileno(), struct.pack("!i", 100) + b"row")
    theirs.close()
    worker.job = Job(small.configuration(text).plan().tune()[0], tmp_path / "run", "")
    worker.answers, worker._is_ready, worker._stopped, worker._began = ours, True, False, "now"
    killed: Any = SimpleNamespace(join=lambda: None, exitcode=-signal.SIGKILL)
    worker._process = killed
    ended = worker.answer()
    assert ended is not None
    assert isinstance(ended[1], dict)
    assert (ended[1]["state"], worker.is_spent) == ("interrupted", True)


def test_a_gpu_that_is_not_there_is_refused_before_any_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(NormLabError, match="device cuda was asked for, but there is no GPU"):
        worker_slots(configuration("cuda").run_settings)
    assert worker_slots(configuration("auto").run_settings)[0].gpu is None


def test_closing_leaves_no_process_behind(text: Path, tmp_path: Path) -> None:
    run = small.configuration(text, **small.long()).plan().runnable([])[0]
    pool = ProcessPool([WorkerSlot(1)])
    pool.start(Job(run, tmp_path / "run", ""))
    process = next(iter(pool._workers.values()))._process
    pool.close()
    # Killed, not waited for.
    assert process.exitcode == -signal.SIGKILL


# -- processes that keep what they have compiled ---------------------------------------------------------------------


class Idle:
    """A worker in place of a process: it has executed runs of some shapes, and may have a run now."""

    def __init__(self, place: WorkerSlot):
        self.job: Job | None = None
        self.shapes: set[str] = set()

    def take(self, job: Job, shape: str) -> None:
        self.job = job
        self.shapes.add(shape)


@pytest.fixture
def two_places(monkeypatch: pytest.MonkeyPatch) -> ProcessPool:
    monkeypatch.setattr(workers, "_Worker", Idle)
    return ProcessPool([WorkerSlot(1, "0", on_gpu=True)] * 2)


def runs(text: Path, *schemes: str) -> list[PlannedRun]:
    """Two judge runs of every scheme, in the order in which they are due."""
    return small.configuration(text, schemes=schemes, lrs=(1e-3,)).plan().runnable([])


def test_a_process_gets_runs_that_it_has_compiled(text: Path, tmp_path: Path, two_places: ProcessPool) -> None:
    pool, (pre, post, peri, pre_again, post_again, _) = two_places, runs(text, "pre", "post", "peri")
    assert pool.choose([pre, post, peri]) == 0
    for run in (pre, post):
        pool.start(Job(run, tmp_path, ""))
    first, second = pool._workers.values()
    assert not pool.is_free
    second.job = None
    # The next in order is another shape, and so is the one after it.
    due = [peri, pre_again, post_again]
    assert pool.choose(due) == 2
    pool.start(Job(post_again, tmp_path, ""))
    assert second.job is not None
    assert second.job.run is post_again
    # Both free: the run goes where its model is.
    first.job = second.job = None
    pool.start(Job(post, tmp_path, ""))
    assert second.job is not None
    assert first.job is None


def test_a_run_is_not_overtaken_for_ever(text: Path, tmp_path: Path, two_places: ProcessPool) -> None:
    pool, (pre, peri, pre_again, _) = two_places, runs(text, "pre", "peri")
    pool.start(Job(pre, tmp_path, ""))
    pool._workers[0].job = None
    assert [pool.choose([peri, pre_again]) for _ in range(4)] == [1, 1, 0, 0]
    assert pool.choose([pre_again]) == 0


def test_on_a_cpu_runs_keep_their_order(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_Worker", Idle)
    pool, (pre, peri, pre_again, _) = ProcessPool([WorkerSlot(1)]), runs(text, "pre", "peri")
    monkeypatch.setattr(workers, "shape_of", lambda _: pytest.fail("nothing is compiled"))
    pool.start(Job(pre, tmp_path, ""))
    pool._workers[0].job, pool._workers[0].shapes = None, set()
    assert pool.choose([peri, pre_again]) == 0


def test_a_gpu_that_answers_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: done.append(name))
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    assert free_gpu()
    assert done == ["freeze", "synchronize", "empty_cache"]

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert not free_gpu()


class Lines:
    """The two ends of a worker's pipe, in one process."""

    def __init__(self, *jobs: Any):
        self.jobs, self.sent = list(jobs), []

    def recv(self) -> Any:
        if not self.jobs:
            raise EOFError
        return self.jobs.pop(0)

    def send(self, answer: Any) -> None:
        self.sent.append(answer)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Any]]:
    """What the process of a worker answers to some jobs."""
    for name in ("setsid", "kill"):
        monkeypatch.setattr(os, name, lambda *_: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(worker_process, "_stop_with_parent", lambda: None)
    monkeypatch.setattr(worker_process, "keep_models", lambda: None)
    monkeypatch.setattr(worker_process, "execute_job", lambda job: {"run": job.folder.name})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "2")

    def answers(*names: str, on_gpu: bool) -> list[Any]:
        lines = Lines(*(SimpleNamespace(folder=tmp_path / name) for name in names))
        serve(lines, WorkerSlot(1, "0" if on_gpu else None, on_gpu=on_gpu))  # type: ignore[arg-type]
        return lines.sent

    return answers


def test_a_process_executes_many_runs(served: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "free_gpu", lambda: True)
    assert served("a", "b", on_gpu=True) == ["ready", ({"run": "a"}, True), ({"run": "b"}, True)]
    assert served("a", "b", on_gpu=False) == ["ready", ({"run": "a"}, True), ({"run": "b"}, True)]


def test_a_process_ends_after_a_device_error(served: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "free_gpu", lambda: False)
    answers = served("a", "b", on_gpu=True)
    assert answers == ["ready", ({"run": "a"}, False)]
    # And the parent takes the result and replaces the process.
    worker = workers._Worker.__new__(workers._Worker)
    worker.job, worker.is_spent, worker._is_ready = "job", False, False  # type: ignore[assignment]
    worker.answers = Lines(*answers)  # type: ignore[assignment]
    assert worker.answer() is None
    assert worker.answer() == ("job", {"run": "a"})
    assert worker.is_spent
