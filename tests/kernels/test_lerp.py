"""The fused interpolation step and weight normalisation of nGPT against their references, in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from normlab import NormLabError
from normlab.kernels import lerp
from normlab.kernels.fused import launch
from normlab.kernels.fused import lerp as fused
from normlab.kernels.lerp import sphere_lerp, sphere_lerp_pair, unit_rows_
from normlab.norms import l2_norm, widen
from normlab.schemes.contract.scales import LearnedScale
from normlab.schemes.ngpt import SphereLerp
from tests.matrix import parametrize

pytestmark = pytest.mark.filterwarnings(
    # Dynamo itself instantiates autograd functions.
    "ignore:.*should not be instantiated:DeprecationWarning",
)

EPS = 1e-6
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [(F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F32, BF16)]
WIDTHS = [64, 100, 768, 1000, 8193]
USES = {"state": (True, False), "input": (False, True), "both": (True, True)}


def make(shape, h_dtype=F32, g_dtype=None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States near the sphere, updates of any length, steps between 0 and 0.3."""
    h = torch.nn.functional.normalize(torch.randn(shape), dim=-1).to(h_dtype)
    g = (torch.randn(shape) * 3.0).to(g_dtype or h_dtype)
    return h, g, torch.rand(shape[-1]) * 0.3


def odd_rows(width: int) -> int:
    """Five tiles, the last one nearly empty: more than the interpreter's three programs take at once."""
    return 4 * launch.tile(width).rows + 1


def leaves(tensors, dtype=None) -> list[torch.Tensor]:
    return [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]


def run_fused(tensors, d_state, d_input):
    inputs = leaves(tensors)
    outputs = sphere_lerp_pair(*inputs, EPS, kernels="triton")
    used = [(y, d) for y, d in zip(outputs, (d_state, d_input), strict=True) if d is not None]
    torch.autograd.backward([y for y, _ in used], [d for _, d in used])
    assert torch.equal(*outputs)
    return [outputs[0].detach(), *(t.grad for t in inputs)]


def run_exact(tensors, d_state, d_input):
    """The reference in float64, on the very numbers that the kernel reads."""
    inputs = leaves(tensors, torch.float64)
    y = sphere_lerp(*inputs, EPS, kernels="reference")
    d = sum(d.double() for d in (d_state, d_input) if d is not None)
    y.backward(d)
    return [y.detach(), *(t.grad for t in inputs)], d


def length(v: torch.Tensor) -> torch.Tensor:
    return v.norm(dim=-1, keepdim=True)


def assert_close(tensors, d_state, d_input) -> None:
    found = run_fused(tensors, d_state, d_input)
    exact, d = run_exact(tensors, d_state, d_input)
    h, g, alpha = (t.double() for t in tensors)
    # A sum of D fp32 terms costs log2(D) roundings at most; half a dozen single ones follow. Each is relative to the
    # terms it joins, so the formulas are walked once more with every minus a plus and every dot product a product of
    # lengths.
    fp32 = (math.log2(h.shape[-1]) + 6) * 2.0**-24
    g_inverse = torch.rsqrt(g.square().sum(-1, keepdim=True) + EPS**2)
    target = (g * g_inverse).abs()
    u = h + alpha * (g * g_inverse - h)
    u_inverse = torch.rsqrt(u.square().sum(-1, keepdim=True) + EPS**2)
    turn = target + h.abs()
    y = u_inverse * (h.abs() + alpha * turn)
    du = u_inverse * (d.abs() + y * length(y) * length(d))
    dg = g_inverse * (alpha * du + target * length(alpha * du))
    scales = [y, du + alpha * du, dg, (du * turn).sum(tuple(range(h.dim() - 1)))]
    dtypes = [tensors[0].dtype, *(t.dtype for t in tensors)]
    for one, two, scale, dtype in zip(found, exact, scales, dtypes, strict=True):
        assert one.dtype == dtype
        assert one.shape == two.shape
        kind = torch.finfo(dtype)
        # A whole ulp for the result: the interpreter truncates fp32 to bf16, a GPU rounds.
        allowed = kind.eps * (two.abs() + kind.tiny) + fp32 * scale
        assert ((one.double() - two).abs() <= allowed).all()


