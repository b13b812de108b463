"""A run read back: the model of the last evaluation, its tokenizer, its metrics; text from it."""

from __future__ import annotations

import pytest

import normlab
from normlab import DecoderConfig, NormLabError, TrainConfig
from normlab.data import prepare
from normlab.train.distributed import ALONE
from normlab.train.evaluate import evaluate
from normlab.train.trainer import train

SMALL = {"length": 32, "batch": 4, "tokens": 4096, "evals": 2, "saves": 0}


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(400)))
    return str(path)


def small(text: str, **changes) -> TrainConfig:
    options = SMALL | changes
    model = DecoderConfig(**({"depth": 1, "dim": 32, "heads": 2} | options.pop("model", {})))
    return TrainConfig(model=model, data=(text,), **options)


@pytest.mark.parametrize("changes", [{}, {"base_dim": 16}, {"base_depth": 4}, {"model": {"scheme": "ngpt"}}], ids=str)
def test_the_model_is_the_one_that_was_evaluated(text, tmp_path, changes):
    config = small(text, **changes)
    result = train(config, tmp_path / "run", progress=False)
    run = normlab.load_run(tmp_path / "run")
    assert result.state == run.status["state"] == "done"
    corpus = prepare(config.data, progress=False)
    scores = evaluate(run.model.cross_entropy, corpus, run.config, ALONE)
    assert scores == result.scores
    assert scores.keys() == {"loss", "bits_per_byte"}
    assert run.metrics("eval")[-1]["loss"] == result.loss
    assert {record["kind"] for record in run.metrics()} == {"step", "eval", "profile"}
    assert run.config.identity == config.identity


def test_text_comes_back(text, tmp_path):
    train(small(text), tmp_path / "run", progress=False)
    run = normlab.load_run(tmp_path / "run")
    first = run.generate("line", tokens=10, seed=3)
    assert first.startswith("line")
    assert first == run.generate("line", tokens=10, seed=3)
    assert run.generate("line", tokens=0) == "line"
    room = run.config.model.max_length
    with pytest.raises(NormLabError, match=r"the prompt has .* tokens and the model takes"):
        run.generate("x" * room)
    with pytest.raises(NormLabError, match="seed must lie in"):
        run.generate("line", seed=2**64)
    with pytest.raises(NormLabError, match="the prompt holds bytes that are not UTF-8"):
        run.generate("line \udcff")
    with pytest.raises(NormLabError, match="unknown device 'gpu'"):
        normlab.load_run(tmp_path / "run", device="gpu")


def test_what_is_no_run_says_so(text, tmp_path):
    with pytest.raises(NormLabError, match=r"is not a run: it has no config\.json"):
        normlab.load_run(tmp_path / "nothing")
    config = small(text, trouble="stop", lr=1e30, clip=float("inf"))
    result = train(config, tmp_path / "broken", progress=False)
    assert result.state == "failed"
    run = normlab.load_run(tmp_path / "broken")
    with pytest.raises(NormLabError, match="has no weights and no checkpoint yet"):
        _ = run.model
