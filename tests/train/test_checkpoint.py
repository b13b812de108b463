"""A run that stops and goes on is the run that never stopped; a checkpoint is whole or is not used."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

import normlab
from normlab import files
from normlab.errors import NormLabError
from normlab.locks import hold
from normlab.train import checkpoint, rng
from normlab.train.checkpoint import Checkpoints
from normlab.train.distributed import ALONE, Group, initialise, shard, stop, whole
from normlab.train.weights import export_safetensors, load_weights, read_metadata
from tests.test_sharding import free_port
from tests.train.test_distributed import as_torchrun

SIZE = {"depth": 2, "dim": 32, "heads": 4, "kv_heads": 2, "vocab_size": 61, "hidden": 48}


class Run:
    """A small training run whose batches come from every random state there is."""

    def __init__(self, group: Group = ALONE, scheme: str = "rezero", seed: int = 7, lr: float = 1e-2):
        self.group = group
        model = normlab.Decoder(normlab.DecoderConfig(scheme=scheme, **SIZE), device="meta")
        self.model = initialise(shard(model, group), group, seed)
        self.optimiser = torch.optim.AdamW(self.model.param_groups(lr=lr, weight_decay=0.1))
        random.seed(seed + group.rank)
        np.random.seed(seed + group.rank)
        torch.manual_seed(seed + group.rank)

    def steps(self, count: int) -> list[float]:
        return [self.step() for _ in range(count)]

    def step(self) -> float:
        tokens = torch.randint(0, 61, (2, 9))
        tokens[0, 0], tokens[1, 0] = random.randrange(61), np.random.randint(61)
        # Both keep a second normal number back for the next call.
        weight = 1 + 0.1 * random.gauss(0, 1) + 0.1 * np.random.standard_normal()
        self.optimiser.zero_grad()
        loss = self.model.loss(tokens[:, :-1], tokens[:, 1:]) * weight
        loss.backward()
        self.optimiser.step()
        self.model.after_step()
        return loss.item()

    def save(self, folder: Path, step: int, keep: int = 2, **extra) -> None:
        Checkpoints(folder, keep, self.group).save(step, model=self.model, optimiser=self.optimiser, extra=extra)

    def load(self, folder: Path) -> tuple[int, dict] | None:
        return Checkpoints(folder, group=self.group).load(self.model, self.optimiser)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and everything the optimiser remembers, whole."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = whole(parameter.detach()).clone()
            for key, value in self.optimiser.state[parameter].items():
                found[f"{name}/{key}"] = whole(value).clone()
        return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# -- one process ---------------------------------------------------------------------------------------------------


def go_on_alone(_: int, folder: str) -> None:
    torch.set_num_threads(1)
    run = Run(seed=1)
    found = run.load(Path(folder, "checkpoints"))
    losses = run.steps(3)
    save_file(run.tensors(), Path(folder, "tensors.safetensors"))
    Path(folder, "facts.json").write_text(json.dumps([found, losses]))


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
    same(load_file(tmp_path / "tensors.safetensors"), straight.tensors())


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
    same(other.tensors(), expected)


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
    same(other.tensors(), run.tensors())


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


# -- torn ----------------------------------------------------------------------------------------------------------


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


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


@pytest.mark.parametrize("kind", TORN)
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
    same(other.tensors(), expected)
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
        same(run.tensors(), straight.tensors())
        run.save(folder, 2)
    assert names(folder) == ["step-00000001", "step-00000002"]


def full_disk(*_, **__) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_after_some_bytes(path: Path, mode: str = "r", *args, **kwargs):
    if "w" in mode and path.suffix == ".safetensors":
        path.touch()
        full_disk()
    return path.__class__._open(path, mode, *args, **kwargs)  # type: ignore[attr-defined]


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


# -- something else ------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path):
    Run().save(tmp_path, 1)
    other = Run(scheme="peri")
    before = other.tensors()
    with pytest.raises(NormLabError, match=r"holds another model: .* here; build the model from the configuration"):
        other.load(tmp_path)
    same(other.tensors(), before)


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


# -- two processes -------------------------------------------------------------------------------------------------


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
        mp.spawn(half, args=(free_port(), str(folder)), nprocs=2)
    return folder


def facts_of(folder: Path) -> dict:
    return json.loads((folder / "facts.json").read_text())


def test_two_ranks_go_on_bit_for_bit(of_two):
    straight = json.loads((of_two / "straight.json").read_text())["straight"]
    facts = facts_of(of_two)
    assert facts["found"] == [3, {"loader": 5}]
    assert facts["losses"] == [losses[3:] for losses in straight]
    same(load_file(of_two / "resumed.safetensors"), load_file(of_two / "at_the_end.safetensors"))


def test_from_two_ranks_to_one(of_two):
    run = Run(seed=1)
    assert run.load(of_two / "two") == (3, {"loader": 5})
    same(run.tensors(), load_file(of_two / "at_three.safetensors"))
    run.step()


def test_from_one_rank_to_two(of_two):
    same(load_file(of_two / "from_one.safetensors"), load_file(of_two / "one.safetensors"))


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
