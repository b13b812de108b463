"""Traces against closed forms: Adam's first steps in a linear model, and in the embedding of a decoder."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normlab.checks.coordinates.axes import start
from normlab.checks.coordinates.trace import trace
from normlab.targets import resolve
from tests.checks.coordinates import known

LR = 1e-3


def traced(target, steps=3, lr=LR, **sizes):
    model, optimiser = start(target, lr=lr, seed=0, **sizes)
    return trace(target, model, optimiser, steps=steps, seed=0)


@pytest.mark.parametrize(("depth", "width"), [(2, 4), (3, 32)])
def test_changes_in_a_linear_model(depth, width) -> None:
    found = traced(resolve(known.without_rule), depth=depth, width=width)
    assert list(found) == ["layers.*.matrix", "layers (last)"]
    for step in range(3):
        moved = LR * (step + 1) * width
        # Adam's ε of 1e-8 beside gradients of 3, three tokens of one kind, and fp32 sums around 10.
        assert found["layers.*.matrix"].changes[step] == pytest.approx(moved, rel=1e-4)
        assert found["layers (last)"].changes[step] == pytest.approx(moved * depth, rel=1e-3)
    assert found["layers (last)"].sizes[0] == pytest.approx(10.0, abs=0.05)


def test_the_embedding_moves_by_the_rate_in_adams_first_step() -> None:
    found = traced(resolve("pre"), steps=1, depth=2, width=32)
    # Every entry has a gradient far above ε, and the tokens that are measured are those of the batch.
    assert found["embedding"].changes[0] == pytest.approx(LR, rel=1e-2)
    assert list(found)[-1] == "logits"
    assert not any(name.startswith("head") for name in found)


def test_states_are_hidden_states() -> None:
    # The sphere form carries the radius as one more entry.
    plain, sphere = (traced(resolve(name), steps=1, depth=2, width=32) for name in ("pre", "pre(form=sphere)"))
    last = "stack.layers (last)"
    assert sphere[last].sizes[0] != plain[last].sizes[0]
    assert sphere[last].sizes[0] == pytest.approx(1.0, rel=1e-3)
    assert sphere["logits"].sizes[0] == pytest.approx(plain["logits"].sizes[0], rel=1e-3)


def test_dropout_is_no_change() -> None:
    def factory(depth=2, width=16):
        blocks = [nn.TransformerEncoderLayer(width, 2, dropout=0.5, batch_first=True) for _ in range(depth)]
        return nn.Sequential(nn.Embedding(64, width), nn.Sequential(*blocks), nn.Linear(width, 64))

    target = resolve(factory)
    model, _ = start(target, lr=LR, seed=0)
    frozen = torch.optim.SGD(model.parameters(), lr=0.0)
    found = trace(target, model, frozen, steps=2, seed=0)
    assert all(change == 0.0 for one in found.values() for change in one.changes)
    assert model.training


def test_a_training_that_breaks_ends_with_none() -> None:
    target = resolve(known.without_rule)
    model, optimiser = start(target, lr=LR, seed=0, depth=2, width=4)

    def explode(*_):
        raise AssertionError("a step was taken")

    optimiser.step = explode
    with torch.no_grad():
        model.layers[0].matrix.weight.fill_(float("nan"))
    found = trace(target, model, optimiser, steps=2, seed=0)
    assert found["layers.*.matrix"].changes == (None, None)
    assert found["layers (last)"].sizes == (None, None, None)