@pytest.mark.parametrize("use", USES)
@parametrize("width", WIDTHS, quick=[100])
@parametrize(("h_dtype", "g_dtype"), DTYPES, quick=[(F32, F32), (BF16, F32)], ids=str)
def test_step_and_every_gradient(h_dtype, g_dtype, width, use):
    tensors = make((odd_rows(width), width), h_dtype, g_dtype)
    grads = [torch.randn(tensors[0].shape).to(h_dtype) if used else None for used in USES[use]]
    assert_close(tensors, *grads)


def test_reference_is_what_the_scheme_computes():
    scale, dt = LearnedScale(64, 0.05, 0.125), 0.5
    with torch.no_grad():
        scale.weight.copy_(torch.randn(64))
    h, g, _ = make((7, 64), BF16)
    alpha = dt * scale.value().abs()
    state, target = widen(h), l2_norm(g, EPS)
    expected = l2_norm(state + alpha * (target - state), EPS).to(h.dtype)
    assert torch.equal(sphere_lerp(h, g, alpha, EPS), expected)
    assert torch.equal(SphereLerp(scale, EPS, dt)(h, g), expected)


@parametrize("dtype", [F32, BF16], quick=[F32])
@pytest.mark.parametrize("edge", ["parallel", "antiparallel", "tiny", "huge", "zero"])
def test_edge_rows(edge, dtype):
    h, g, alpha = make((5, 100), dtype)
    g = {"parallel": 2.0 * h, "antiparallel": -2.0 * h, "tiny": g * 1e-15, "huge": g * 1e15, "zero": g * 0.0}[edge]
    d = torch.randn(h.shape).to(dtype)
    assert_close((h, g, alpha), d, None)
    assert all(t.isfinite().all() for t in run_fused((h, g, alpha), d, d))


@pytest.mark.parametrize("shape", [(100,), (2, 3, 100), (2, 1, 3, 64), (3, 1), (2, 3)])
def test_any_batch_shape(shape):
    tensors = make(shape)
    assert_close(tensors, torch.randn(shape), torch.randn(shape))


def test_rows_that_are_not_contiguous():
    h, g, alpha = make((3, 4, 100))
    alpha = torch.rand(200)[::2] * 0.1
    d = torch.randn(100, 3, 4).permute(1, 2, 0)
    expanded = torch.randn(100).expand(3, 4, 100)
    assert_close((h.transpose(0, 1).contiguous().transpose(0, 1), g[..., :1].expand_as(h), alpha), d, expanded)


def test_empty_batch():
    inputs = leaves(make((2, 0, 64)))
    y = sphere_lerp(*inputs, EPS, kernels="triton")
    y.sum().backward()
    assert y.shape == (2, 0, 64)
    assert [tuple(t.grad.shape) for t in inputs] == [(2, 0, 64), (2, 0, 64), (64,)]
    assert (inputs[2].grad == 0.0).all()


def test_alpha_in_half_precision_gets_its_gradient_in_half_precision():
    h, g, alpha = make((9, 100), BF16)
    assert_close((h, g, alpha.to(BF16)), torch.randn(9, 100).to(BF16), None)


def test_gradients_are_the_same_bits_every_time():
    tensors = make((odd_rows(64), 64))
    d = torch.randn(tensors[0].shape)
    for one, two in zip(run_fused(tensors, d, None), run_fused(tensors, d, None), strict=True):
        assert torch.equal(one, two)


def test_one_output_is_the_first_of_the_pair():
    tensors, d = make((9, 100)), torch.randn(9, 100)
    inputs = leaves(tensors)
    y = sphere_lerp(*inputs, EPS, kernels="triton")
    y.backward(d)
    for one, two in zip([y, *(t.grad for t in inputs)], run_fused(tensors, d, None), strict=True):
        assert torch.equal(one, two)


def test_gradient_only_where_it_is_wanted():
    h, g, alpha = make((4, 64))
    g.requires_grad_()
    sphere_lerp(h, g, alpha, EPS, kernels="triton").sum().backward()
    assert g.grad is not None
    assert h.grad is None
    assert alpha.grad is None


def test_operators_keep_their_promises():
    h, g, alpha = make((5, 100), BF16, F32)
    d = torch.randn(5, 100).to(BF16)
    for dtype in (BF16, torch.float16):
        torch.library.opcheck(lerp._forward_op, (h, g, alpha, EPS, dtype))
    for grads in ((d, None), (None, d), (d, d)):
        torch.library.opcheck(lerp._backward_op, (h, g, alpha, EPS, *grads))
    for axis in (-1, -2):
        torch.library.opcheck(lerp._unit_op, (torch.randn(6, 100), axis))


