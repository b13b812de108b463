"""The gated product and the matrix behind it as one step, in Triton's interpreter, against its twin and float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from normlab import NormLabError
from normlab.kernels import swiglu
from normlab.kernels.fused import swiglu as fused
from normlab.kernels.swiglu import backward_reference, gated, gated_linear
from normlab.models import MLP
from tests.matrix import parametrize

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def assert_backward(raw, dh) -> None:
    """(d_raw, h) of the kernel against autograd in float64 on the same numbers."""
    wide, dh_dtype = raw.double().requires_grad_(), dh.dtype
    h = gated(wide)
    (d_raw,) = torch.autograd.grad(h, wide, dh.double())
    found = swiglu._backward_op(raw, dh)
    gate, up = wide.detach().chunk(2, -1)
    dh, up, size = dh.double().abs(), up.abs(), gate.abs()
    # Eight fp32 roundings of products of σ. A GPU's e^x is 2^(x log₂e), whose exponent is rounded: |x| · 2^-24 of
    # σ(−x); and its division returns 0 where the divisor is beyond 2^126, so a σ of less than 2^-126 may be lost.
    slack = 8 * 2.0**-24 * gate.sigmoid() * (1.0 + (-gate).clamp_min(0.0)) + 2.0**-126
    factors = torch.cat((dh * up * (1.0 + size), dh * size), -1), up * size
    for one, two, factor, dtype in zip(found, (d_raw, h.detach()), factors, (raw.dtype, dh_dtype), strict=True):
        assert (one.dtype, one.shape) == (dtype, two.shape)
        kind = torch.finfo(dtype)
        # A whole ulp, for the interpreter truncates to bf16.
        times = torch.cat((slack, slack), -1) if one is found[0] else slack
        allowed = kind.eps * two.abs() + factor * times + 4 * kind.smallest_normal
        assert ((one.double() - two).abs() <= allowed).all()


@parametrize("width", [1, 3, 64, 100, 2048, 2049, 5000], quick=[1, 100, 2049])
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (F16, F16), (F32, BF16), (BF16, F32)], ids=str)
def test_gradients_and_hidden_layer(dtypes, width):
    rows = 2 * max(1, 2048 // width) + 1
    assert_backward((2.0 * torch.randn(rows, 2 * width)).to(dtypes[0]), torch.randn(rows, width).to(dtypes[1]))


@pytest.mark.parametrize("size", [0.0, 1e-20, 80.0, 1e4])
def test_any_size_of_gate(size):
    raw = torch.randn(5, 128)
    raw[:, :64] *= size
    assert_backward(raw, torch.randn(5, 64))


def test_rows_that_are_not_contiguous():
    assert_backward(torch.randn(200, 3, 4).permute(1, 2, 0), torch.randn(100).expand(3, 4, 100))


def test_twin_of_the_kernel():
    raw, dh = torch.randn(3, 5, 14, dtype=torch.float64, requires_grad=True), torch.randn(3, 5, 7, dtype=torch.float64)
    d_raw, h = backward_reference(raw.detach(), dh)
    assert torch.allclose(h, gated(raw), rtol=1e-14)
    assert torch.allclose(d_raw, torch.autograd.grad(gated(raw), raw, dh)[0], rtol=1e-12, atol=1e-15)
    ours = swiglu._backward_op(raw.detach().float(), dh.float())
    for one, two in zip(ours, backward_reference(raw.detach().float(), dh.float()), strict=True):
        assert torch.allclose(one, two, rtol=16 * 2.0**-24, atol=1e-7)


def test_twin_against_finite_differences():
    raw, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 6), (5, 3), (5,)))
    call = lambda *tensors: gated_linear(*tensors, kernels="reference")  # noqa: E731
    assert torch.autograd.gradcheck(call, (raw, weight, bias))
    assert torch.autograd.gradgradcheck(call, (raw, weight, bias))


def layer(dtype=F32, bias=True, hidden=40) -> MLP:
    torch.manual_seed(0)
    return MLP(24, hidden, bias=bias).to(dtype)


def run(mlp, x, d, kernels):
    """Output, gradient of the input and of every parameter."""
    mlp.kernels = kernels
    x = x.detach().requires_grad_()
    y = mlp(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *mlp.parameters()], d.to(y.dtype))]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(24,), (5, 24), (2, 3, 24), (2, 0, 24)])
def test_an_mlp_and_every_gradient(shape, bias):
    mlp, x, d = layer(bias=bias), torch.randn(shape), torch.randn(shape)
    ours, theirs = (run(mlp, x, d, kernels) for kernels in ("triton", "reference"))
    # The forward pass is the same operators.
    assert torch.equal(ours[0], theirs[0])
    for one, two in zip(ours, theirs, strict=True):
        # Two matrix products of at most 80 terms and one nonlinearity.
        assert (one - two).abs().amax().nan_to_num() <= 100 * 2.0**-24 * two.abs().amax() if one.numel() else True


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision_is_no_worse_than_the_reference(dtype, autocast):
    mlp = layer(F32 if autocast else dtype)
    x, d = torch.randn(64, 24), torch.randn(64, 24)
    exact = run(layer().to(mlp.down.weight.dtype).double(), x.double(), d, "reference")
    errors = {}
    for kernels in ("triton", "reference"):
        with torch.autocast(torch.get_default_device().type, dtype, enabled=autocast):
            found = run(mlp, x, d, kernels)
        expected = [dtype, F32, *(p.dtype for p in mlp.parameters())]
        assert [t.dtype for t in found] == expected
        errors[kernels] = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
    # One truncation (the interpreter's) where the reference rounds three times.
    for one, two in zip(errors["triton"], errors["reference"], strict=True):
        assert one <= two + torch.finfo(dtype).eps


def test_a_weight_of_another_format_than_the_input():
    mlp = layer()
    mlp.down.to(BF16)
    x, d = torch.randn(6, 24), torch.randn(6, 24)
    for one, two in zip(run(mlp, x, d, "triton"), run(mlp, x, d, "reference"), strict=True):
        assert one.dtype == two.dtype
        assert (one - two).norm() <= 4 * 2.0**-8 * two.norm()


def saved(call) -> list[int]:
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        call()
    return sorted(kept)


def test_only_what_went_in_is_kept():
    mlp, x = layer(bias=False), torch.randn(7, 24, requires_grad=True)
    mlp.kernels = "triton"
    matrices = [mlp.gate_up.weight.numel(), mlp.down.weight.numel()]
    assert saved(lambda: mlp(x)) == sorted([7 * 24, 7 * 2 * 40, *matrices])
    mlp.kernels = "reference"
    # Gate and up, silu(gate) and h besides: as much again.
    assert saved(lambda: mlp(x)) == sorted([7 * 24, *[7 * 40] * 4, *matrices])


def test_frozen_weights_get_no_gradient():
    mlp = layer()
    mlp.kernels = "triton"
    mlp.down.requires_grad_(False)
    x = torch.randn(3, 24, requires_grad=True)
    mlp(x).sum().backward()
    assert mlp.down.weight.grad is None
    assert mlp.down.bias.grad is None
    assert x.grad is not None
    weight = torch.randn(5, 4, requires_grad=True)
    gated_linear(torch.randn(3, 8), weight, kernels="triton").sum().backward()
    assert weight.grad is not None


# -- where somebody looks, the layer is called as a layer --------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x):
        return 2.0 * super().forward(x)


def count_calls(mlp, monkeypatch) -> int:
    calls = []
    monkeypatch.setattr(swiglu._GatedLinear, "apply", lambda *args: calls.append(args) or torch.zeros(3, 24))
    mlp.kernels = "triton"
    mlp(torch.randn(3, 24))
    return len(calls)


def wrap(mlp):
    mlp.down = nn.Sequential(mlp.down)
    mlp.down.weight = mlp.down[0].weight


WATCHED = {
    "forward hook": lambda mlp: mlp.down.register_forward_hook(lambda *_: None),
    "pre-hook": lambda mlp: mlp.down.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda mlp: mlp.down.register_full_backward_hook(lambda *_: None),
    "subclass": lambda mlp: setattr(mlp, "down", Doubled(40, 24)),
    "wrapped": wrap,
    "own forward": lambda mlp: setattr(mlp.down, "forward", lambda x: x[..., :24]),
    "parametrised": lambda mlp: nn.utils.parametrizations.weight_norm(mlp.down),
    "gate-scale": lambda mlp: mlp.accept("gate-scale", nn.RMSNorm(40)),
    "up-scale": lambda mlp: mlp.accept("up-scale", nn.RMSNorm(40)),
}


@pytest.mark.parametrize("watch", WATCHED.values(), ids=WATCHED)
def test_what_is_watched_or_wrapped_is_called(watch, monkeypatch):
    assert count_calls(layer(), monkeypatch) == 1
    mlp = layer()
    watch(mlp)
    assert count_calls(mlp, monkeypatch) == 0


def test_a_hook_on_all_modules_sees_the_layer():
    from torch.nn.modules.module import register_module_forward_hook

    mlp, seen = layer(), []
    mlp.kernels = "triton"
    handle = register_module_forward_hook(lambda module, _i, _o: seen.append(module))
    try:
        mlp(torch.randn(2, 24))
    finally:
        handle.remove()
    assert seen == [mlp.gate_up, mlp.down, mlp]


def test_no_kernel_by_itself_and_none_for_gelu(monkeypatch):
    assert MLP(24, 40).kernels == "reference"
    assert count_calls(MLP(24, 40, "gelu"), monkeypatch) == 0


# -- as an operator ----------------------------------------------------------------------------------------------------


def test_operator_keeps_its_promises():
    for dtype in (F32, BF16):
        torch.library.opcheck(swiglu._backward_op, (torch.randn(5, 20).to(dtype), torch.randn(5, 10).to(dtype)))


@pytest.mark.parametrize("watched", [True, False])
@parametrize("backend", ["aot_eager", "inductor"], quick=["aot_eager"])
def test_compiled_layer_is_one_graph(backend, watched, request):
    torch._dynamo.reset()
    mlp, x, d = layer(), torch.randn(6, 24), torch.randn(6, 24)
    if watched:
        mlp.down.register_forward_hook(lambda _m, _i, out: 2.0 * out)
    expected = run(mlp, x, d, "triton")
    request.getfixturevalue("no_default_device")
    mlp.compile(fullgraph=True, backend=backend)
    for one, two in zip(run(mlp, x, d, "triton"), expected, strict=True):
        assert (one - two).abs().max() <= 100 * 2.0**-24 * two.abs().max()


def test_checkpointed_layer_gives_the_same_bits():
    mlp, x, d = layer(), torch.randn(6, 24), torch.randn(6, 24)
    expected = run(mlp, x, d, "triton")
    again = x.clone().requires_grad_()
    y = checkpoint(mlp, again, use_reentrant=False)
    found = [y.detach(), *torch.autograd.grad(y, [again, *mlp.parameters()], d)]
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def test_second_derivative_says_what_to_do():
    raw, weight = torch.randn(3, 8, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    (first,) = torch.autograd.grad(gated_linear(raw, weight, kernels="triton").square().sum(), raw, create_graph=True)
    with pytest.raises(NormLabError, match="kernels='reference'"):
        first.sum().backward()


def test_float64_takes_the_reference():
    raw, weight = torch.randn(3, 8, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    assert torch.equal(gated_linear(raw, weight), F.linear(gated(raw), weight))
    with pytest.raises(NormLabError, match="float64"):
        gated_linear(raw, weight, kernels="triton")


def test_no_width_is_too_large():
    raw, weight = torch.randn(2, 2 * 16400, requires_grad=True), torch.randn(3, 16400) / math.sqrt(16400)
    (found,) = torch.autograd.grad(gated_linear(raw, weight, kernels="triton").sum(), raw)
    (expected,) = torch.autograd.grad(gated_linear(raw, weight, kernels="reference").sum(), raw)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-7)
    assert fused.BLOCK < 16400
