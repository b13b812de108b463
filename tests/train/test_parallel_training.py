"""Two processes train as one does: the same losses, the same order of the data, one error for all."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from normlab.errors import NormLabError
from normlab.train.config import TrainConfig
from normlab.train.monitor import stuck
from normlab.train.resume import resumed
from normlab.train.storage.folder import RunFolder
from normlab.train.trainer import Trainer, train
from normlab.utils.locks import hold
from tests.matrix import parametrize
from tests.ranks import free_port, spawn
from tests.train.runs import MARK, after_building, asks_to_stop, config_of, events, losses, numbers, spoils
from tests.train.test_distributed import TORCHRUN
from tests.train.test_tasks import config_of as config_of_task

STEPS = 8
# Losses of some units in float32 are sums in another order on two ranks: about 1e-7 of them a step. AdamW hands such a
# difference on where it changes a gradient much larger than `eps`; over 8 steps it stays far below this.
ROUND_OFF = 1e-5
TWO_RANKS: dict[str, dict] = {
    "plain": {},
    "plain, accumulated": {"accumulate": 2},
    # Of 32 tokens a sequence and two sequences a rank: half a sequence is left for the second rank, or nothing.
    "short evaluation": {"eval_tokens": 80},
    "shorter evaluation": {"eval_tokens": 60},
    "muon": {"optimiser": "muon"},
    "experts": {"model": {"experts": 4, "hidden": 32, "balance_weight": 0.0}},
    "ngpt": {"model": {"scheme": "ngpt"}},
    "bf16": {"precision": "bf16"},
    # Parts and processes differ in how many tokens are masked.
    "masked": {},
    "masked, accumulated": {"accumulate": 2},
    "images": {},
}


def config_for(text: Path, name: str) -> TrainConfig:
    known: dict = {"steps": STEPS, "evals": 2, "saves": 2, "eps": 1e-6}
    others: dict[str, dict] = {
        "rolled back": {"trouble": "rollback"},
        "images, accumulated": {"accumulate": 2},
        # At such a rate nothing is learnt.
        "hopeless": {"lr": 1e-9, "stop_hopeless": True},
    }
    changes = known | (TWO_RANKS | others).get(name, {})
    task = name.partition(",")[0]
    return config_of_task(task, text, **changes) if task in ("masked", "images") else config_of(text, **changes)


def ranks(rank: int, ports: list[int], text: str, room: str) -> None:
    """Every run of this file that takes two processes, one after the other."""
    torch.set_num_threads(1)
    os.environ.update(dict(zip(TORCHRUN, (str(rank), "2", str(rank), "127.0.0.1", ""), strict=True)))
    folder = Path(room)
    runs = [(name, lambda patch: None) for name in TWO_RANKS]
    # Only the second is asked to stop; only the second's batch is bad.
    stopping = asks_to_stop(5) if rank == 1 else lambda trainer: None
    runs.append(("two, then one", lambda patch: after_building(patch, stopping)))
    runs.append(("one, then two", lambda patch: None))
    runs.append(("spoiled", lambda patch: after_building(patch, spoils({3}, rank=1))))
    runs.append(("rolled back", lambda patch: after_building(patch, spoils({7}, rank=1))))
    runs.append(("hopeless", lambda patch: patch.setattr(stuck, "PATIENCE", 3)))
    for port, (name, disturb) in zip(ports, runs, strict=False):
        os.environ["MASTER_PORT"] = str(port)
        with pytest.MonkeyPatch.context() as patch:
            disturb(patch)
            result = train(config_for(Path(text), name), folder / name, progress=False)
        (folder / f"{name}.{rank}.json").write_text(json.dumps(result.to_dict()))
    os.environ["MASTER_PORT"] = str(ports[-2])
    continue_with_more_tokens(Path(text), folder / "continued")
    os.environ["MASTER_PORT"] = str(ports[-1])
    try:
        train(config_for(Path(text), "locked"), folder / "locked", progress=False)
    except NormLabError as error:
        (folder / f"locked.{rank}.txt").write_text(str(error))
    breaks(rank, Path(text), folder)
    os._exit(0)


def continue_with_more_tokens(text: Path, folder: Path) -> None:
    """A run that is finished, continued to twice its steps by as many processes as call this."""
    config = config_for(text, "plain")
    if not RunFolder(folder).exists:
        assert train(config, folder, progress=False, continuable=True).state == "done"
    longer = dataclasses.replace(RunFolder(folder).config, tokens=2 * config.tokens)
    train(resumed(folder, longer), folder, progress=False)


def breaks(rank: int, text: Path, folder: Path) -> None:
    """One process ends in the middle of a run; the other must not wait for it."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            after_building(patch, fails_at(3))
        with pytest.raises(RuntimeError) as caught:
            train(config_for(text, "broken"), folder / "broken", progress=False)
    (folder / f"broken.{rank}.txt").write_text(str(caught.value))


