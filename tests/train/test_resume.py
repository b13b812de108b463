"""A run that was killed, stopped, or left without a disk goes on, and ends as the one that nothing disturbed."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from normlab.errors import NormLabError
from normlab.train.result import TrainResult
from normlab.train.storage import sinks
from normlab.train.storage.folder import RunFolder
from normlab.train.storage.sinks import read_records
from normlab.train.trainer import train
from normlab.utils import files
from tests.matrix import parametrize
from tests.ranks import PRELOAD
from tests.train import child as child_of
from tests.train.runs import (
    STEPS,
    after_building,
    asks_to_stop,
    config_of,
    events,
    left_behind,
    numbers,
    same_run,
    spikes,
)


def status(path: Path) -> dict:
    return RunFolder(path).status


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


STOPPING = "stopping after this step; once more to stop at once\n"


# -- other processes -----------------------------------------------------------------------------------------------

CHILDREN = {"killed": "step", "killed in a save": "save", "term": "signal", "int": "signal", "int twice": "step"}


@pytest.fixture
def child(text, tmp_path, request):
    """A process that stands still in the middle of a run, and the folder of the run."""
    # One process imports torch; the others are forked from it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    path, config = tmp_path / request.param, json.dumps(config_of(text).to_dict())
    process = context.Process(target=child_of.main, args=(config, path, CHILDREN[request.param]))
    process.start()
    wait_until(lambda: path.with_suffix(".ready").exists(), process)
    yield process, path
    process.kill()
    process.join()


def wait_until(done, process) -> None:
    deadline = time.monotonic() + 300
    while not done():
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.full
@pytest.mark.parametrize("child", ["killed"], indirect=True)
def test_killed_in_the_middle(child, text, straight):
    process, path = child
    # While it lives, nobody else may write to its run.
    with pytest.raises(NormLabError, match=f"is in use by process {process.pid} on .*; wait until") as refused:
        train(config_of(text), path, progress=False)
    assert "\n" not in str(refused.value)
    process.kill()
    process.join()
    # Nobody could write down that it died; the checkpoint is behind the metrics.
    assert status(path)["state"] == "running"
    assert names(path / "checkpoints") == ["step-00000004"]
    assert numbers(path)[-1]["step"] == 7
    assert train(config_of(text), path, progress=False).state == "done"
    assert [(event["what"], event["step"]) for event in events(path)] == [("resume", 4)]
    same_run(path, straight)


@pytest.mark.full
@pytest.mark.parametrize("child", ["killed in a save"], indirect=True)
def test_killed_in_the_middle_of_a_save(child, text, straight):
    process, path = child
    process.kill()
    process.join()
    assert names(path / "checkpoints") == [".step-00000008.partial", "step-00000004"]
    assert train(config_of(text), path, progress=False).state == "done"
    same_run(path, straight)
    assert left_behind(path) == []


@parametrize(
    ("child", "number"), [("term", signal.SIGTERM), ("int", signal.SIGINT)], quick=["term"], indirect=["child"]
)
def test_a_signal_saves_and_stops(child, number, text, straight):
    process, path = child
    os.kill(process.pid, number)
    process.join()
    result = json.loads(path.with_suffix(".out").read_text())
    assert (result["state"], result["reason"], result["steps"]) == ("stopped", f"{number.name} received", 8)
    assert STOPPING in path.with_suffix(".err").read_text()
    found = status(path)
    assert (found["state"], found["step"], found["tokens"]) == ("stopped", 8, 8 * 4 * 32)
    assert found["reason"] == f"{number.name} received"
    assert names(path / "checkpoints") == ["step-00000004", "step-00000008"]
    assert train(config_of(text), path, progress=False).state == "done"
    assert [event["what"] for event in events(path)] == ["saved", "resume"]
    same_run(path, straight)


@pytest.mark.parametrize("child", ["int twice"], indirect=True)
def test_a_second_signal_stops_at_once(child, text, straight):
    process, path = child
    os.kill(process.pid, signal.SIGINT)
    # Two at once may arrive as one.
    wait_until(lambda: STOPPING in path.with_suffix(".err").read_text(), process)
    os.kill(process.pid, signal.SIGINT)
    process.join()
    assert "KeyboardInterrupt" in path.with_suffix(".err").read_text()
    assert (status(path)["state"], status(path)["reason"]) == ("stopped", "KeyboardInterrupt")
    assert names(path / "checkpoints") == ["step-00000004"]
    assert train(config_of(text), path, progress=False).state == "done"
    same_run(path, straight)


# -- torn and full disks -------------------------------------------------------------------------------------------


def stopped_at(step: int, text: Path, path: Path, **changes) -> TrainResult:
    with pytest.MonkeyPatch.context() as patch:
        after_building(patch, asks_to_stop(step))
        result = train(config_of(text, **changes), path, progress=False)
    assert (result.state, result.steps, result.reason) == ("stopped", step, "asked by a test")
    return result


@parametrize("step", [1, 5, 8, 19, STEPS], quick=[1, STEPS])
def test_stopped_at_any_step(step, text, straight, tmp_path):
    """The first step, one with an evaluation, one with a checkpoint, the last but one, the last."""
    stopped_at(step, text, tmp_path / "run")
    assert train(config_of(text), tmp_path / "run", progress=False).state == "done"
    same_run(tmp_path / "run", straight)


@pytest.mark.full
def test_stopped_at_every_step(text, straight, tmp_path):
    evaluated = {record["step"]: record["loss"] for record in numbers(straight) if record["kind"] == "eval"}
    for step in range(1, STEPS + 1):
        result = stopped_at(step, text, tmp_path)
        # The evaluation at the very end is still to come.
        assert result.loss == evaluated.get(min(step, STEPS - 1) // 5 * 5)
    result = train(config_of(text), tmp_path, progress=False)
    same_run(tmp_path, straight)
    # The clock goes on where it was, from session to session.
    seconds = [record["seconds"] for record in read_records(tmp_path / "metrics.jsonl") if record["kind"] == "step"]
    assert all(before < after for before, after in itertools.pairwise([0.0, *seconds]))
    assert result.seconds >= seconds[-1]
    assert result.tokens_per_s == result.tokens / result.seconds


def test_a_torn_checkpoint(text, straight, tmp_path):
    stopped_at(9, text, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-00000009"
    file = next((newest / "tensors").iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="torn checkpoint .*step-00000009: .* bytes instead of"):
        assert train(config_of(text), tmp_path / "run", progress=False).state == "done"
    assert events(tmp_path / "run", "resume")[0]["step"] == 8
    same_run(tmp_path / "run", straight)


def test_all_checkpoints_torn(text, tmp_path):
    stopped_at(3, text, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-00000003" / "manifest.json").unlink()
    with (
        pytest.warns(UserWarning, match="torn"),
        pytest.raises(NormLabError, match=r"no whole checkpoint in .*; remove it to start anew"),
    ):
        train(config_of(text), tmp_path / "run", progress=False)
    assert status(tmp_path / "run")["state"] == "failed"
    assert "no whole checkpoint" in status(tmp_path / "run")["reason"]


def test_other_data_is_refused_and_nothing_is_lost(text, tmp_path):
    copy = tmp_path / "text.txt"
    copy.write_text(text.read_text())
    stopped_at(6, copy, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    copy.write_text(text.read_text() + " and more")
    with pytest.raises(NormLabError, match="cannot resume on another corpus"):
        train(config_of(copy), tmp_path / "run", progress=False)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert status(tmp_path / "run")["state"] == "failed"


def test_the_guard_remembers(text, tmp_path):
    """A spike just after the run went on is seen by what was usual before it stopped."""
    for name, steps in (("straight", []), ("run", [17])):
        with pytest.MonkeyPatch.context() as patch:
            after_building(patch, spikes({18}))
            for step in steps:
                stopped_at(step, text, tmp_path / name)
            assert train(config_of(text), tmp_path / name, progress=False).state == "done"
        assert [event["step"] for event in events(tmp_path / name, "spike")] == [18]
    same_run(tmp_path / "run", tmp_path / "straight")


def full(*_args, **_options) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill(name: str, after: int = 0):
    """No room for a file of that name once it was written `after` times."""

    def change(patch) -> None:
        left, sync = after, files.sync

        def sync_or_fail(path: Path) -> None:
            nonlocal left
            left -= name in path.name
            full() if name in path.name and left < 0 else sync(path)

        patch.setattr(files, "sync", sync_or_fail)

    return change


def fill_the_folder(patch) -> None:
    replace = os.replace
    patch.setattr(os, "replace", lambda a, b: full() if b.name == "step-00000008" else replace(a, b))


def fill_the_tensors(patch) -> None:
    opened = Path.open

    def open_or_fail(path: Path, mode: str = "r", *args, **options):
        found = opened(path, mode, *args, **options)
        if "w" in mode and "step-00000008" in str(path) and path.parent.name == "tensors":
            found.close()
            full()
        return found

    patch.setattr(Path, "open", open_or_fail)


class FullFile:
    """A file of metrics on a disk that has room for so many lines; half of the next one still gets through."""

    def __init__(self, file, room: int):
        self.file, self.room = file, room

    def write(self, line: str) -> None:
        self.room -= 1
        if self.room < 0:
            self.file.write(line[: len(line) // 2])
            full()
        self.file.write(line)

    def __getattr__(self, name: str):
        return getattr(self.file, name)


def fill_the_metrics(patch) -> None:
    opened = sinks.JsonLines._open

    def open_full(self) -> None:
        opened(self)
        self._file = FullFile(self._file, 12)

    patch.setattr(sinks.JsonLines, "_open", open_full)


FULL = {
    "tensors": fill_the_tensors,
    "random states": fill("rank-00000", 1),
    "manifest": fill("manifest.json", 1),
    "rename": fill_the_folder,
    "metrics": fill_the_metrics,
    "status": fill("status.json", 3),
    "weights": fill("model.safetensors"),
}


@parametrize("where", FULL, quick=("tensors", "metrics"))
def test_a_full_disk(where, text, straight, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        FULL[where](patch)
        with pytest.raises(NormLabError, match="No space left on device; free some space") as caught:
            train(config_of(text), tmp_path / "run", progress=False)
    assert "\n" not in str(caught.value)
    assert left_behind(tmp_path / "run") == []
    assert not (tmp_path / "run" / "model.safetensors").exists()
    # Where the status itself could not be written, the one before is whole.
    found = status(tmp_path / "run")
    assert found["state"] == ("running" if where == "status" else "failed")
    assert where == "status" or "No space left" in found["reason"]
    assert train(config_of(text), tmp_path / "run", progress=False).state == "done"
    same_run(tmp_path / "run", straight)


# -- other runs ----------------------------------------------------------------------------------------------------


@parametrize(
    "changes",
    [
        {"optimiser": "muon"},
        {"model": {"experts": 4, "hidden": 32}},
        {"precision": "bf16"},
        {"base_dim": 16, "base_depth": 1},
        {"boundaries": "respected", "accumulate": 2, "z_loss": 1e-4},
        {"model": {"scheme": "ngpt"}},
        {"model": {"checkpointing": True, "stream": "bf16"}, "schedule": "wsd"},
    ],
    quick=[{"optimiser": "muon"}, {"model": {"scheme": "ngpt"}}],
    ids=lambda changes: ", ".join(changes),
)
def test_every_kind_of_run_goes_on_bit_for_bit(changes, text, tmp_path):
    assert train(config_of(text, steps=6, **changes), tmp_path / "straight", progress=False).state == "done"
    stopped_at(3, text, tmp_path / "run", steps=6, **changes)
    assert train(config_of(text, steps=6, **changes), tmp_path / "run", progress=False).state == "done"
    same_run(tmp_path / "run", tmp_path / "straight")
