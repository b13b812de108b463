"""Memory is looked at before a model is built: counts agree with the exact ones, and what does not fit is refused."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

import normlab
from normlab import DecoderConfig, NormLabError
from normlab.models import memory_check
from normlab.utils import machine
from tests.matrix import parametrize

CPU = torch.device("cpu")
SIZE = {"depth": 36, "dim": 16, "heads": 2, "vocab_size": 32, "max_length": 8}
DEEP = {"depth": 10**6, "dim": 128, "heads": 4}


def free(monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda device: size)


@parametrize(
    "scheme", [name for name in normlab.list_schemes() if name != "mix"], quick=["pre", "dual", "geonorm", "ngpt"]
)
def test_parameters_from_shallow_models_are_exact(scheme):
    config = DecoderConfig(scheme=scheme, **SIZE)
    assert memory_check.estimate_params(config) == config.num_params()


def test_where_blocks_differ_parameters_are_close():
    # A quarter of the blocks of mix have their norms elsewhere: the count of all norms is off by one of them at most.
    config = DecoderConfig(scheme="mix", **SIZE)
    assert memory_check.estimate_params(config) == pytest.approx(config.num_params(), abs=2 * config.dim)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_memory_from_shallow_models_is_exact(checkpointing, monkeypatch):
    monkeypatch.setattr(memory_check, "_SHALLOW", 1)
    config = DecoderConfig(scheme="peri", checkpointing=checkpointing, **SIZE | {"depth": 4})
    found, exact = memory_check.estimate_memory(config, 2, 8, "fp32"), config.memory(2, 8, precision="fp32")
    # What is recomputed is the mean over blocks, which the first one, without a block before it, pulls down.
    assert dataclasses.replace(found, recomputed=0) == dataclasses.replace(exact, recomputed=0)
    assert found.recomputed == pytest.approx(exact.recomputed, rel=0.05)


def test_the_bound_on_activations_is_one():
    for changes in ({}, {"mlp": "gelu", "heads": 8}, {"experts": 4}):
        config = DecoderConfig(**SIZE | {"depth": 2} | changes)
        found = config.memory(2, 8, precision="fp32")
        assert found.activations + found.loss < memory_check._at_most(config, 2, 8)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_million_blocks_are_refused_at_once(device, monkeypatch):
    free(monkeypatch, 20 * 2**30)
    begin = time.process_time()
    with pytest.raises(NormLabError, match=r"a model of 1,000,000 blocks of width 128 needs about .* try a smaller"):
        DecoderConfig(**DEEP).build(device=device)
    # Not a timing: nine minutes were the fault.
    assert time.process_time() - begin < 60


def test_training_needs_more_than_weights(monkeypatch):
    config = DecoderConfig(**SIZE | {"depth": 2})
    weights = 4 * config.num_params()
    options = {"batch": 1, "length": 8, "precision": "fp32"}
    free(monkeypatch, 3 * weights)
    with pytest.raises(NormLabError, match=r"training a model of 2 blocks .* this machine has .* free; try a smaller"):
        memory_check.check_memory_to_train(config, CPU, **options)
    # Each of four processes holds a quarter.
    memory_check.check_memory_to_train(config, CPU, **options, world=4)


def test_a_batch_that_does_not_fit_is_named(monkeypatch):
    config = dataclasses.replace(DecoderConfig(**SIZE), depth=2)
    exact = config.memory(64, 8, precision="fp32").total
    options = {"batch": 64, "length": 8, "precision": "fp32"}
    free(monkeypatch, int(1.2 * exact))
    memory_check.check_memory_to_train(config, CPU, **options)
    free(monkeypatch, int(0.9 * exact))
    with pytest.raises(
        NormLabError, match=r"in batches of 64 × 8 tokens needs about .* try a smaller --batch"
    ) as refused:
        memory_check.check_memory_to_train(config, CPU, **options)
    assert "\n" not in str(refused.value)


def test_an_enormous_batch_is_refused_without_an_estimate(monkeypatch):
    """Whose loss is computed in chunks: a hundred million sequences took minutes to say that they do not fit."""
    free(monkeypatch, 20 * 2**30)
    monkeypatch.setattr(memory_check, "estimate_memory", None)
    with pytest.raises(NormLabError, match=r"in batches of 100000000 × 16 tokens needs about .* try a smaller --batch"):
        memory_check.check_memory_to_train(
            DecoderConfig(depth=1, dim=16, heads=1), torch.device("cpu"), batch=10**8, length=16, precision="fp32"
        )


def test_where_the_system_does_not_say_nothing_is_refused(monkeypatch):
    free(monkeypatch, None)
    memory_check.check_memory(2**60, CPU, "this")


def test_free_memory_is_that_of_the_machine_or_of_its_container(monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   64 kB\n")
    monkeypatch.setattr(machine, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_GROUP", tmp_path)
    assert machine.free_memory(CPU) == 64 * 1024
    for name, text in (("max", "50000"), ("current", "20000"), ("stat", "anon 7\ninactive_file 1000")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert machine.free_memory(CPU) == 31_000
    (tmp_path / "memory.max").write_text("max")
    assert machine.free_memory(CPU) == 64 * 1024
