"""A look survives what is not finite, and names the module and the step that made it."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from normlab.probes.hidden_state import sample
from normlab.probes.probe import measure, probe
from tests.probes.loops import Block, Tower, decoder, loss_of, text


@pytest.mark.parametrize("block", [0, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_planted_value_is_named_with_its_module_and_step(block, value):
    model = decoder()
    down = model.stack.layers[block].branches[1]
    matrix = next(module for module in down.modules() if isinstance(module, nn.Linear))
    with torch.no_grad():
        matrix.weight[0, 0] = value
    profile = measure(model, text(), loss_of, step=7)
    assert profile.nan_first is not None
    assert profile.nan_first.startswith(f"stack.layers.{block}.branches.1")
    assert profile.nan_first.endswith("at step 7")
    assert profile.first_broken == block + 1
    assert "loss" in profile.unfit
    json.dumps(profile.to_dict(), allow_nan=False)


def test_a_bad_embedding_and_a_bad_loss_are_told_from_bad_blocks():
    model = decoder()
    with torch.no_grad():
        model.embedding.weight[5] = math.nan
    inputs, targets = text()
    inputs[0, 0] = 5
    profile = measure(model, (inputs, targets), loss_of)
    assert profile.nan_first == "embedding at step 0"
    assert profile.first_broken == 0
    assert 0.0 < profile.broken[0] < 1.0
    profile = measure(decoder(), text(), lambda model, batch: model.loss(*batch) * math.nan)
    assert profile.nan_first == "the loss at step 0"


class NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * math.nan


def test_a_gradient_that_breaks_on_the_way_back_is_named():
    class Breaks(Block):
        def forward(self, x):
            return NanBackward.apply(super().forward(x))

    profile = measure(Tower([Block(), Block(), Block()]), torch.randn(2, 5, 8))
    assert profile.nan_first is None
    tower = Tower([Block() for _ in range(4)])
    tower.layers[1].__class__ = Breaks
    profile = measure(tower, torch.randn(2, 5, 8), blocks="layers.*", step=2)
    assert profile.nan_first == "the gradient of layers.1 at step 2"
    assert profile.broken == [0.0] * 5
    assert profile.grad_broken == [1.0, 1.0, 0.0, 0.0, 0.0]
    profile = measure(Tower(), torch.randn(2, 5, 8), lambda model, x: NanBackward.apply(model(x)))
    assert profile.nan_first == "the gradient that reaches layers at step 0"


def test_a_parameter_gradient_alone_can_be_broken():
    tower = Tower()
    tower.layers[2].mix.bias.register_hook(lambda grad: grad * math.nan)
    profile = measure(tower, torch.randn(2, 5, 8))
    assert profile.nan_first == "the gradient of layers.2 at step 0"
    assert profile.grad_w[2] is None
    assert not profile.gradient_broken


def test_the_pass_that_broke_is_told_from_the_one_before():
    model, batch = decoder(), text()
    matrix = next(module for module in model.stack.layers[1].branches[1].modules() if isinstance(module, nn.Linear))
    with probe(model, step=4) as look:
        model.loss(*batch).backward()
        with torch.no_grad():
            matrix.weight.fill_(math.nan)
        model.loss(*batch).backward()
    assert look.profile.nan_first is not None
    assert look.profile.nan_first.startswith("stack.layers.1.branches.1")
    assert look.profile.nan_first.endswith("(call 2) at step 4")
    assert look.profile.broken == [0.0, 0.0, 0.5, 0.5]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_single_entry_that_no_sampled_token_holds_is_found(value):
    tower = Tower()
    x = torch.randn(3, 5000, 8)
    place = (1, 4321)
    seen = sample(torch.arange(15000.0).view(3, 5000, 1))
    assert 5000 + 4321 not in seen

    def spoil(_block, _args, output):
        output = output.clone()
        output[*place, 3] = value
        return output

    tower.layers[1].register_forward_hook(spoil)
    profile = measure(tower, x, step=5)
    assert profile.nan_first == "layers.1 at step 5"
    assert profile.first_broken == 2
    assert profile.broken[:2] == [0.0, 0.0]
    assert profile.broken[2] == pytest.approx(1 / x.numel())
    assert None not in profile.rms