@parametrize("use", USES, quick=["both"])
def test_compiled_step_gives_the_same_bits(use):
    torch._dynamo.reset()
    tensors = make((5, 100))
    weights = torch.linspace(-1.0, 1.0, 100)

    def loss(h, g, alpha):
        outputs = sphere_lerp_pair(h, g, alpha, EPS, kernels="triton")
        return sum((y * weights).sum() for y, used in zip(outputs, USES[use], strict=True) if used)

    found = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        inputs = leaves(tensors)
        run(*inputs).backward()
        found.append([t.grad for t in inputs])
    # The compiler brings zeros for an output that nobody used, for which a GPU runs another kernel: other roundings.
    roundings = 0.0 if torch.get_default_device().type == "cpu" else 8 * 2.0**-24
    for one, two in zip(*found, strict=True):
        assert (one - two).abs().max() <= roundings * two.abs().max()


@pytest.mark.parametrize("kernels", ["triton", "reference"])
def test_an_input_of_its_own_dtype_is_the_cast_one(kernels):
    tensors, weights, found = make((61, 100)), torch.randn(2, 61, 100).half(), []
    for dtype in (torch.float16, None):
        inputs = leaves(tensors)
        state, seen = sphere_lerp_pair(*inputs, EPS, input_dtype=dtype, kernels=kernels)
        assert seen.dtype == (dtype or torch.float32)
        ((state * weights[0]).sum() + (seen.half() * weights[1]).sum()).backward()
        found.append((state, seen.half(), *(t.grad for t in inputs)))
    for narrow, cast in zip(*found, strict=True):
        assert torch.equal(narrow, cast)


def test_compiled_step_adds_no_gradients_itself():
    torch._dynamo.reset()
    graphs = []

    def loss(h, g, alpha):
        state, seen = sphere_lerp_pair(h, g, alpha, EPS, kernels="triton")
        return (state * 2.0).sum() + (seen * 3.0).sum()

    def note(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph)

    inputs = leaves(make((5, 100)))
    torch.compile(loss, fullgraph=True, backend=aot_autograd(fw_compiler=note, bw_compiler=note))(*inputs).backward()
    backward = [str(node.target) for node in graphs[-1].graph.nodes]
    assert sum("lerp_backward" in name for name in backward) == 1
    assert not any("add" in name for name in backward)


def test_checkpointed_step_gives_the_same_bits():
    tensors, d = make((5, 100)), torch.randn(5, 100)

    def double_step(h, g, alpha):
        state, seen = sphere_lerp_pair(h, g, alpha, EPS, kernels="triton")
        return sphere_lerp(state, torch.sin(seen), alpha, EPS, kernels="triton")

    found = []
    for run in (double_step, lambda *inputs: checkpoint(double_step, *inputs, use_reentrant=False)):
        inputs = leaves(tensors)
        run(*inputs).backward(d)
        found.append([t.grad for t in inputs])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_second_derivative_says_what_to_do():
    inputs = leaves(make((3, 64)))
    y = sphere_lerp(*inputs, EPS, kernels="triton")
    (first,) = torch.autograd.grad(y.square().sum(), inputs[1], create_graph=True)
    with pytest.raises(NormLabError, match="kernels='reference'"):
        first.sum().backward()


def test_float64_takes_the_reference():
    tensors = [t.double() for t in make((3, 64))]
    assert sphere_lerp(*tensors, EPS).dtype == torch.float64
    with pytest.raises(NormLabError, match="float64"):
        sphere_lerp(*tensors, EPS, kernels="triton")
    state, seen = sphere_lerp_pair(*tensors, EPS)
    assert state is seen


def test_shapes_that_do_not_fit_are_named():
    h, g, alpha = make((3, 64))
    for wrong in ((h, g[:2], alpha), (h, g, alpha[:63])):
        with pytest.raises(NormLabError, match="one shape"):
            sphere_lerp(*wrong, EPS)


# Weights


def assert_unit(weight: torch.Tensor, axis: int) -> None:
    expected = weight.double() / weight.double().norm(dim=axis, keepdim=True).clamp_min(1e-300)
    found = weight.clone()
    unit_rows_(found, axis, kernels="triton")
    assert found.dtype == weight.dtype
    # The sum costs log2(n) roundings, root, reciprocal and product one each; a whole ulp where bf16 is truncated.
    fp32 = (math.log2(weight.shape[axis]) + 3) * 2.0**-24
    kind = torch.finfo(weight.dtype)
    assert ((found.double() - expected).abs() <= (kind.eps + fp32) * (expected.abs() + kind.tiny)).all()


