"""A loss that is not finite, or a spike: named, kept, and handled as the user chose; on a GPU's late path, too."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file

from normlab.data import Batch
from normlab.models.config import DecoderConfig
from normlab.models.decoder import Decoder
from normlab.train import records
from normlab.train import trainer as trainers
from normlab.train.distributed import ALONE
from normlab.train.monitor.trouble import diagnose, keep
from normlab.train.storage.folder import RunFolder
from normlab.train.storage.sinks import read_records
from normlab.train.trainer import Trainer, train
from normlab.utils.host_copy import HostCopy
from tests.matrix import parametrize
from tests.train.runs import (
    MARK,
    MODEL,
    after_building,
    asks_to_stop,
    config_of,
    events,
    losses,
    numbers,
    records_graphs,
    same_run,
    same_tensors,
    spikes,
    spoils,
)

LAYER = "stack.layers.1"
DECISIONS = [
    "at once",
    pytest.param("late", marks=pytest.mark.full),
    pytest.param("late, in graphs", marks=pytest.mark.full),
]


def lags(trainer: Trainer) -> None:
    """As on one GPU: the device leaves bad steps out by itself, and the host hears of them a step later."""
    trainer.lags = True


class SentLate(HostCopy):
    """As from a GPU: nothing is there before somebody has waited for it."""

    def __init__(self, values: torch.Tensor):
        self._values, self._host = values.clone(), torch.full_like(values, math.nan)

    def wait(self) -> torch.Tensor:
        return self._host.copy_(self._values)


@pytest.fixture(params=DECISIONS)
def disturb(request, monkeypatch):
    """Makes every trainer of the test a disturbed one; where the host lags, too."""
    how = {"at once": [], "late": [lags], "late, in graphs": [lags, records_graphs]}[request.param]
    monkeypatch.setattr(trainers, "HostCopy", SentLate)
    return lambda *changes: after_building(monkeypatch, *changes, *how)


def kinds(folder) -> list[tuple[str, int]]:
    return [(event["what"], event["step"]) for event in events(folder)]


def weights_by_step(seen: dict[int, dict[str, torch.Tensor]]):
    """Notes the weights that the gradient of every step was computed with."""

    def change(trainer: Trainer) -> None:
        go = trainer._gradient

        def gradient(parts):
            seen[trainer.step + 1] = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
            return go(parts)

        trainer._gradient = gradient

    return change


# -- nothing happens -----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_lagging_host_sees_the_same_run(text, straight, tmp_path, monkeypatch):
    monkeypatch.setattr(trainers, "HostCopy", SentLate)
    after_building(monkeypatch, lags)
    assert train(config_of(text), tmp_path / "run", progress=False).state == "done"
    same_run(tmp_path / "run", straight)


def test_the_last_step_is_judged_too(disturb, text, tmp_path):
    disturb()
    train(config_of(text, steps=6, evals=0, saves=0), tmp_path, progress=False)
    assert [record["step"] for record in numbers(tmp_path) if record["kind"] == "step"] == [1, 2, 3, 4, 5, 6]


# -- not finite ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_stop(disturb, value, text, tmp_path):
    disturb(spoils({7}, value=value))
    result = train(config_of(text, trouble="stop"), tmp_path, progress=False)
    assert (result.state, result.steps) == ("failed", 7)
    assert result.reason is not None
    assert result.reason.startswith("step 7: loss is nan")
    assert f"{LAYER} returns values that are not finite" in result.reason
    status = RunFolder(tmp_path).status
    assert (status["state"], status["reason"], status["step"]) == ("failed", result.reason, 7)
    (event,) = events(tmp_path)
    assert (event["what"], event["step"], event["layer"]) == ("nonfinite", 7, LAYER)
    assert losses(tmp_path)[-1] is None
    assert result.seconds > 0


def test_the_batch_is_kept(disturb, text, tmp_path):
    disturb(spoils({7}))
    train(config_of(text, trouble="stop", boundaries="respected", accumulate=2), tmp_path, progress=False)
    batch = load_file(tmp_path / "trouble" / "step-00000007.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "inputs": (4, 32), "targets": (4, 32), "documents": (4, 32)
    }  # fmt: skip
    # Both parts of the step are there, and both were marked.
    assert batch["inputs"][[0, 2], 0].tolist() == [MARK, MARK]


def test_skip(disturb, text, tmp_path):
    seen: dict[int, dict[str, torch.Tensor]] = {}
    disturb(spoils({7, 12}), weights_by_step(seen))
    result = train(config_of(text, trouble="skip"), tmp_path, progress=False)
    assert (result.state, result.steps) == ("done", 20)
    assert kinds(tmp_path) == [("nonfinite", 7), ("skip", 7), ("nonfinite", 12), ("skip", 12)]
    assert {event["layer"] for event in events(tmp_path, "nonfinite")} == {LAYER}
    for step in range(1, 20):
        unchanged = all(torch.equal(seen[step][name], seen[step + 1][name]) for name in seen[step])
        assert unchanged == (step in (7, 12)), step
    found = losses(tmp_path)
    assert [step for step, loss in enumerate(found, 1) if loss is None] == [7, 12]
    assert len(found) == 20
    assert found[-1] < found[0]


@pytest.mark.full
def test_late_and_at_once_decide_alike(text, tmp_path, monkeypatch):
    monkeypatch.setattr(trainers, "HostCopy", SentLate)
    for name, changes in (("at once", []), ("late", [lags])):
        with pytest.MonkeyPatch.context() as patch:
            after_building(patch, spoils({7, 8, 12}), *changes)
            train(config_of(text, trouble="skip"), tmp_path / name, progress=False)
    same_run(tmp_path / "late", tmp_path / "at once")
    assert events(tmp_path / "late") == events(tmp_path / "at once")


def test_roll_back(disturb, text, straight, tmp_path):
    seen: dict[int, dict[str, torch.Tensor]] = {}
    disturb(spoils({7}), weights_by_step(seen))
    result = train(config_of(text, trouble="rollback"), tmp_path, progress=False)
    assert (result.state, result.steps) == ("done", 20)
    assert kinds(tmp_path) == [("nonfinite", 7), ("rollback", 7)]
    assert events(tmp_path, "rollback")[0]["detail"] == "from step 7 to step 4"
    steps = [record for record in numbers(tmp_path) if record["kind"] == "step"]
    # Up to the bad step, then again from the checkpoint on.
    assert [record["step"] for record in steps] == [*range(1, 8), *range(5, 21)]
    before = [record for record in numbers(straight) if record["kind"] == "step"]
    assert steps[:6] == before[:6]
    # The rate of step 5 again, but other data. Step 5 is reached twice, and evaluated each time.
    assert steps[7]["lr"] == before[4]["lr"]
    assert steps[7]["loss"] != before[4]["loss"]
    assert [record["step"] for record in numbers(tmp_path) if record["kind"] == "eval"] == [5, 5, 10, 15, 20]
    assert all(record["grad_norm"] > 0 for record in steps[7:])


@pytest.mark.full
def test_rolled_back_weights_are_those_of_the_checkpoint(disturb, text, tmp_path):
    first: dict[int, dict[str, torch.Tensor]] = {}
    seen: dict[int, dict[str, torch.Tensor]] = {}
    with pytest.MonkeyPatch.context() as patch:
        after_building(patch, weights_by_step(first))
        train(config_of(text), tmp_path / "fine", progress=False)
    disturb(spoils({7}), weights_by_step(seen))
    train(config_of(text, trouble="rollback"), tmp_path / "run", progress=False)
    # `seen` holds the last time that a step was taken.
    same_tensors(seen[5], first[5])
    assert any(not torch.equal(seen[6][name], first[6][name]) for name in seen[6])


@pytest.mark.full
def test_roll_back_to_where_the_run_was_stopped(disturb, text, tmp_path):
    config = config_of(text, trouble="rollback")
    with pytest.MonkeyPatch.context() as patch:
        after_building(patch, asks_to_stop(6))
        train(config, tmp_path, progress=False)
    disturb(spoils({7}))
    assert train(config, tmp_path, progress=False).state == "done"
    assert kinds(tmp_path) == [("saved", 6), ("resume", 6), ("nonfinite", 7), ("rollback", 7)]
    records = read_records(tmp_path / "metrics.jsonl")
    assert all(record["tokens_per_s"] > 0 for record in records if record["kind"] == "step")


@pytest.mark.full
def test_roll_back_at_the_last_step(disturb, text, tmp_path):
    disturb(spoils({20}))
    result = train(config_of(text, trouble="rollback"), tmp_path, progress=False)
    assert (result.state, result.steps) == ("done", 20)
    assert kinds(tmp_path) == [("nonfinite", 20), ("rollback", 20)]
    assert numbers(tmp_path)[-1]["step"] == 20


@pytest.mark.full
def test_roll_back_before_the_first_checkpoint(disturb, text, tmp_path):
    disturb(spoils({2}))
    assert train(config_of(text, trouble="rollback"), tmp_path, progress=False).state == "done"
    assert kinds(tmp_path) == [("nonfinite", 2), ("skip", 2)]
    assert events(tmp_path)[1]["detail"] == "there is no checkpoint to go back to yet"


def test_bad_steps_in_a_row_end_the_run(disturb, text, tmp_path):
    disturb(spoils(set(range(5, 100))))
    result = train(config_of(text, trouble="skip"), tmp_path, progress=False)
    assert (result.state, result.steps) == ("failed", 14)
    assert result.reason is not None
    assert "10 bad steps in a row" in result.reason
    assert RunFolder(tmp_path).status["reason"] == result.reason
    assert (tmp_path / "checkpoints").exists()
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.full
def test_a_run_does_not_roll_back_for_ever(disturb, text, tmp_path):
    """Every third batch is bad, so that fine steps come in between but no new checkpoint."""
    disturb(spoils(set(range(7, 1000, 3))))
    result = train(config_of(text, trouble="rollback"), tmp_path, progress=False)
    assert result.state == "failed"
    assert result.reason is not None
    assert "rolled back to step 4 10 times" in result.reason
    assert len(events(tmp_path, "rollback")) == 10


@pytest.mark.full
def test_a_failed_run_can_be_tried_again(text, straight, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        after_building(patch, spoils({7}))
        assert train(config_of(text), tmp_path / "first", progress=False).state == "done"
        assert train(config_of(text, trouble="stop"), tmp_path / "run", progress=False).state == "failed"
    # Without what spoiled it: nothing of the first attempt is left but the checkpoint before.
    assert train(config_of(text, trouble="stop"), tmp_path / "run", progress=False).state == "done"
    same_run(tmp_path / "run", straight)


def test_weights_that_are_not_finite(text, tmp_path, monkeypatch):
    def spoil(trainer: Trainer) -> None:
        trainer.model.stack.layers[0].branches[1].down.weight.data[3, 5] = math.nan

    after_building(monkeypatch, spoil)
    result = train(config_of(text), tmp_path, progress=False)
    assert (result.state, result.steps) == ("failed", 10)
    assert {event["layer"] for event in events(tmp_path, "nonfinite")} == {"stack.layers.0.branches.1.down"}


def test_a_last_evaluation_that_is_not_finite_is_a_failure(text, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "evaluate", lambda *_, **__: {"loss": math.nan, "bits_per_byte": math.nan})
    result = train(config_of(text), tmp_path, progress=False)
    assert (result.state, result.reason) == ("failed", "step 20: the validation loss is nan")
    assert not (tmp_path / "model.safetensors").exists()


# -- spikes --------------------------------------------------------------------------------------------------------


@parametrize("policy", ["stop", "skip", "rollback"], quick=["skip", "rollback"])
def test_a_spike(disturb, policy, text, tmp_path):
    disturb(spikes({18}))
    result = train(config_of(text, trouble=policy, steps=24), tmp_path, progress=False)
    event = events(tmp_path, "spike")[0]
    assert (event["step"], event["layer"]) == (18, event["layer"])
    assert " exceeds " in event["detail"]
    assert "the largest gradient is that of" in event["detail"]
    assert event["layer"] is not None
    assert (tmp_path / "trouble" / "step-00000018.safetensors").exists()
    assert result.state == ("failed" if policy == "stop" else "done")
    after = {"stop": [], "skip": [("skip", 18)], "rollback": [("rollback", 18)]}[policy]
    assert kinds(tmp_path) == [("spike", 18), *after]


@pytest.mark.parametrize("threshold", [2.2, 0.1, 1 / 3, 7.7])
def test_the_device_compares_as_the_host_does(threshold, text, tmp_path, monkeypatch):
    """The nearest float32 on either side of a threshold that is none itself: rounded to it, one would pass."""
    updates = []

    def one_step(trainer: Trainer) -> None:
        near = torch.tensor(threshold)
        for loss in (near, near.nextafter(torch.tensor(0.0)), near.nextafter(torch.tensor(9.0))):
            trainer._update_on_device(loss, torch.tensor(1.0), threshold)
            updates.append((bool(trainer.optimiser.found_inf), loss.item() > threshold))  # type: ignore[attr-defined]

    after_building(monkeypatch, one_step)
    train(config_of(text, steps=1), tmp_path, progress=False)
    assert [device for device, _ in updates] == [host for _, host in updates]
    assert {host for _, host in updates} == {True, False}


# -- the parts -----------------------------------------------------------------------------------------------------


def test_the_bad_part_of_an_accumulated_step_is_found():
    model = Decoder(DecoderConfig(**MODEL))
    with torch.no_grad():
        model.embedding.weight[7] = math.nan
    fine = Batch(torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.long), None)
    model.head.weight = torch.nn.Parameter(torch.randn(256, 32))
    bad = fine._replace(inputs=torch.full((2, 5), 7))
    for parts in ([bad, fine], [fine, bad]):
        assert diagnose(model, parts, ALONE, torch.enable_grad).forward == "embedding"
    assert diagnose(model, [fine, fine], ALONE, torch.enable_grad).forward is None


def test_every_rank_keeps_its_own(tmp_path):
    batch = Batch(torch.tensor([[1, 2]]), torch.tensor([[2, 3]]), None)
    assert keep([batch], tmp_path / "trouble", 3, 0).name == "step-00000003.safetensors"
    path = keep([batch, batch], tmp_path / "trouble", 3, 1)
    assert path.name == "step-00000003-rank-1.safetensors"
    assert load_file(path)["inputs"].tolist() == [[1, 2], [1, 2]]
    assert set(load_file(path)) == {"inputs", "targets"}
