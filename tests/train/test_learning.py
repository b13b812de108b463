"""Every scheme that should learn does: far better than guessing by frequency alone. Without any, depth is fatal."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

import normlab
from normlab.data import evaluation_batches, prepare
from normlab.models.moe import MoE
from normlab.train.storage.folder import RunFolder
from normlab.train.trainer import Trainer, train
from tests.train.runs import after_building, config_of, events, losses

MARGIN = 0.25
"""Nats below the unigram entropy that count as having learned; the text allows for about 2.7."""
FAST = ("pre", "post", "peri", "geonorm")
# No guard against spikes: the rate is high for some, and they recover.
LEARNING = {"batch": 8, "length": 64, "lr": 6e-3, "evals": 1, "saves": 0, "eval_tokens": 2000, "spike": 1e3}


@pytest.fixture(scope="module")
def phrases(text, tmp_path_factory) -> Path:
    """Words in which each letter names the next: six words, so that one letter in five is a surprise."""
    path, made = tmp_path_factory.mktemp("phrases") / "phrases.txt", random.Random(0)
    path.write_text(" ".join(made.choices(["abcd", "efgh", "ijkl", "mnop", "qrst", "uvwx"], k=8000)))
    return path


@pytest.fixture(scope="module")
def unigram(phrases) -> float:
    """The unigram entropy of the validation text: what knowing frequencies alone achieves."""
    config = config_of(phrases)
    val = prepare(config.data, val_fraction=config.val_fraction, progress=False).val
    counts = torch.bincount(next(evaluation_batches(val, length=val.n_tokens, batch=1)).targets.flatten())
    return torch.special.entr(counts / counts.sum()).sum().item()


def test_the_unigram_entropy(unigram):
    # 24 letters with a share of 4/5, and a space.
    assert unigram == pytest.approx(0.8 * math.log(24 / 0.8) + 0.2 * math.log(5), abs=0.01)


@pytest.mark.full
@pytest.mark.parametrize("scheme", [name for name in normlab.list_schemes() if name != "none"])
def test_learns(scheme, phrases, unigram, tmp_path):
    steps = 80 if scheme in FAST else 150
    config = config_of(
        phrases, steps=steps, model={"scheme": scheme, "depth": 4, "dim": 64, "hidden": None}, **LEARNING
    )
    result = train(config, tmp_path, progress=False)
    assert result.state == "done"
    assert result.loss is not None
    assert result.loss < unigram - MARGIN
    assert losses(tmp_path, "eval")[-1] == result.loss


def deep(phrases: Path, scheme: str, **changes):
    model = {"scheme": scheme, "depth": 32, "dim": 64, "hidden": None}
    return config_of(phrases, model=model, **LEARNING | {"spike": 10.0} | changes)


@pytest.mark.full
def test_without_a_scheme_depth_is_fatal(phrases, tmp_path):
    result = train(deep(phrases, "none", steps=40), tmp_path, progress=False)
    assert (result.state, result.loss) == ("failed", None)
    assert result.reason is not None
    assert "10 bad steps in a row; stack.layers." in result.reason
    assert RunFolder(tmp_path).status["reason"] == result.reason
    assert len(events(tmp_path, "nonfinite", "spike")) >= 10
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.full
def test_with_one_it_is_not(phrases, unigram, tmp_path):
    result = train(deep(phrases, "pre", steps=80, lr=2e-3), tmp_path, progress=False)
    assert result.state == "done"
    assert result.loss is not None
    assert result.loss < unigram - MARGIN


def loads_after(config, folder: Path) -> list[torch.Tensor]:
    """The share of validation tokens that every expert of every block gets at the end."""
    found: list[torch.Tensor] = []

    def change(trainer: Trainer) -> None:
        close = trainer.close

        def look() -> None:
            batch = next(evaluation_batches(trainer.data.val, length=config.length, batch=32))
            with torch.no_grad():
                trainer.model.cross_entropy(batch.inputs, batch.targets)
            routings = [module.routing for module in trainer.model.modules() if isinstance(module, MoE)]
            found.extend(routing.load for routing in routings if routing is not None)
            close()

        trainer.close = look

    with pytest.MonkeyPatch.context() as patch:
        after_building(patch, change)
        assert train(config, folder, progress=False).state == "done"
    return found


@pytest.mark.full
def test_experts_stay_balanced(phrases, tmp_path):
    def shares(weight: float) -> list[torch.Tensor]:
        model = {"experts": 8, "top_k": 2, "hidden": 32, "balance_weight": weight}
        config = config_of(phrases, steps=100, batch=8, lr=1e-2, evals=1, saves=0, model=model)
        return loads_after(config, tmp_path / str(weight))

    balanced, free = shares(0.1), shares(0.0)
    assert len(balanced) == len(free) == 2
    # If every share is off by a factor e^±x, the entropy falls short of log E by about x²/2: a factor of 1.65 (x = 1/2)
    # leaves 0.94 of log 8. Without the loss some experts starve.
    for load in balanced:
        assert torch.special.entr(load).sum() > 0.94 * math.log(8)
    assert min(float(load.min()) for load in free) < min(float(load.min()) for load in balanced)