def fails_at(step: int):
    def change(trainer: Trainer) -> None:
        go = trainer._gradient

        def gradient(parts):
            if trainer.step == step - 1:
                raise RuntimeError("something nobody foresaw")
            return go(parts)

        trainer._gradient = gradient

    return change


@pytest.fixture(scope="module")
def room(text, tmp_path_factory) -> Path:
    """The folder of all runs of two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        after_building(patch, asks_to_stop(5))
        train(config_for(text, "one, then two"), folder / "one, then two", progress=False)
    (folder / "locked").mkdir()
    # One process finished it.
    train(config_for(text, "plain"), folder / "continued", progress=False, continuable=True)
    ports = [free_port() for _ in range(len(TWO_RANKS) + 7)]
    with hold(folder / "locked" / "lock"):
        spawn(ranks, args=(ports, str(text), str(folder)), nprocs=2)
    return folder


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    """The same runs in one process, each made once."""
    folder = tmp_path_factory.mktemp("alone")

    def run(name: str) -> Path:
        if not (folder / name).exists():
            assert train(config_for(text, name), folder / name, progress=False).state == "done"
        return folder / name

    return run


def norms(folder: Path) -> list[float]:
    return [record["grad_norm"] for record in numbers(folder) if record["kind"] == "step"]


def close(found: Path, expected: Path, tolerance: float = ROUND_OFF) -> None:
    for kind in ("step", "eval"):
        assert losses(found, kind) == pytest.approx(losses(expected, kind), rel=tolerance)
    # The root of a sum of squares, each of which rounds as a loss does.
    assert norms(found) == pytest.approx(norms(expected), rel=10 * tolerance)
    pairs = zip(numbers(found), numbers(expected), strict=True)
    assert all(one["kind"] == other["kind"] and one["step"] == other["step"] for one, other in pairs)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in TWO_RANKS if name != "bf16"])
def test_two_processes_train_as_one(name, room, alone):
    assert len(losses(room / name)) == STEPS
    close(room / name, alone(name))
    mine, others = (json.loads((room / f"{name}.{rank}.json").read_text()) for rank in (0, 1))
    assert (mine["state"], mine["loss"], mine["steps"]) == (others["state"], others["loss"], others["steps"])
    found, expected = (load_file(path / "model.safetensors") for path in (room / name, alone(name)))
    assert {key: tensor.shape for key, tensor in found.items()} == {key: t.shape for key, t in expected.items()}


@pytest.mark.full
def test_profiles_are_those_of_one_process(room, alone):
    for one, other in zip(numbers(room / "plain"), numbers(alone("plain")), strict=True):
        if one["kind"] == "profile":
            assert one["hidden_rms"] == pytest.approx(other["hidden_rms"], rel=10 * ROUND_OFF)
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=10 * ROUND_OFF)


@pytest.mark.full
def test_bf16_over_two_processes(room, alone):
    # FSDP casts weights and autocast products: both round to 8 bits, at other places.
    close(room / "bf16", alone("bf16"), tolerance=2.0**-7)


@pytest.mark.full
def test_two_ranks_stop_when_one_is_asked_to_and_one_goes_on(room, alone, text):
    for rank, reason in ((0, "another process was asked to stop"), (1, "asked by a test")):
        result = json.loads((room / f"two, then one.{rank}.json").read_text())
        assert (result["state"], result["steps"], result["reason"]) == ("stopped", 5, reason)
    assert train(config_for(text, ""), room / "two, then one", progress=False).state == "done"
    close(room / "two, then one", alone("plain"))


@pytest.mark.full
def test_one_rank_stops_and_two_go_on(room, alone):
    assert json.loads((room / "one, then two.1.json").read_text())["state"] == "done"
    assert [event["step"] for event in events(room / "one, then two", "resume")] == [5]
    close(room / "one, then two", alone("plain"))


@pytest.mark.full
def test_two_processes_continue_a_finished_run_as_one_does(room, text, tmp_path):
    continue_with_more_tokens(text, tmp_path / "run")
    close(room / "continued", tmp_path / "run")
    assert len(losses(room / "continued")) == 2 * STEPS
    run = RunFolder(room / "continued")
    assert (run.status["state"], run.config.continued) == ("done", (STEPS,))
    assert run.config.identity == RunFolder(tmp_path / "run").config.identity


@pytest.mark.full
def test_trouble_on_another_rank_is_named(room):
    (event,) = events(room / "spoiled", "nonfinite")
    assert (event["step"], event["layer"]) == (3, "stack.layers.1")
    assert json.loads((room / "spoiled.0.json").read_text())["state"] == "done"
    kept = [load_file(path) for path in sorted((room / "spoiled" / "trouble").iterdir())]
    assert [bool((batch["inputs"] == MARK).any()) for batch in kept] == [True, False]


@pytest.mark.full
def test_both_ranks_roll_back(room, alone):
    """To the weights of step 4, from where one process that saw the same trouble goes the same way."""
    assert [event["detail"] for event in events(room / "rolled back", "rollback")] == ["from step 7 to step 4"]
    found, fine = losses(room / "rolled back"), losses(alone("plain"))
    assert found[:6] == pytest.approx(fine[:6], rel=ROUND_OFF)
    assert found[6] is None
    steps = [record["step"] for record in numbers(room / "rolled back") if record["kind"] == "step"]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8]
    # The weights of step 4 on the batch of step 8: as good as they were on that of step 5.
    assert found[7] == pytest.approx(fine[4], rel=0.02)
    assert json.loads((room / "rolled back.1.json").read_text())["state"] == "done"


@pytest.mark.full
def test_both_ranks_stop_what_is_hopeless(room):
    results = [json.loads((room / f"hopeless.{rank}.json").read_text()) for rank in (0, 1)]
    assert [(result["state"], result["steps"], result["stuck"]) for result in results] == [("stuck", 3, True)] * 2
    assert results[0]["reason"] == results[1]["reason"]
    assert results[0]["unigram_entropy"] == results[1]["unigram_entropy"]
    assert [event["step"] for event in events(room / "hopeless", "stuck")] == [3]


@pytest.mark.full
def test_the_first_loss_is_that_of_one_process(room, alone):
    for name in ("plain", "masked", "images", "ngpt"):
        found, expected = (
            json.loads((path / "status.json").read_text())["result"] for path in (room / name, alone(name))
        )
        assert found["first_loss"] == pytest.approx(expected["first_loss"], rel=ROUND_OFF)
        assert (found["unigram_entropy"], found["stuck"]) == (expected["unigram_entropy"], expected["stuck"])


@pytest.mark.full
def test_a_folder_in_use_stops_both(room):
    said = [(room / f"locked.{rank}.txt").read_text() for rank in (0, 1)]
    assert said[0] == said[1]
    assert "is in use by process" in said[0]
    assert "\n" not in said[0]


@pytest.mark.full
def test_a_process_that_breaks_does_not_leave_the_other_waiting(room):
    assert (room / "broken.1.txt").read_text() == "something nobody foresaw"
    assert (room / "broken.0.txt").exists()
    status = json.loads((room / "broken" / "status.json").read_text())
    assert (status["state"], status["step"]) == ("failed", 2)
    assert status["reason"].startswith("RuntimeError: ")
    assert "\n" not in status["reason"]


# Of the other tasks in tests/train/test_tasks.py, too.
@parametrize("name", ["plain", "masked", "images"], quick=["plain"])
def test_accumulating_is_only_a_matter_of_memory(name, alone):
    close(alone(f"{name}, accumulated"), alone(name))
