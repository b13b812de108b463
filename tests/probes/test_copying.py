"""Losses of a random sequence and of its repetition, against a model that copies exactly and one that cannot."""

from __future__ import annotations

import math

import pytest
import torch

from normlab import Decoder, DecoderConfig
from normlab.probes.copying import copy_losses

VOCABULARY = 61
SIZE = {"scheme": "pre", "depth": 2, "dim": 32, "heads": 4, "vocab_size": VOCABULARY, "max_length": 64}


def tokens(rows=4, length=32, distinct=False):
    made = torch.Generator().manual_seed(1)
    if distinct:
        return torch.randperm(VOCABULARY, generator=made)[: rows * length].view(rows, length)
    return torch.randint(0, VOCABULARY, (rows, length), generator=made)


class Stub(Decoder):
    """A decoder whose loss is made by a rule from its inputs, in place of its weights."""

    def __init__(self, rule):
        super().__init__(DecoderConfig(**SIZE))
        self.rule = rule

    def cross_entropy(self, inputs, targets, **options):
        losses = self.rule(inputs, targets)
        return losses[targets != -100].mean()


def copies(inputs, targets):
    """A token costs nothing if its pair with the one before has been there before, else 5 nats."""
    losses = torch.full(inputs.shape, 5.0)
    for row, (seen, wanted) in enumerate(zip(inputs.tolist(), targets.tolist(), strict=True)):
        pairs = set()
        for place, (token, target) in enumerate(zip(seen, wanted, strict=True)):
            if (token, target) in pairs:
                losses[row, place] = 0.0
            if place + 1 < len(seen):
                pairs.add((token, seen[place + 1]))
    return losses


def test_a_perfect_copier_loses_nothing_in_the_second_copy():
    found = copy_losses(Stub(copies), tokens(rows=2, length=30, distinct=True))
    assert found == (5.0, 0.0)


def test_both_copies_have_the_same_targets_and_the_seam_is_left_out():
    seen = []

    def record(inputs, targets):
        seen.append((inputs, targets))
        return torch.zeros(inputs.shape)

    copy_losses(Stub(record), tokens(rows=3, length=11))
    (inputs, first), (again, second) = seen
    assert inputs.shape == (3, 10)
    assert torch.equal(inputs, again)
    assert torch.equal(inputs[:, :5], inputs[:, 5:])
    assert torch.equal(first[:, :4], inputs[:, 1:5])
    assert torch.equal(second[:, 5:9], inputs[:, 6:])
    assert torch.equal(first[:, :4], second[:, 5:9])
    assert (first[:, 4:] == -100).all()
    assert (second[:, :5] == -100).all()
    assert (second[:, 9:] == -100).all()


def test_tokens_are_those_of_the_batch_in_one_fixed_order():
    given, seen = tokens(rows=2, length=30, distinct=True), []
    model = Stub(lambda inputs, _: seen.append(inputs) or torch.zeros(inputs.shape))
    copy_losses(model, given)
    copy_losses(model, given)
    assert set(seen[0].flatten().tolist()) <= set(given.flatten().tolist())
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0][:, :15], given[:, :15])


def test_a_model_without_attention_cannot_copy():
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**SIZE)).double()
    with torch.no_grad():
        for layer in model.stack.layers:
            layer.branches[0].out.weight.zero_()
    found = copy_losses(model, tokens(length=64))
    assert found.second == pytest.approx(found.first, rel=1e-12)


@pytest.mark.full
def test_a_trained_model_learns_to_copy():
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**{**SIZE, "dim": 64}))
    optimiser = torch.optim.AdamW(model.param_groups(lr=3e-3))
    made = torch.Generator().manual_seed(2)
    for _ in range(300):
        half = torch.randint(0, VOCABULARY, (32, 16), generator=made)
        twice = torch.cat([half, half], 1)
        loss = model.loss(twice[:, :-1], twice[:, 1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    found = copy_losses(model, tokens(rows=16))
    # The first copy cannot be predicted: ln 61 = 4.11 at best. The second can.
    assert found.first > math.log(VOCABULARY) - 0.3
    assert found.second < 0.5 * found.first


def test_what_is_not_finite_is_none_and_short_rows_say_nothing():
    model = Decoder(DecoderConfig(**SIZE))
    assert copy_losses(model, tokens(length=3)) is None
    assert copy_losses(model, tokens(length=4)) is not None
    with torch.no_grad():
        model.stack.layers[0].branches[0].out.weight[0, 0] = torch.nan
    assert copy_losses(model, tokens()) == (None, None)


def test_nothing_remains_in_the_model():
    model = Decoder(DecoderConfig(**SIZE))
    random = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        copy_losses(model, tokens())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
