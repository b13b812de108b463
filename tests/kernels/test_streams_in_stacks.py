"""Stacks of schemes with several streams, with the fused step against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import normlab
from normlab.kernels import streams
from tests.kernels.chains import random_stack
from tests.kernels.test_streams import ARITHMETIC, BF16, F32
from tests.matrix import parametrize

SPECS = (
    "hc(dynamic=False)",
    "hc",
    "hc(streams=3, norm='layer')",
    "mhc",
    "mhc(rounds=2)",
    "mhc(streams=5)",
    "mhc(mixing='none')",
    "mhc(norm='dyt')",
)


def stack_gradients(spec: str, kernels: str, dtype=F32) -> tuple[list[Tensor], normlab.Stack]:
    """Output, gradient of the input, gradient of every parameter, at random coefficients."""
    stack = random_stack(spec, kernels)
    x = torch.randn(2, 3, 24).to(dtype).requires_grad_()
    stack.to(dtype)
    y = stack(x)
    (y * torch.linspace(-1.0, 1.0, 24, dtype=dtype)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in stack.parameters())], stack


@parametrize("spec", SPECS, quick=["hc(dynamic=False)", "mhc(rounds=2)"])
def test_stacks_agree_at_random_coefficients(spec, monkeypatch):
    calls = []
    for name in ("write_streams", "read_streams", "write_and_read_streams"):
        whole = getattr(streams, name)
        at = f"normlab.schemes.contract.streams.{name}"
        monkeypatch.setattr(at, lambda *a, name=name, whole=whole, **k: calls.append(name) or whole(*a, **k))
    ours, stack = stack_gradients(spec, "triton")
    exact, _ = stack_gradients(spec, "reference", torch.float64)
    names = ["output", "input", *(name for name, _ in stack.named_parameters())]
    for name, one, two in zip(names, ours, exact, strict=True):
        # Four sublayers, each some forty fp32 roundings of products, norms and coefficients, forward and backward. A
        # coefficient before a norm has a gradient that cancels, down to none at all; its terms are of size 0.1.
        assert (one - two).abs().max() <= 320 * 2.0**-24 * two.abs().max().clamp_min(0.1), name
    # Every write but the last is joined with a read. The first read is alone, and so is an exit that weights streams.
    joined = {"hc(dynamic=False)": 3}.get(spec, 0)
    assert calls.count("write_and_read_streams") == joined
    assert calls.count("write_streams") == 4 - joined
    assert calls.count("read_streams") == (0 if "dyt" in spec else 4 - joined + ("mhc" in spec))


@pytest.mark.parametrize("spec", ["hc", "mhc"])
def test_refined_steps_reach_the_kernel(spec):
    step = normlab.scheme(spec).refine(3).bind(depth=6, dim=24).block(1).steps[0]
    with torch.no_grad():
        for parameter in step.parameters():
            parameter += torch.randn(parameter.shape) * 0.3
    state, update = torch.randn(2, 4, 24), torch.randn(2, 24)
    _, *carry = step.read(state)
    expected = step.write(state, update, *carry)
    after, seen = step.write.write_and_read(state, update, torch.nn.Identity(), step.read, "triton", *carry)
    assert (after - expected).abs().max() <= ARITHMETIC * expected.abs().max()
    for one, two in zip(seen, step.read(expected), strict=True):
        assert (one - two).abs().max() <= 2 * ARITHMETIC * two.abs().max()


@parametrize("spec", ["hc(dynamic=False)", "hc", "mhc", "dual"], quick=["mhc"])
def test_coefficients_keep_full_precision_under_autocast(spec):
    found = []
    for kernels in ("triton", "reference"):
        torch.manual_seed(0)
        stack = normlab.Stack(spec, [(torch.nn.Identity(), torch.nn.Identity())], 24, kernels=kernels)
        stack.init_(std=0.1, generator=torch.Generator(torch.get_default_device()).manual_seed(0))
        x = torch.randn(2, 3, 24)
        with torch.autocast(x.device.type, BF16):
            found.append(stack(x).detach())
    ours, theirs = found
    # Branches without products: nothing may round to half precision. Two sublayers of some forty fp32 roundings.
    assert (ours - theirs).abs().max() <= 80 * 2.0**-24 * theirs.abs().max()