@parametrize("dtype", [F32, BF16, F16], quick=[F32, BF16])
@pytest.mark.parametrize("axis", [-1, -2])
@parametrize(
    "shape",
    [(3, 64), (70, 100), (300, 130), (3, 40, 50), (2, 257, 129), (1, 1), (2, 8193)],
    quick=[(3, 64), (70, 100), (1, 1), (3, 40, 50)],
)
def test_unit_length_along_either_axis(shape, axis, dtype):
    assert_unit(torch.randn(shape).to(dtype) * 3.0, axis)


def test_columns_larger_than_the_cache_are_taken_in_shares(monkeypatch):
    monkeypatch.setattr(fused, "_L2", 130 * 300 * 4)
    assert_unit(torch.randn(300, 700), -2)
    monkeypatch.setattr(fused, "_L2", 2 * 20 * 30 * 4)
    assert_unit(torch.randn(5, 20, 30), -2)


def test_tall_columns_have_a_bounded_number_of_parts(monkeypatch):
    monkeypatch.setattr(fused, "_CHUNK", 32)
    assert_unit(torch.randn(32 * 70 + 1, 5), -2)


@pytest.mark.full
def test_columns_have_no_widest():
    assert_unit(torch.randn(2, 16384 + 3), -2)
    with pytest.raises(NormLabError, match="width"):
        unit_rows_(torch.randn(2, 16384 + 3), -1, kernels="triton")


@pytest.mark.parametrize("axis", [-1, -2])
def test_zero_stays_zero(axis):
    weight = torch.randn(40, 50)
    weight.select(-3 - axis, 3).zero_()
    unit_rows_(weight, axis, kernels="triton")
    assert (weight.select(-3 - axis, 3) == 0.0).all()
    assert weight.isfinite().all()


@pytest.mark.parametrize("axis", [-1, -2])
def test_twice_is_once(axis):
    once = torch.randn(40, 50)
    unit_rows_(once, axis, kernels="triton")
    twice = once.clone()
    unit_rows_(twice, axis, kernels="triton")
    # The first length is off one by the roundings of the sum and of the products: a dozen.
    assert ((once - twice).abs() <= 12 * 2.0**-24 * once.abs()).all()


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_parameter_is_changed_in_place(kernels):
    weight = torch.nn.Parameter(torch.randn(6, 8))
    version = weight._version
    unit_rows_(weight, kernels=kernels)
    assert weight._version > version
    assert torch.allclose(weight.norm(dim=-1), torch.ones(6), atol=1e-6)


def test_part_of_a_weight_takes_the_reference():
    weight = torch.randn(6, 16)
    rest = weight[:, 8:].clone()
    unit_rows_(weight[:, :8])
    assert torch.equal(weight[:, 8:], rest)
    assert torch.allclose(weight[:, :8].norm(dim=-1), torch.ones(6), atol=1e-6)
    with pytest.raises(NormLabError, match="contiguous"):
        unit_rows_(weight[:, :8], kernels="triton")


def test_axis_that_is_none_is_named():
    for weight, axis in ((torch.randn(3, 4), 0), (torch.randn(3), -2)):
        with pytest.raises(NormLabError, match="axis"):
            unit_rows_(weight, axis)


def test_sharded_weight_takes_the_reference():
    class Shard(torch.Tensor):
        def full_tensor(self):
            raise AssertionError("a shard is never gathered")

    weight = torch.randn(3, 4).as_subclass(Shard)
    unit_rows_(weight, kernels="triton")
    assert torch.allclose(weight.as_subclass(torch.Tensor).norm(dim=-1), torch.ones(3), atol=1e-6)


def test_empty_weight_is_left_alone():
    unit_rows_(torch.empty(0, 4), kernels="triton")
    unit_rows_(torch.empty(4, 0), -2, kernels="triton")


def test_compiled_weight_step():
    torch._dynamo.reset()
    weight, expected = torch.randn(2, 6, 100).unbind()
    expected.copy_(weight)
    unit_rows_(expected, kernels="triton")

    def step(w):
        unit_rows_(w, kernels="triton")
        return w * 2.0

    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(weight), expected * 2.0)
    assert torch.equal(weight, expected)
