"""A run that stops and goes on is the run that never stopped; a checkpoint of something else changes nothing."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

from normlab.errors import NormLabError
from normlab.train.storage import checkpoint
from normlab.train.storage.checkpoint import Checkpoints
from tests.train.runs import same_tensors
from tests.train.storage.saved import Run, names


def go_on_alone(_: int, folder: str) -> None:
    torch.set_num_threads(1)
    run = Run(seed=1)
    found = run.load(Path(folder, "checkpoints"))
    losses = run.steps(3)
    save_file(run.tensors(), Path(folder, "tensors.safetensors"))
    Path(folder, "facts.json").write_text(json.dumps([found, losses]))


@pytest.mark.full
def test_a_new_process_goes_on_bit_for_bit(tmp_path):
    straight = Run()
    losses = straight.steps(6)
    run = Run()
    run.steps(3)
    run.save(tmp_path / "checkpoints", 3, loader={"sequence": 12}, best=math.inf)
    mp.spawn(go_on_alone, args=(str(tmp_path),), nprocs=1)
    (step, extra), later = json.loads((tmp_path / "facts.json").read_text())
    assert (step, extra) == (3, {"loader": {"sequence": 12}, "best": math.inf})
    assert later == losses[3:]
    same_tensors(load_file(tmp_path / "tensors.safetensors"), straight.tensors())


def test_saving_disturbs_nothing(tmp_path):
    expected = Run().steps(3)
    run, losses = Run(), []
    for step in range(3):
        run.save(tmp_path, step)
        losses.append(run.step())
    assert losses == expected


def test_before_the_first_step(tmp_path):
    run = Run()
    expected = run.tensors()
    run.save(tmp_path, 0)
    other = Run(seed=1)
    assert other.load(tmp_path) == (0, {})
    same_tensors(other.tensors(), expected)


def test_without_a_checkpoint(tmp_path):
    assert Run().load(tmp_path / "absent") is None
    assert Run().load(tmp_path) is None
    assert Checkpoints(tmp_path).latest() is None


def test_the_settings_of_the_optimiser_come_back_but_not_how_it_computes(tmp_path):
    run = Run()
    run.optimiser.param_groups[0].update(lr=0.123, foreach=True)
    run.save(tmp_path, 1)
    other = Run()
    other.load(tmp_path)
    group = other.optimiser.param_groups[0]
    assert (group["lr"], group["betas"], group["foreach"]) == (0.123, (0.9, 0.999), None)


def test_an_optimiser_that_keeps_numbers_and_a_rate_that_is_a_tensor(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimiser = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5), momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimiser.step()
    optimiser.state[model.weight]["count"] = 3
    Checkpoints(tmp_path).save(1, model=model, optimiser=optimiser, extra={})
    fresh = torch.nn.Linear(3, 2)
    other = torch.optim.SGD(fresh.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    Checkpoints(tmp_path).load(fresh, other)
    assert other.state[fresh.weight]["count"] == 3
    assert torch.equal(other.state[fresh.weight]["momentum_buffer"], torch.ones(2, 3))
    assert torch.equal(other.param_groups[0]["lr"], torch.tensor(0.5))


def test_large_states_go_into_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_BYTES_A_FILE", 10_000)
    run = Run()
    run.step()
    run.save(tmp_path, 1)
    assert len(names(tmp_path / "step-00000001" / "tensors")) > 5
    other = Run(seed=1)
    other.load(tmp_path)
    same_tensors(other.tensors(), run.tensors())


def test_nothing_in_it_is_a_pickle(tmp_path):
    run = Run()
    run.step()
    run.save(tmp_path, 1)
    found = [path for path in (tmp_path / "step-00000001").rglob("*") if path.is_file()]
    assert {path.suffix for path in found} == {".json", ".safetensors"}


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5])])
def test_so_many_are_kept(tmp_path, keep, left):
    run = Run()
    for step in range(1, 6):
        run.save(tmp_path, step, keep)
    assert names(tmp_path) == [f"step-{step:08d}" for step in left]
    assert Checkpoints(tmp_path).latest() == tmp_path / "step-00000005"


def test_none_kept_is_refused(tmp_path):
    with pytest.raises(NormLabError, match="keep must be at least 1, got 0"):
        Checkpoints(tmp_path, keep=0)


def test_a_rollback_leaves_no_future_behind(tmp_path):
    run = Run()
    for step in (100, 200):
        run.save(tmp_path, step)
    run.save(tmp_path, 150, note="after a rollback")
    assert names(tmp_path) == ["step-00000100", "step-00000150"]
    assert run.load(tmp_path) == (150, {"note": "after a rollback"})


def test_the_same_step_again_replaces_the_first(tmp_path):
    run = Run()
    run.save(tmp_path, 1, keep=1, time=1)
    run.save(tmp_path, 1, keep=1, time=2)
    assert names(tmp_path) == ["step-00000001"]
    assert run.load(tmp_path) == (1, {"time": 2})


def test_a_crash_while_replacing_leaves_the_first(tmp_path):
    run = Run()
    run.save(tmp_path, 1, time=1)
    os.rename(tmp_path / "step-00000001", tmp_path / "step-00000001.old")
    assert run.load(tmp_path) == (1, {"time": 1})
    run.save(tmp_path, 1, time=2)
    assert names(tmp_path) == ["step-00000001"]


# -- something else ------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path):
    Run().save(tmp_path, 1)
    other = Run(scheme="peri")
    before = other.tensors()
    with pytest.raises(NormLabError, match=r"holds another model: .* here; build the model from the configuration"):
        other.load(tmp_path)
    same_tensors(other.tensors(), before)


def test_a_checkpoint_of_another_optimiser_changes_nothing(tmp_path):
    Run().save(tmp_path, 1)
    other = Run()
    other.optimiser = torch.optim.AdamW(other.model.parameters())
    with pytest.raises(NormLabError, match="was saved with other optimiser groups"):
        other.load(tmp_path)


def test_an_optimiser_of_another_model(tmp_path):
    one, other = Run(), Run()
    one.optimiser = other.optimiser
    with pytest.raises(NormLabError, match="a parameter that the model does not have"):
        one.save(tmp_path, 1)
