"""A checkpoint is whole or is not used: torn files, a writer that is killed, a disk that is full."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch.multiprocessing as mp

from normlab.errors import NormLabError
from normlab.train.storage import checkpoint, rng
from normlab.utils import files
from normlab.utils.locks import hold
from tests.matrix import parametrize
from tests.train.runs import same_tensors
from tests.train.storage.saved import Run, flip_a_bit, full_after_some_bytes, full_disk, names


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def first(folder: Path, pattern: str) -> Path:
    return next(folder.glob(pattern))


TORN = {
    "tensors missing": (lambda f: first(f, "tensors/*").unlink(), "tensors/.* is missing"),
    "tensors cut short": (lambda f: cut_short(first(f, "tensors/*")), r"tensors/.* has \d+ bytes instead of \d+"),
    "tensors changed": (lambda f: flip_a_bit(first(f, "tensors/*")), "tensors/.* has changed since it was written"),
    "tensors added": (lambda f: shutil.copy(first(f, "tensors/*"), f / "tensors/x.safetensors"), "does not belong"),
    "random states missing": (lambda f: shutil.rmtree(f / "rng"), "rng/rank-00000.safetensors is missing"),
    "state changed": (lambda f: flip_a_bit(f / "state.json"), "state.json has changed"),
    "manifest missing": (lambda f: (f / "manifest.json").unlink(), "cannot read .*manifest.json"),
    "manifest torn": (lambda f: cut_short(f / "manifest.json") or cut_short(f / "manifest.json"), "is torn or is not"),
    "manifest empty": (lambda f: (f / "manifest.json").write_text("{}"), "manifest.json is not one"),
    "manifest of another": (lambda f: shutil.copy(f.parent / "step-00000001/manifest.json", f), "is that of step 1"),
    "empty": (lambda f: (shutil.rmtree(f), f.mkdir()), "cannot read .*manifest.json"),
}


@parametrize("kind", TORN, quick=["tensors missing", "tensors changed", "manifest torn", "empty"])
def test_a_torn_one_is_named_and_the_one_before_is_used(tmp_path, kind):
    tear, complaint = TORN[kind]
    run = Run()
    run.step()
    run.save(tmp_path, 1)
    expected = run.tensors()
    run.step()
    run.save(tmp_path, 2)
    tear(tmp_path / "step-00000002")
    other = Run(seed=1)
    with pytest.warns(UserWarning, match=f"torn checkpoint .*step-00000002: .*{complaint}") as warned:
        assert other.load(tmp_path) == (1, {})
    assert "\n" not in str(warned[0].message)
    same_tensors(other.tensors(), expected)
    # And the run goes on over it.
    other.save(tmp_path, 2)
    assert other.load(tmp_path) == (2, {})


def test_all_torn_is_an_error_and_not_a_fresh_start(tmp_path):
    run = Run()
    run.save(tmp_path, 1)
    flip_a_bit(tmp_path / "step-00000001" / "state.json")
    complaint = r"no whole checkpoint in .* \(step-00000001: state.json has changed.*; remove it to start anew"
    with pytest.warns(UserWarning, match="torn"), pytest.raises(NormLabError, match=complaint):
        run.load(tmp_path)


def save_and_hang(_: int, folder: str) -> None:
    run = Run()
    run.step()
    with hold(Path(folder, "lock")):
        run.save(Path(folder, "checkpoints"), 1)
        run.step()
        checkpoint.digest = lambda path: (Path(folder, "writing").touch(), time.sleep(60))
        run.save(Path(folder, "checkpoints"), 2)


@pytest.mark.full
def test_killed_in_the_middle_of_a_save(tmp_path):
    context = mp.spawn(save_and_hang, args=(str(tmp_path),), nprocs=1, join=False)
    writer, folder = context.processes[0], tmp_path / "checkpoints"
    while not (tmp_path / "writing").exists():
        assert writer.is_alive()
        time.sleep(0.01)
    # A second writer is refused while the first one lives.
    with pytest.raises(NormLabError, match=f"is in use by process {writer.pid} on "), hold(tmp_path / "lock"):
        pass
    writer.kill()
    writer.join()
    assert names(folder) == [".step-00000002.partial", "step-00000001"]
    assert (folder / ".step-00000002.partial" / "tensors").exists()
    straight = Run()
    straight.step()
    run = Run(seed=1)
    with hold(tmp_path / "lock"):
        assert run.load(folder) == (1, {})
        same_tensors(run.tensors(), straight.tensors())
        run.save(folder, 2)
    assert names(folder) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("where", ["tensors", "random states", "state", "manifest", "rename"])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, where):
    run = Run()
    run.step()
    run.save(tmp_path, 1, keep=1)
    with monkeypatch.context() as patch:
        if where == "tensors":
            patch.setattr(Path, "_open", Path.open, raising=False)
            patch.setattr(Path, "open", full_after_some_bytes)
        elif where == "random states":
            patch.setattr(rng, "write_atomically", full_disk)
        elif where == "rename":
            patch.setattr(checkpoint.os, "replace", full_disk)
        else:
            patch.setattr(checkpoint, "write_json", _fails_for(where))
        with pytest.raises(NormLabError, match="No space left on device; free some space") as caught:
            run.save(tmp_path, 2, keep=1)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["step-00000001"]
    assert run.load(tmp_path) == (1, {})


def _fails_for(stem: str):
    def write(path: Path, value: object) -> None:
        full_disk() if path.stem == stem else files.write_json(path, value)

    return write


def test_an_extra_that_json_cannot_carry_leaves_nothing(tmp_path):
    run = Run()
    with pytest.raises(NormLabError, match="not JSON serializable"):
        run.save(tmp_path, 1, loader=object())
    assert names(tmp_path) == []
