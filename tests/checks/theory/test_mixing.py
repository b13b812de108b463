"""Gain of the product of mixing matrices through depth, against products written out and known gains."""

from __future__ import annotations

import json

import pytest
import torch

import normlab
from normlab.checks.theory.certificates import observe
from normlab.checks.theory.records import Theory, TheoryLook
from normlab.testing.small import make_input, make_stack


def gain(stack):
    return observe(stack, lambda: stack(make_input())).mixing


@pytest.mark.parametrize("name", ["pre", "dual", "hy-v4", "siamese"])
def test_schemes_that_mix_no_streams_have_no_gain(name):
    assert gain(make_stack(name)) is None


@pytest.mark.parametrize("name", ["hc", "shc", "mhc", "mhc(diagonal=8.0)"])
def test_at_the_start_mixing_enlarges_nothing(name):
    found = gain(make_stack(name))
    # Doubly stochastic up to an epsilon of 1e-6 in each of 8 steps; hc starts with the identity.
    assert found.forward == pytest.approx(1.0, abs=2e-5)
    assert found.backward == pytest.approx(1.0, abs=2e-5)
    assert found.spread < 0.05


def test_the_product_is_that_of_the_matrices_in_their_order():
    stack = make_stack("shc", 3)
    product = torch.eye(4, dtype=torch.float64)
    for k, step in enumerate(step for layer in stack.layers for step in layer.block.steps):
        step.read.mix.data.add_(torch.randn(4, 4, generator=torch.Generator().manual_seed(k)))
        product = step.read.mix.detach().double().T @ product
    found = gain(stack)
    assert found.forward == pytest.approx(float(product.abs().sum(1).max()), rel=1e-6)
    assert found.backward == pytest.approx(float(product.abs().sum(0).max()), rel=1e-6)
    assert found.forward != pytest.approx(found.backward, rel=1e-2)


def test_manifold_constrained_mixing_never_enlarges_a_stream_whatever_its_logits():
    """The forward gain is at most 1; the backward gain is what the rows of comb lack of 1 (1.02 a step at most)."""
    stack = make_stack("mhc", 12)
    generator = torch.Generator().manual_seed(0)
    for layer in stack.layers:
        for step in layer.block.steps:
            step.read.logits.base.data.add_(10 * torch.randn(24, generator=generator))
    found = gain(stack)
    assert found.forward <= 1.0 + 1e-6
    assert 1.0 < found.backward < 3.0


def test_a_refined_step_mixes_a_part_of_the_way():
    stack = make_stack(normlab.scheme("shc").refine(2), 1)
    for step in stack.layers[0].block.steps:
        step.read.mix.data.mul_(3.0)
    assert gain(stack).forward == pytest.approx(2.0**2)


def test_gains_are_judged():
    for value, level in ((1.6, "ok"), (30.0, "warn"), (3000.0, "fail")):
        look = TheoryLook(step=5, mixing_forward=value, mixing_backward=1.0, stream_spread=0.1)
        verdict = Theory(depth=4, before=look).verdicts()[-1]
        assert (verdict.name, verdict.level, verdict.value) == ("mixing", level, value)
        assert "at step 5; streams 10.00% apart" in verdict.words


def test_a_gain_beyond_all_numbers_is_found():
    stack = make_stack("shc", 12)
    for layer in stack.layers:
        for step in layer.block.steps:
            step.read.mix.data.mul_(1e20)
    look = TheoryLook(step=0, mixing_forward=gain(stack).forward)
    assert look.mixing >= 1e29
    assert json.loads(json.dumps(Theory(depth=12, before=look).to_dict()))["before"]["mixing_forward"] >= 1e29
