"""Encoders and vision Transformers of ours, as they are: checked without a batch of the user's."""

from __future__ import annotations

import pytest
import torch

import normlab
from normlab import Encoder, EncoderConfig, NormLabError, VisionConfig, VisionTransformer
from normlab.targets import resolve

SHAPE = {"scheme": "peri", "depth": 3, "dim": 32, "heads": 2}


def model_of(kind: str) -> torch.nn.Module:
    if kind == "encoder":
        return Encoder(EncoderConfig(vocab_size=33, max_length=24, **SHAPE))
    return VisionTransformer(VisionConfig(**SHAPE))


@pytest.mark.parametrize("kind", ["encoder", "vision"])
def test_a_live_module_is_checked(kind):
    found = normlab.check(model_of(kind), steps=3)
    assert found.verdicts
    assert found.profile("before").depth == 3
    assert "certificate" in {verdict.name for verdict in found.verdicts}


def test_what_an_encoder_is_run_on():
    target = resolve(model_of("encoder"))
    inputs, targets = next(target.batches())
    assert inputs.shape == (8, 24)
    assert inputs.max() == 32
    assert targets.max() < 32
    assert (inputs[targets == -100] < 32).all()
    assert target.twin() is None
    with pytest.raises(NormLabError, match="the data has 257 tokens, the model 32"):
        resolve(model_of("encoder"), data=__file__)


def test_what_a_vision_transformer_is_run_on():
    target = resolve(model_of("vision"))
    (one, labels), (again, _) = next(target.batches(1)), next(target.batches(1))
    assert torch.equal(one, again)
    assert one.shape == (8, 1, 8, 8)
    assert labels.max() < 10
    assert not torch.equal(one, next(target.batches(2))[0])
    assert sum(p.numel() for g in target.param_groups(target.model, 1e-3, 0.1) for p in g["params"]) == sum(
        p.numel() for p in target.model.parameters()
    )
