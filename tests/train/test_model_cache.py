"""Models that are kept for the next run of their shape: the same weights as new ones, and nothing compiled twice."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from normlab import list_schemes
from normlab.models import Decoder
from normlab.models.config import DecoderConfig
from normlab.train import model_cache
from normlab.train.distributed import ALONE, initialise
from normlab.train.model_cache import BuiltModel, ModelCache, reinitialise, shape_of
from normlab.train.setup import by_layers
from normlab.train.trainer import train
from normlab.train.transfer import Transfer
from tests.train.runs import config_of, same_run

CPU = torch.device("cpu")


def small(scheme: str) -> DecoderConfig:
    return DecoderConfig(scheme=scheme, depth=2, dim=16, heads=2, vocab_size=64)


def built(scheme: str = "pre") -> BuiltModel:
    model = Decoder(small(scheme))
    return BuiltModel(model, model.loss, model.cross_entropy)


@pytest.mark.parametrize("scheme", list_schemes())
def test_a_used_model_starts_as_a_new_one(scheme):
    fresh = initialise(small(scheme).build(device="meta"), ALONE, seed=5)
    used = initialise(small(scheme).build(device="meta"), ALONE, seed=1)
    places = [p.data_ptr() for p in used.parameters()]
    optimiser = torch.optim.SGD(used.parameters(), lr=0.1)
    tokens = torch.randint(0, 64, (2, 9))
    used.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    optimiser.step()
    used.after_step()
    reinitialise(used.eval(), CPU, seed=5)
    assert used.training
    assert all(p.grad is None for p in used.parameters())
    # Compiled code and graphs refer to the tensors themselves.
    assert [p.data_ptr() for p in used.parameters()] == places
    for (name, mine), new in zip(used.state_dict().items(), fresh.state_dict().values(), strict=True):
        assert torch.equal(mine, new), name
    loss = [model.loss(tokens[:, :-1], tokens[:, 1:]) for model in (used, fresh)]
    assert torch.equal(*loss)


@pytest.mark.parametrize("tied", [True, False])
def test_width_transfer_starts_anew_too(tied):
    config = dataclasses.replace(small("pre"), tied=tied)
    transfer = Transfer(8, 16)
    models = [transfer.init_(initialise(config.build(device="meta"), ALONE, seed)) for seed in (1, 5)]
    transfer.init_(reinitialise(models[0], CPU, seed=5))
    tokens = torch.randint(0, 64, (2, 8))
    assert torch.equal(models[0](tokens), models[1](tokens))


@pytest.mark.full
@pytest.mark.parametrize("mode", ["yes", "layers"])
def test_runs_of_one_shape_compile_once_and_are_the_same(mode, text, tmp_path, monkeypatch, no_default_device):
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    first = config_of(text, steps=4, evals=2, saves=0, compile=mode)
    other = dataclasses.replace(first, seed=3, lr=1e-3)
    torch._dynamo.reset()
    train(other, tmp_path / "alone", progress=False)
    alone = counter.frame_count
    monkeypatch.setattr(model_cache, "_cache", ModelCache())
    torch._dynamo.reset()
    train(first, tmp_path / "first", progress=False)
    assert counter.frame_count == 2 * alone > 0
    train(other, tmp_path / "second", progress=False)
    assert counter.frame_count == 2 * alone
    same_run(tmp_path / "second", tmp_path / "alone")


@pytest.mark.full
@pytest.mark.parametrize("mode", ["yes", "layers"])
def test_many_shapes_in_one_process_are_all_compiled(mode, text, tmp_path, monkeypatch, no_default_device):
    """torch.compile would give up at the ninth and run it uncompiled."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    counts = []
    for width in range(16, 16 + 8 * 10, 8):
        model = {"depth": 1, "dim": width, "heads": 2, "hidden": 16}
        train(
            config_of(text, steps=2, evals=1, saves=0, compile=mode, model=model),
            tmp_path / str(width),
            progress=False,
        )
        counts.append(counter.frame_count)
    assert counts == [counts[0] * n for n in range(1, 11)]


def test_nothing_is_kept_unless_asked_for(text, tmp_path, monkeypatch):
    monkeypatch.setattr(model_cache, "_cache", None)
    assert model_cache.kept_models() is None
    model_cache.keep_models()
    cache = model_cache.kept_models()
    assert isinstance(cache, ModelCache)
    model_cache.keep_models()
    assert model_cache.kept_models() is cache
    # What is not compiled starts fast enough.
    train(config_of(text, steps=2, evals=1, saves=0), tmp_path, progress=False)
    assert cache.bytes == 0


def test_the_model_unused_for_longest_is_dropped():
    cache, models = ModelCache(most=2), [built() for _ in range(3)]
    for name, one in zip("abc", models, strict=True):
        cache.give_back(name, one)
    assert cache.take("a") is None
    assert cache.take("b") is models[1]
    assert cache.take("b") is None
    assert cache.bytes == models[2].bytes == sum(4 * p.numel() for p in models[2].model.parameters())
    small_cache = ModelCache(most_bytes=models[0].bytes)
    small_cache.give_back("a", models[0])
    small_cache.give_back("b", models[1])
    assert small_cache.take("a") is None
    assert small_cache.take("b") is models[1]


def test_a_dropped_model_is_freed_though_the_collector_was_told_to_leave_it_alone():
    """A worker freezes what a run has left; a model may be part of a cycle."""
    cache, one = ModelCache(most=1), built()
    object.__setattr__(one.model, "itself", one.model)
    seen = weakref.ref(one.model)
    cache.give_back("a", one)
    del one
    gc.freeze()
    try:
        gc.collect()
        assert seen() is not None
        cache.give_back("b", built())
        gc.collect()
        assert seen() is None
    finally:
        gc.unfreeze()


def test_what_a_shape_is(text):
    config = config_of(text)
    same = dataclasses.replace(config, seed=4, lr=1.0, warmup=0.3, tokens=9999, evals=1, weight_decay=0.0)
    assert shape_of(same) == shape_of(config)
    for change in ({"batch": 8}, {"length": 16}, {"precision": "bf16"}, {"base_dim": 16}, {"z_loss": 0.1}):
        assert shape_of(dataclasses.replace(config, **change)) != shape_of(config), change
    assert shape_of(config_of(text, model={"scheme": "pre"})) != shape_of(config)


@pytest.mark.parametrize(
    ("depth", "changed", "uses_graphs", "expected"),
    [
        (2, {}, True, True),
        (2, {}, False, False),
        (2, {"tokens": 10**9}, True, False),
        (32, {"tokens": 10**9}, False, True),
        (32, {"compile": "yes"}, True, False),
        (2, {"compile": "layers", "tokens": 10**9}, False, True),
    ],
)
def test_short_runs_and_deep_models_are_compiled_by_layers(text, depth, changed, uses_graphs, expected):
    options = {"compile": "auto", **changed, "model": dataclasses.replace(small("pre"), depth=depth)}
    config = dataclasses.replace(config_of(text, steps=4, evals=1), **options)
    # At a billion FLOP/s a billion tokens take days.
    assert by_layers(config, uses_graphs=uses_graphs, ceiling=1e9) is expected
