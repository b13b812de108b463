"""Steps that are recorded and replayed: the same run, bit for bit, whatever happens in between."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from normlab.errors import NormLabError
from normlab.train import optimiser as optimisers
from normlab.train.distributed import ALONE, Group
from normlab.train.step_graph import WARM_UP, graphs_are_used
from normlab.train.trainer import Trainer, train
from tests.matrix import parametrize
from tests.train.runs import (
    RecordedEagerly,
    after_building,
    asks_to_stop,
    config_of,
    events,
    records_graphs,
    same_run,
    spikes,
)

GPU = Group(0, 1, torch.device("cuda"))


def as_on_a_gpu(trainer: Trainer) -> None:
    trainer.lags = True
    records_graphs(trainer)


def counts_replays(seen: list[str]):
    """Notes every replay of the two graphs."""

    def change(trainer: Trainer) -> None:
        def record(work, pool):
            graph = RecordedEagerly(work)
            name = work.__name__
            graph.replay = lambda: (seen.append(name), work())[1]
            return graph

        trainer.lags = True
        trainer.graphs.record = record

    return change


def test_the_same_run_bit_for_bit(text, straight, tmp_path, monkeypatch):
    seen: list[str] = []
    after_building(monkeypatch, counts_replays(seen))
    assert train(config_of(text), tmp_path / "run", progress=False).state == "done"
    same_run(tmp_path / "run", straight)
    # Every step but the first ones, first its gradient and then its update.
    assert seen == ["_compute_gradient", "_apply_update"] * (20 - WARM_UP)
    assert not events(tmp_path / "run")


@parametrize(
    "changes", [{"accumulate": 2}, {"boundaries": "respected"}, {"trouble": "none"}], quick=[{"accumulate": 2}], ids=str
)
def test_parts_documents_and_every_policy(changes: dict[str, Any], text, tmp_path, monkeypatch):
    config = config_of(text, steps=8, evals=1, saves=0, **changes)
    train(config, tmp_path / "ordinary", progress=False)
    after_building(monkeypatch, as_on_a_gpu)
    train(config, tmp_path / "recorded", progress=False)
    same_run(tmp_path / "recorded", tmp_path / "ordinary")


@parametrize("scheme", ["ngpt", "geonorm"], quick=["ngpt"])
def test_the_constraint_of_a_scheme_is_part_of_the_update(scheme, text, tmp_path, monkeypatch):
    config = config_of(text, steps=8, evals=1, saves=0, model={"scheme": scheme})
    train(config, tmp_path / "ordinary", progress=False)
    after_building(monkeypatch, as_on_a_gpu)
    train(config, tmp_path / "recorded", progress=False)
    same_run(tmp_path / "recorded", tmp_path / "ordinary")


def test_a_run_that_was_stopped_goes_on_in_new_graphs(text, straight, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        after_building(patch, as_on_a_gpu, asks_to_stop(7))
        assert train(config_of(text), tmp_path, progress=False).state == "stopped"
    after_building(monkeypatch, as_on_a_gpu)
    assert train(config_of(text), tmp_path, progress=False).state == "done"
    same_run(tmp_path, straight)


@pytest.mark.full
def test_a_rollback_replaces_tensors_so_the_graphs_are_recorded_anew(text, tmp_path, monkeypatch):
    config = config_of(text, steps=40, saves=10, evals=1, trouble="rollback")
    seen: list[str] = []
    after_building(monkeypatch, lambda trainer: setattr(trainer, "lags", True), spikes({31}, factor=100.0))
    assert train(config, tmp_path / "ordinary", progress=False).state == "done"
    monkeypatch.undo()
    after_building(monkeypatch, counts_replays(seen), spikes({31}, factor=100.0))
    assert train(config, tmp_path / "recorded", progress=False).state == "done"
    same_run(tmp_path / "recorded", tmp_path / "ordinary")
    assert [event["what"] for event in events(tmp_path / "recorded")] == ["spike", "rollback"]
    # Back from step 31 to step 28 when the gradient of step 32 was there, and then some ordinary steps again.
    assert seen.count("_compute_gradient") == seen.count("_apply_update") + 1 == (32 - WARM_UP) + (12 - WARM_UP)


def test_what_cannot_be_recorded_is_said_and_trained_as_ever(text, straight, tmp_path, monkeypatch, capsys):
    def fail(work, pool):
        work()  # leaves a gradient behind
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    def change(trainer: Trainer) -> None:
        trainer.lags, trainer.graphs.record = True, fail

    after_building(monkeypatch, change)
    assert train(config_of(text), tmp_path / "run", progress=True).state == "done"
    same_run(tmp_path / "run", straight)
    (event,) = events(tmp_path / "run")
    words = "steps are not recorded as CUDA graphs: operation not permitted when stream is capturing"
    assert (event["what"], event["step"], event["detail"]) == ("graphs", WARM_UP, words)
    assert capsys.readouterr().err.count("operation not permitted when stream is capturing") == 1


def test_rates_become_tensors_and_numbers_again():
    weight = torch.nn.Parameter(torch.ones(3))
    optimiser = torch.optim.AdamW([{"params": [weight], "initial_lr": 0.3}], lr=0.3, fused=True)
    optimisers.set_capturable(optimiser, True)
    (group,) = optimiser.param_groups
    rate = group["lr"]
    optimisers.set_lr(optimiser, 0.1)
    assert group["lr"] is rate
    assert float(rate) == 0.3 * 0.1
    optimisers.set_capturable(optimiser, False)
    assert (group["lr"], group["capturable"]) == (0.3 * 0.1, False)


def test_where_graphs_are_used(text):
    config = config_of(text)
    assert graphs_are_used(config, GPU, compiles=True)
    assert not graphs_are_used(config, GPU, compiles=False)
    assert not graphs_are_used(config, ALONE, compiles=True)
    for change in ({"optimiser": "muon"}, {"cuda_graphs": "off"}):
        assert not graphs_are_used(dataclasses.replace(config, **change), GPU, compiles=True)
    assert not graphs_are_used(config, dataclasses.replace(GPU, world=2), compiles=True)
    asked = dataclasses.replace(config, cuda_graphs="on")
    assert graphs_are_used(asked, GPU, compiles=False)
    with pytest.raises(NormLabError, match="cuda_graphs is on, but there is no GPU; try cuda_graphs auto"):
        graphs_are_used(asked, ALONE, compiles=True)


@pytest.mark.parametrize(("capability", "precision", "used"), [((9, 0), "auto", True), ((8, 0), "auto", False),
                                                              ((9, 0), "fp32", False)])  # fmt: skip
def test_experts_are_recorded_where_the_host_need_not_know_their_loads(capability, precision, used, text, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = config_of(text, precision=precision, model={"experts": 4})
    assert graphs_are_used(config, GPU, compiles=True) is used


def test_graphs_do_not_change_the_name_of_a_run(text):
    config = config_of(text)
    assert dataclasses.replace(config, cuda_graphs="off").identity == config.identity
