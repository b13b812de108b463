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
# Beside embeddings of 0.02 a first update of unit size is all there is, and without a causal mask it is the same for
# every token; and without any norm nothing is learnt in so few steps.
NOT_MASKED = ("none", "output")
# Sinkhorn's rounds take most of the time, and a few mix the streams as well as twenty.
SOONER = {"mhc": "mhc(rounds=4)"}


def digits(scheme: str, **changes) -> TrainConfig:
    size = {"depth": 4, "dim": 32, "heads": 2, "hidden": 96}
    model = VisionConfig(scheme=SOONER.get(scheme, scheme), **size | changes.pop("model", {}))
    known = {"images": 16_000, "batch": 64, "lr": RATES.get(scheme, 4e-3), "evals": 1, "saves": 0, "device": "cpu"}
    return TrainConfig(task="images", model=model, **known | changes)


@pytest.mark.full
@pytest.mark.parametrize("scheme", normlab.list_schemes())
def test_digits_are_told_apart(scheme, tmp_path):
    result = train(digits(scheme), tmp_path, progress=False)
    assert result.state == "done"
    assert result.scores["accuracy"] > 0.9


@pytest.mark.full
# Patches and places arrive at unit size each: Peri-LN needs no norm at the entry.
# GeoNorm takes twice the time a step, and learns from half the images.
@pytest.mark.parametrize(
    ("scheme", "lr", "images"),
    [("pre", 1e-3, 16_000), ("peri(entry_norm=False)", 1e-3, 16_000), ("geonorm", 4e-3, 8000)],
)
def test_deep_and_pooled_models_learn_too(scheme, lr, images, tmp_path):
    model = {"depth": 36, "pooling": "mean"}
    result = train(digits(scheme, model=model, lr=lr, images=images), tmp_path, progress=False)
    assert result.scores["accuracy"] > 0.8


def best_guess(config: TrainConfig) -> tuple[float, float]:
    """Nats and share right of the best answer that is the same everywhere, from how often each masked token occurs."""
    kind = config.task_object
    data = kind.open(config, progress=False)
    targets = torch.cat([batch.targets.flatten() for batch in kind.evaluation(config, data, batch=16)])
    counts = torch.bincount(targets[targets != IGNORED]).double()
    shares = counts / counts.sum()
    return torch.special.entr(shares).sum().item(), shares.max().item()


@pytest.mark.full
@pytest.mark.parametrize("scheme", [name for name in normlab.list_schemes() if name not in NOT_MASKED])
def test_masked_letters_are_found(scheme, text: Path, tmp_path):
    model = EncoderConfig(scheme=SOONER.get(scheme, scheme), depth=2, dim=32, heads=4, hidden=64)
    config = TrainConfig(
        task="masked", model=model, data=(str(text),), tokens=600 * 16 * 32, length=32, batch=16,
        lr=5e-3, evals=1, eval_tokens=4000, saves=0, val_fraction=0.1, device="cpu",
    )  # fmt: skip
    result = train(config, tmp_path, progress=False)
    nats, right = best_guess(config)
    assert result.scores["loss"] < nats
    assert result.scores["accuracy"] > right
