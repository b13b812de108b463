"""Processes of this machine: who gets what, and what is said of one that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from normlab.compare import CompareConfig
from normlab.compare.run_one import Job, last_step
from normlab.compare.workers import ProcessPool, WorkerSlot, _cause, _output_in, worker_slots
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
def test_a_process_a_gpu_each_for_one_run() -> None:
    assert worker_slots(configuration().run_settings) == [WorkerSlot(2, str(i), once=True) for i in range(3)]
    five = worker_slots(configuration("cuda", workers=5).run_settings)
    assert [place.gpu for place in five] == ["0", "1", "2", "0", "1"]


@pytest.mark.usefixtures("gpus")
def test_gpus_that_the_user_left_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-5f,2")
    assert [place.gpu for place in worker_slots(configuration().run_settings)] == ["7", "GPU-5f", "2"]


@pytest.mark.usefixtures("gpus")
def test_a_gpu_that_the_user_named_is_the_only_one() -> None:
    assert worker_slots(configuration("cuda:1").run_settings) == [WorkerSlot(8, None, once=True)]


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
    assert worker_slots(configuration().run_settings) == [WorkerSlot(1, str(i), once=True) for i in range(3)]


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


def test_runs_that_share_a_gpu_begin_one_after_the_other(text: Path, tmp_path: Path) -> None:
    run = small.configuration(text, **small.long()).plan().runnable([])[0]
    pool = ProcessPool([WorkerSlot(1, "0", once=True), WorkerSlot(1, "0", once=True), WorkerSlot(1, "1", once=True)])
    try:
        assert pool._free_place() == 0
        pool.start(Job(run, tmp_path / "run", ""))
        # It has made no step yet: another one would compile at the same time and leave the GPU idle.
        assert pool._free_place() == 2
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "metrics.jsonl").write_text('{"kind": "step", "step": 1}\n')
        assert pool._free_place() == 1
    finally:
        pool.close()
    alone = ProcessPool([WorkerSlot(1, "0", once=True)])
    assert alone.is_free
