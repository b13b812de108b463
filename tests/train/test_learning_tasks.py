"""Every scheme that should learn does: digits are told apart, and what stands around a masked letter gives it away."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import normlab
from normlab import EncoderConfig, TrainConfig, VisionConfig
from normlab.data import IGNORED
from normlab.train.trainer import train

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

# Steps of size η from a small start: what a scheme makes of a rate differs by what it does to an update.
RATES = {"spannorm": 1e-2, "keel": 1e-2}


def every(quick: tuple[str, ...]) -> list:
    return [n if n in quick else pytest.param(n, marks=pytest.mark.full) for n in normlab.schemes()]


def digits(scheme: str, **changes) -> TrainConfig:
    model = VisionConfig(
        **{"scheme": scheme, "depth": 4, "dim": 32, "heads": 2, "hidden": 96} | changes.pop("model", {})
    )
    known = {"images": 16_000, "batch": 64, "lr": RATES.get(scheme, 4e-3), "evals": 1, "saves": 0, "device": "cpu"}
    return TrainConfig(task="images", model=model, **known | changes)


@pytest.mark.parametrize("scheme", every(("peri",)))
def test_digits_are_told_apart(scheme, tmp_path):
    result = train(digits(scheme), tmp_path, shown=False)
    assert result.state == "done"
    assert result.scores["accuracy"] > 0.9


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["pre", "peri", "geonorm"])
def test_deep_and_pooled_models_learn_too(scheme, tmp_path):
    model = {"depth": 36, "pooling": "mean"}
    result = train(digits(scheme, model=model, images=8_000, lr=2e-3), tmp_path, shown=False)
    assert result.scores["accuracy"] > 0.8


def unigram_entropy(config: TrainConfig) -> float:
    """Nats of a guess at the masked tokens that knows how often each occurs among them, and nothing else."""
    kind = config.task_object
    data = kind.open(config, shown=False)
    targets = torch.cat([batch.targets.flatten() for batch in kind.evaluation(config, data, batch=16)])
    shares = torch.bincount(targets[targets != IGNORED]).double()
    return torch.special.entr(shares / shares.sum()).sum().item()


@pytest.mark.parametrize("scheme", every(("geonorm",)))
def test_masked_letters_are_found(scheme, text: Path, tmp_path):
    model = EncoderConfig(scheme=scheme, depth=2, dim=32, heads=4, hidden=64)
    config = TrainConfig(
        task="masked", model=model, data=(str(text),), tokens=300 * 16 * 32, length=32, batch=16,
        lr=2 * RATES.get(scheme, 5e-3), evals=1, eval_tokens=4000, saves=0, val_fraction=0.1, device="cpu",
    )  # fmt: skip
    result = train(config, tmp_path, shown=False)
    assert result.scores["loss"] < unigram_entropy(config) - 0.3
    assert result.scores["accuracy"] > 0.2
