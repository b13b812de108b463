"""The gradients of rotated heads laid side by side, in Triton's interpreter, against their twin and float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normlab import NormLabError
from normlab.kernels import rotary
from normlab.kernels.rotary import backward_reference, rotated_heads
from normlab.models import Attention
from normlab.models.rotary import rotary_table
from tests.matrix import parametrize

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# One fp32 product and one sum, of terms that may cancel; a whole ulp, for the interpreter truncates to bf16.
ROUNDINGS = 4 * 2.0**-24


def table(length, head_dim, batch=None, dtype=F32):
    positions = torch.arange(length) if batch is None else torch.randint(0, 1000, (batch, length))
    return rotary_table(positions, head_dim, 100.0, dtype=dtype)


def gradients(batch, length, heads, kv_heads, head_dim, dtype=F32):
    shapes = [(batch, length, h, head_dim) for h in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def assert_backward(grads, cos, sin) -> None:
    """The kernel against autograd through the forward pass in float64, on the same numbers."""
    batch, length, heads, head_dim = grads[0].shape
    kv_heads = grads[1].shape[2]
    wide = torch.zeros(batch, length, (heads + 2 * kv_heads) * head_dim, dtype=torch.float64, requires_grad=True)
    outputs = rotated_heads(wide, (cos.double(), sin.double()), heads, kv_heads, kernels="reference")
    (exact,) = torch.autograd.grad(outputs, wide, [g.double() for g in grads])
    found = rotary._backward_op(*grads, cos, sin)
    assert (found.dtype, found.shape) == (grads[0].dtype, exact.shape)
    assert found.is_contiguous()
    largest = max(float(g.abs().max()) for g in grads)
    allowed = torch.finfo(found.dtype).eps * exact.abs() + ROUNDINGS * largest
    assert ((found.double() - exact).abs() <= allowed).all()


@parametrize("dtype", [F32, BF16, F16], quick=[F32, BF16])
@parametrize("per_batch", [True, False], quick=[True])
@parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(1, 1, 2), (4, 4, 16), (6, 2, 80), (12, 3, 64), (5, 1, 96), (8, 1, 6)],
    quick=[(6, 2, 80), (8, 1, 6)],
)
@parametrize("length", [1, 8, 19], quick=[19])
def test_gradient_of_the_projection(length, heads, kv_heads, head_dim, per_batch, dtype):
    cos, sin = table(length, head_dim, 2 if per_batch else None)
    assert_backward(gradients(2, length, heads, kv_heads, head_dim, dtype), cos, sin)


def test_strides_are_taken_as_they_come():
    dq, dk, dv = gradients(2, 9, 4, 2, 16)
    by_heads = [g.transpose(1, 2).contiguous().transpose(1, 2) for g in (dq, dk, dv)]
    padded = [torch.randn(2, 9, 3 * g.shape[2], 40)[:, :, ::3, 5:21] for g in (dq, dk, dv)]
    channels_first = [g.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0) for g in (dq, dk, dv)]
    expanded = [torch.randn(16).expand_as(g) for g in (dq, dk, dv)]
    mixed = [by_heads[0], padded[1], channels_first[2]]
    for grads in (by_heads, padded, channels_first, expanded, mixed):
        assert_backward(grads, *table(9, 16))


def test_tables_of_any_shape_that_broadcasts():
    grads = gradients(2, 9, 4, 2, 16)
    cos, sin = table(9, 16)
    for shape in ((9, 1, 16), (1, 9, 1, 16)):
        assert_backward(grads, cos.view(shape), sin.view(shape))
    assert_backward(grads, cos[:1], sin[:1])
    # Halves that differ are no rotation, but the gradient is still the transpose.
    assert_backward(grads, torch.randn(9, 1, 16), torch.randn(2, 9, 1, 16)[:1])


def test_twin_of_the_kernel():
    grads, (cos, sin) = [g.double() for g in gradients(2, 5, 4, 2, 6)], table(5, 6, dtype=torch.float64)
    wide = torch.randn(2, 5, 48, dtype=torch.float64, requires_grad=True)
    call = lambda x: rotated_heads(x, (cos, sin), 4, 2, kernels="reference")  # noqa: E731
    (expected,) = torch.autograd.grad(call(wide), wide, grads)
    assert torch.allclose(backward_reference(*grads, cos, sin), expected, rtol=1e-14, atol=1e-15)
    assert torch.autograd.gradcheck(call, wide)
    assert torch.autograd.gradgradcheck(call, wide)


def layer(**changes) -> Attention:
    torch.manual_seed(0)
    return Attention(**{"dim": 24, "heads": 6, "kv_heads": 2, "head_dim": 10, "bias": True} | changes)


def run(attention, x, d, kernels, **options):
    attention.kernels = kernels
    x = x.detach().requires_grad_()
    y = attention(x, **options)
    return [y.detach(), *torch.autograd.grad(y, [x, *attention.parameters()], d.to(y.dtype))]


@parametrize("per_batch", [True, False], quick=[False])
@parametrize("kv_heads", [6, 3, 1], quick=[6, 3])
def test_attention_and_every_gradient(kv_heads, per_batch):
    attention, x, d = layer(kv_heads=kv_heads), torch.randn(2, 11, 24), torch.randn(2, 11, 24)
    turn = table(11, 10, 2 if per_batch else None)
    ours, theirs = (run(attention, x, d, kernels, rotary=turn) for kernels in ("triton", "reference"))
    assert torch.equal(ours[0], theirs[0])
    for one, two in zip(ours, theirs, strict=True):
        # Behind the turn, one product of at most 100 terms and a sum over 22 tokens.
        assert (one - two).abs().max() <= 130 * 2.0**-24 * two.abs().max()


@parametrize("autocast", [True, False], quick=[True])
def test_half_precision_is_no_worse_than_the_reference(autocast):
    attention = layer() if autocast else layer().bfloat16()
    x, d, turn = torch.randn(2, 11, 24), torch.randn(2, 11, 24), table(11, 10)
    exact = run(layer().to(attention.out.weight.dtype).double(), x.double(), d, "reference", rotary=turn)
    errors = {}
    for kernels in ("triton", "reference"):
        with torch.autocast(torch.get_default_device().type, BF16, enabled=autocast):
            found = run(attention, x, d, kernels, rotary=turn)
        errors[kernels] = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
    # One truncation (the interpreter's) where the reference rounds twice and adds.
    for one, two in zip(errors["triton"], errors["reference"], strict=True):
        assert one <= two + 2.0**-8


def test_slots_and_missing_tables_take_the_plain_path(monkeypatch):
    def refuse(*args):
        raise AssertionError("taken")

    x, turn = torch.randn(2, 5, 24), table(5, 10)
    monkeypatch.setattr(rotary._RotatedHeads, "apply", refuse)
    plain = layer()
    plain.kernels = "triton"
    with pytest.raises(AssertionError, match="taken"):
        plain(x, rotary=turn)
    assert plain(x).isfinite().all()
    for slot in ("q-norm", "k-norm", "v-norm", "qk-after-rotary"):
        attention = layer()
        attention.kernels = "triton"
        attention.accept(slot, nn.RMSNorm(10))
        assert attention(x, rotary=turn).isfinite().all()
    assert layer()(x, rotary=turn).isfinite().all()


def test_hooks_on_the_projection_see_its_output_and_gradient():
    seen = []
    for kernels in ("triton", "reference"):
        attention = layer()
        attention.qkv.register_forward_hook(lambda _m, _i, out: seen.append(out.detach()))
        attention.qkv.register_full_backward_hook(lambda _m, _i, grads: seen.append(grads[0]))
        run(attention, torch.linspace(-1, 1, 240).view(1, 10, 24), torch.ones(1, 10, 24), kernels, rotary=table(10, 10))
    assert len(seen) == 4
    assert torch.equal(seen[0], seen[2])
    assert torch.allclose(seen[1], seen[3], atol=1e-6)


def test_empty_batch():
    attention = layer()
    found = run(attention, torch.randn(0, 5, 24), torch.randn(0, 5, 24), "triton", rotary=table(5, 10))
    assert found[0].shape == (0, 5, 24)
    assert not any(g.any() for g in found[1:])


@pytest.mark.full
def test_operator_keeps_its_promises():
    for batch in (None, 2):
        torch.library.opcheck(rotary._backward_op, (*gradients(2, 5, 4, 2, 6, BF16), *table(5, 6, batch)))
    dq, dk, dv = (g.transpose(1, 2) for g in gradients(2, 4, 5, 5, 6))
    torch.library.opcheck(rotary._backward_op, (dq, dk, dv, *table(5, 6)))


@parametrize("backend", ["aot_eager", "inductor"], quick=["aot_eager"])
def test_compiled_attention_is_one_graph(backend, request):
    torch._dynamo.reset()
    attention, x, d, turn = layer(), torch.randn(2, 7, 24), torch.randn(2, 7, 24), table(7, 10)
    expected = run(attention, x, d, "triton", rotary=turn)
    request.getfixturevalue("no_default_device")
    attention.compile(fullgraph=True, backend=backend)
    for one, two in zip(run(attention, x, d, "triton", rotary=turn), expected, strict=True):
        assert (one - two).abs().max() <= 130 * 2.0**-24 * two.abs().max()


def test_nothing_is_kept_but_the_table():
    qkv, (cos, sin) = torch.randn(2, 7, 100, requires_grad=True), table(7, 10)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        rotated_heads(qkv, (cos, sin), 6, 2, kernels="triton")
    assert kept == [cos.data_ptr(), sin.data_ptr()]


def test_second_derivative_says_what_to_do():
    qkv = torch.randn(1, 3, 60, requires_grad=True)
    q, k, v = rotated_heads(qkv, table(3, 10), 2, 2, kernels="triton")
    (first,) = torch.autograd.grad((q * k * v).sum(), qkv, create_graph=True)
    with pytest.raises(NormLabError, match="kernels='reference'"):
        first.sum().backward()


def test_float64_takes_the_reference():
    qkv = torch.randn(1, 3, 60, dtype=torch.float64)
    assert rotated_heads(qkv, table(3, 10), 2, 2)[0].dtype == torch.float64
    with pytest.raises(NormLabError, match="float64"):
        rotated_heads(qkv, table(3, 10), 2, 2, kernels="triton")
