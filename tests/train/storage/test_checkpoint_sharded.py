"""Checkpoints of two ranks: the same run goes on, on as many ranks or on another number of them."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from normlab.errors import NormLabError
from normlab.probes.sharded import whole
from normlab.train.distributed import Group, stop
from normlab.train.storage.weights import export_safetensors, load_weights, read_metadata
from tests.ranks import free_port, spawn
from tests.train.runs import same_tensors
from tests.train.storage.saved import Run, flip_a_bit, full_after_some_bytes, names
from tests.train.test_distributed import as_torchrun

# Each test looks at what four pairs of processes have left.
pytestmark = pytest.mark.full


def first_half(rank: int, port: int, folder: str) -> None:
    group = as_torchrun(rank, port)
    straight = Run(group)
    facts = {"straight": group.gather(straight.steps(6))}
    at_the_end = straight.tensors()
    run = Run(group)
    run.steps(3)
    with torch.no_grad():
        # As after an evaluation: weights outside the layers are still gathered.
        run.model.loss(torch.zeros(1, 8, dtype=torch.long), torch.ones(1, 8, dtype=torch.long))
    run.save(Path(folder, "two"), 3, loader=5)
    at_three = run.tensors()
    if group.is_main:
        save_file(at_three, Path(folder, "at_three.safetensors"))
        save_file(at_the_end, Path(folder, "at_the_end.safetensors"))
        Path(folder, "straight.json").write_text(json.dumps(facts))
    stop(group)
    os._exit(0)


def second_half(rank: int, port: int, folder: str) -> None:
    group = as_torchrun(rank, port)
    run = Run(group, seed=1)
    facts = {"found": run.load(Path(folder, "two")), "losses": group.gather(run.steps(3))}
    tensors = run.tensors()
    export_safetensors(run.model, Path(folder, "model.safetensors"), {"ranks": 2}, group)
    group.gather(None)
    other = Run(group, seed=2)
    load_weights(Path(folder, "model.safetensors"), other.model)
    weights = {name: whole(parameter.detach()) for name, parameter in other.model.named_parameters()}
    facts["weights"] = all(torch.equal(weight, tensors[name]) for name, weight in weights.items())
    facts["full"] = fails_on_the_second_rank(group, run, Path(folder, "full"))
    facts["torn"] = falls_back(group, run, Path(folder, "torn"))
    other.load(Path(folder, "one"))
    from_one = other.tensors()
    if group.is_main:
        save_file(from_one, Path(folder, "from_one.safetensors"))
        save_file(tensors, Path(folder, "resumed.safetensors"))
        Path(folder, "facts.json").write_text(json.dumps(facts))
    stop(group)
    os._exit(0)


def fails_on_the_second_rank(group: Group, run: Run, folder: Path) -> list[list[str]]:
    """What each rank hears when the disk of one of them is full, and what is left in the folder."""
    run.save(folder, 1)
    if group.rank == 1:
        Path._open, Path.open = Path.open, full_after_some_bytes  # type: ignore[attr-defined, method-assign]
    try:
        run.save(folder, 2)
        heard = ""
    except NormLabError as error:
        heard = str(error)
    if group.rank == 1:
        Path.open = Path._open  # type: ignore[attr-defined, method-assign]
    return [group.gather(heard), names(folder)]


def falls_back(group: Group, run: Run, folder: Path) -> list[int]:
    for step in (1, 2):
        run.save(folder, step)
    if group.is_main:
        flip_a_bit(max((folder / "step-00000002" / "tensors").iterdir()))
    group.gather(None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run.load(folder)
    said = len([w for w in caught if "torn checkpoint" in str(w.message)])
    return [found[0] if found else -1, *group.gather(said)]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    alone = Run()
    alone.steps(2)
    alone.save(folder / "one", 2)
    save_file(alone.tensors(), folder / "one.safetensors")
    for half in (first_half, second_half):
        spawn(half, args=(free_port(), str(folder)), nprocs=2)
    return folder


def facts_of(folder: Path) -> dict:
    return json.loads((folder / "facts.json").read_text())


def test_two_ranks_go_on_bit_for_bit(of_two):
    straight = json.loads((of_two / "straight.json").read_text())["straight"]
    facts = facts_of(of_two)
    assert facts["found"] == [3, {"loader": 5}]
    assert facts["losses"] == [losses[3:] for losses in straight]
    same_tensors(load_file(of_two / "resumed.safetensors"), load_file(of_two / "at_the_end.safetensors"))


def test_from_two_ranks_to_one(of_two):
    run = Run(seed=1)
    assert run.load(of_two / "two") == (3, {"loader": 5})
    same_tensors(run.tensors(), load_file(of_two / "at_three.safetensors"))
    run.step()


def test_from_one_rank_to_two(of_two):
    same_tensors(load_file(of_two / "from_one.safetensors"), load_file(of_two / "one.safetensors"))


def test_two_ranks_export_whole_weights_and_share_them_out_again(of_two):
    assert facts_of(of_two)["weights"]
    assert read_metadata(of_two / "model.safetensors") == {"ranks": 2}
    run = Run(seed=1)
    load_weights(of_two / "model.safetensors", run.model)
    expected = load_file(of_two / "resumed.safetensors")
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_a_full_disk_of_one_rank_stops_both_and_harms_nothing(of_two):
    heard, left = facts_of(of_two)["full"]
    assert all("No space left on device; free some space" in text for text in heard)
    assert left == ["step-00000001"]


def test_both_ranks_fall_back_and_one_says_so(of_two):
    assert facts_of(of_two)["torn"] == [1, 1, 0]
