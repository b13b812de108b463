"""Norm functions against their definitions, torch's own, and their bounds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

from normlab import NormLabError, norms

KINDS = list(norms.NORMS)
GAINS = ["plain", "offset", "none"]
EPS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def make(kind: str, dim: int = 7, **options) -> norms.Norm:
    norm = norms.norm(kind, dim, **options).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64) * 0.3)
    return norm


def definition(norm: norms.Norm, x: torch.Tensor) -> torch.Tensor:
    """The formulas of the facts, written apart from the library."""
    name = type(norm).__name__
    if name == "RMSNorm":
        y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + norm.eps)
    elif name == "LayerNorm":
        y = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, correction=0) + norm.eps)
    elif name == "L2Norm":
        y = x / torch.sqrt((x * x).sum(-1, keepdim=True) + norm.eps**2)
    elif name == "DyT":
        y = torch.tanh(norm.alpha * x)
    elif name == "Derf":
        y = torch.erf(norm.alpha * x + norm.shift)
    else:
        y = x
    gain = 1.0 if norm.weight is None else 1.0 + norm.weight if norm.offset else norm.weight
    return gain * y + (0.0 if norm.bias is None else norm.bias)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("bias", [False, True])
def test_definition_and_gradients(kind, gain, bias):
    norm = make(kind, gain=gain, bias=bias, eps=1e-3)
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.allclose(norm(x), definition(norm, x), rtol=1e-14, atol=1e-14)
    assert gradcheck(norm, x)
    assert gradgradcheck(norm, x)


def test_torch_agrees():
    x = torch.randn(4, 9, dtype=torch.float64)
    assert torch.allclose(norms.RMSNorm(9, eps=1e-5).double()(x), nn.RMSNorm(9, eps=1e-5).double()(x), atol=1e-14)
    assert torch.allclose(norms.LayerNorm(9, eps=1e-5).double()(x), nn.LayerNorm(9, eps=1e-5).double()(x), atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_gains_start_at_one_and_stay_in_fp32(kind):
    torch.set_default_dtype(torch.bfloat16)
    try:
        plain, offset = norms.norm(kind, 5), norms.norm(kind, 5, gain="offset")
    finally:
        torch.set_default_dtype(torch.float32)
    for norm in (plain, offset):
        assert all(p.dtype == torch.float32 for p in norm.parameters())
        scale = norm.scale()
        assert scale is not None
        assert torch.equal(scale.detach(), torch.ones(5))
    x = torch.randn(2, 5)
    assert torch.equal(plain(x), offset(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_half_precision_rounds_once(kind, dtype):
    norm = norms.norm(kind, 64)
    x = torch.randn(8, 64).to(dtype)
    exact = norm.double()(x.double())
    # One rounding to the type at the end; all else is fp32.
    error = (norm.float()(x).double() - exact).abs()
    assert (error <= EPS[dtype] * exact.abs() * 1.01 + 1e-7).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_finite_at_zero_tiny_and_huge(kind, scale, dtype):
    norm = norms.norm(kind, 32)
    x = (torch.randn(4, 32) * scale).to(dtype).requires_grad_()
    y = norm(x)
    assert y.dtype == dtype
    assert y.isfinite().all()
    (y.float().sum() / 1e3).backward()
    assert x.grad is not None
    # At zero an L2 norm's slope is 1/eps = 1e6, beyond fp16: schemes put `ToSphere` where zeros may come.
    if not (kind == "l2" and scale == 0.0 and dtype == torch.float16):
        assert x.grad.isfinite().all()


def test_nan_is_not_hidden():
    x = torch.tensor([1.0, float("nan"), 2.0])
    for kind in KINDS:
        assert norms.norm(kind, 3)(x).isnan().any()


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(KINDS),
    size=st.floats(1e-3, 1e3),
    seed=st.integers(0, 10**6),
    bias=st.booleans(),
    gain=st.sampled_from(GAINS),
)
def test_bounds_hold(kind, size, seed, bias, gain):
    torch.manual_seed(seed)
    norm = make(kind, bias=bias, gain=gain)
    x = torch.randn(20, 7, dtype=torch.float64) * size
    largest = float(norms.rms(x).max())
    assert float(norms.rms(norm(x)).detach().max()) <= norm.rms_bound(largest) * (1 + 1e-12)


def test_materialised_norms_are_initialised_again():
    for kind in KINDS:
        with torch.device("meta"):
            norm = norms.norm(kind, 4, bias=True, init=0.5)
        norm.to_empty(device="cpu").reset_parameters()
        direct = norms.norm(kind, 4, bias=True, init=0.5)
        assert all(torch.equal(a, b) for a, b in zip(norm.parameters(), direct.parameters(), strict=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: norms.norm("rmsnorm", 4), "unknown norm 'rmsnorm'; did you mean 'rms'"),
        (lambda: norms.norm("rms", 0), "width must be at least 1"),
        (lambda: norms.norm("rms", 4, eps=-1.0), "eps must not be negative"),
        (lambda: norms.norm("rms", 4, eps=math.nan), "eps must not be negative, and finite, got nan"),
        (lambda: norms.norm("rms", 4, gain="ones"), "unknown gain 'ones'"),
    ],
)
def test_bad_input_gets_one_clear_line(call, message):
    with pytest.raises(NormLabError, match=message):
        call()
