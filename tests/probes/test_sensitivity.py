"""Sensitivity to the input, against finite differences and against a stack whose derivative is known."""

from __future__ import annotations

import math

import pytest
import torch

from normlab import Decoder, DecoderConfig, Encoder, EncoderConfig, VisionConfig, VisionTransformer
from normlab.probes.sensitivity import sensitivity

SIZE = {"depth": 3, "dim": 32, "heads": 4}
WORDS = {"vocab_size": 61, "max_length": 64}


def tokens(rows=16, length=12):
    return torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(1))


def moved(model, inputs, trials=24, size=1e-6):
    """Mean of the squared relative change of what leaves the stack, per relative change of what enters it."""
    states = {}
    handle = model.stack.register_forward_pre_hook(lambda _m, args: states.update(entering=args[0]))
    with torch.no_grad():
        model.features(inputs)
        entering = states["entering"]
        handle.remove()
        made, shares = torch.Generator().manual_seed(2), []
        outputs = []
        listen = model.stack.register_forward_hook(lambda _m, _a, output: outputs.append(output))
        model.features(inputs)
        for _ in range(trials):
            shift = size * torch.randn(entering.shape, generator=made, dtype=torch.float64)
            handle = model.stack.register_forward_pre_hook(lambda _m, args, shift=shift: (args[0] + shift,))
            model.features(inputs)
            handle.remove()
            change = (outputs[-1] - outputs[0]).norm() / outputs[0].norm()
            shares.append(float(change / (shift.norm() / entering.norm())) ** 2)
        listen.remove()
    return math.sqrt(sum(shares) / trials)


@pytest.mark.parametrize("scheme", ["pre", "post", "geonorm", "spannorm"])
def test_it_is_what_small_perturbations_show(scheme):
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(scheme=scheme, **SIZE, **WORDS)).double()
    # Both sides are estimates: 24 directions of 6144 there, one here; the derivative keeps hundreds of directions.
    assert sensitivity(model, tokens()) == pytest.approx(moved(model, tokens()), rel=0.1)


def test_an_identity_has_sensitivity_one_and_a_norm_loses_the_radius():
    model = Decoder(DecoderConfig(scheme="none", **SIZE, **WORDS)).double()
    with torch.no_grad():
        for layer in model.stack.layers:
            layer.branches[0].out.weight.zero_()
            layer.branches[1].down.weight.zero_()
    entries = 192 * 32
    model.stack.exit = torch.nn.Identity()
    # ‖v‖²/n of n Gaussian entries is 1 with standard deviation √(2/n); five of them.
    spread = 5 * math.sqrt(2 / entries)
    assert sensitivity(model, tokens()) == pytest.approx(1.0, rel=spread)
    model.stack.exit = torch.nn.LayerNorm(32, elementwise_affine=False, eps=0.0).double()
    # What a norm without gain passes on of a token x is what has neither its mean nor its direction: D - 2 of D
    # directions, divided by the deviation of x and so, relative to √D, by ‖x - mean‖/√D.
    with torch.no_grad():
        x = model.embedding(tokens())
        deviation = x.var(-1, unbiased=False)
        expected = float((30 / deviation).sum() * x.square().sum() / entries / entries)
    assert sensitivity(model, tokens()) == pytest.approx(math.sqrt(expected), rel=spread)


def test_every_task_has_one():
    small = {"image_size": 16, "patch": 4, "channels": 1, "classes": 10}
    images = torch.rand(4, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    assert sensitivity(VisionTransformer(VisionConfig(**SIZE, **small)), images) > 0
    assert sensitivity(Encoder(EncoderConfig(**SIZE, **WORDS)), tokens()) > 0


def test_half_precision_says_nearly_the_same():
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(scheme="peri", stream="bf16", **SIZE, **WORDS))
    exact = sensitivity(model, tokens())
    with torch.autocast("cpu", torch.bfloat16):
        assert sensitivity(model, tokens()) == pytest.approx(exact, rel=0.05)


def test_nothing_remains_and_what_is_not_finite_is_none():
    model = Decoder(DecoderConfig(scheme="pre", **SIZE, **WORDS))
    random = torch.get_rng_state()
    sensitivity(model, tokens())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.stack._forward_hooks
    assert not model.stack._forward_pre_hooks
    assert torch.equal(torch.get_rng_state(), random)
    with torch.no_grad():
        model.stack.layers[1].branches[0].out.weight[0, 0] = torch.nan
    assert sensitivity(model, tokens()) is None
