"""The first module that is not finite, forward and backward, in a batch that is run once more."""

from __future__ import annotations

import math

import pytest
import torch

from normlab import Decoder, DecoderConfig
from normlab.probes.first_nonfinite import first_nonfinite

SIZE = {"depth": 3, "dim": 32, "heads": 4, "vocab_size": 61, "max_length": 64}


def batch():
    tokens = torch.randint(0, 61, (3, 11), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("scheme", ["pre", "post", "geonorm", "ngpt", "dual"])
@pytest.mark.parametrize("module", ["stack.layers.1.branches.0.out", "stack.layers.2.branches.1.gate_up", "embedding"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_first_module_is_named(scheme, module, bad):
    model = Decoder(DecoderConfig(scheme=scheme, **SIZE))
    with torch.no_grad():
        weight = model.get_submodule(module).weight
        weight[batch()[0][0, 0] if module == "embedding" else 0] = bad
    found = first_nonfinite(model, *batch())
    assert found.forward == found.layer == module
    assert module in str(found)


def test_a_broken_gradient_is_named():
    model = Decoder(DecoderConfig(scheme="pre", **SIZE))

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x.clone()

        @staticmethod
        def backward(_ctx, grad):
            return grad * torch.nan

    # Whatever stands behind the attention of block 1 breaks its gradient on the way back.
    handle = model.stack.layers[1].branches[0].register_forward_hook(lambda _m, _a, out: Poison.apply(out))
    found = first_nonfinite(model, *batch())
    handle.remove()
    assert found.forward is None
    assert found.backward in ("stack.layers.1.branches.0", "stack.layers.1.branches.0.out")
    assert found.layer == found.backward
    assert not any(module._forward_hooks for module in model.modules())


def test_the_largest_gradient_is_named():
    model = Decoder(DecoderConfig(scheme="pre", tied=False, **SIZE)).double()
    with torch.no_grad():
        model.stack.layers[2].branches[1].down.weight.mul_(1e3)
    found = first_nonfinite(model, *batch())
    model.loss(*batch()).backward()
    norms = {
        k: math.sqrt(sum(float(p.grad.square().sum()) for p in layer.parameters()))
        for k, layer in enumerate(model.stack.layers)
    }
    largest = max(norms, key=norms.__getitem__)
    assert found.largest == f"stack.layers.{largest}"
    # Norms are taken in fp32.
    assert found.norm == pytest.approx(norms[largest], rel=1e-5)
    assert found.forward is found.backward is None


def test_a_healthy_model_is_left_as_it_was():
    model = Decoder(DecoderConfig(scheme="peri", experts=4, **SIZE))
    model.loss(*batch()).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    first, second = first_nonfinite(model, *batch()), first_nonfinite(model, *batch())
    assert first == second
    assert first.forward is first.backward is None
    assert math.isfinite(first.norm)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
