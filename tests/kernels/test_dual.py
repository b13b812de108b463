"""The fused step of ResiDual against its equation, forward and every gradient, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import normlab
from normlab import NormLabError
from normlab.kernels import dual
from normlab.kernels.dual import dual_step
from normlab.kernels.residual import Affine
from normlab.models import MLP
from normlab.schemes.dual import DualWrite, FirstStream
from tests.matrix import parametrize

pytestmark = pytest.mark.filterwarnings(
    # Dynamo itself instantiates autograd functions.
    "ignore:.*should not be instantiated:DeprecationWarning",
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
EPS = 1e-5
USES = {"state": (True, False), "input": (False, True), "both": (True, True)}
# Half an ulp of one: the rounding of the result. The interpreter truncates to bf16, which costs a whole one.
ROUND = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-7}
# fp32 sums of at most ten thousand terms (14 roundings each, in trees), two in the norm and two in its gradient.
ARITHMETIC = 64 * 2.0**-24


def make(rows=(2, 3), dim=100, dtype=F32, update_dtype=None, *, gain=True, bias=True) -> list[torch.Tensor | None]:
    """State, update, gain, bias."""
    state, update = torch.randn(*rows, 2, dim).to(dtype), torch.randn(*rows, dim).to(update_dtype or dtype)
    return [state, update, torch.randn(dim) * 0.3 + 1.0 if gain else None, torch.randn(dim) * 0.3 if bias else None]


def equation(state, update, gain, bias, kind, offset, step, scale):
    """The step written out, without the code under test."""
    p, u = state[..., 0, :], state[..., 1, :]
    v = p + step * update
    v = v - v.mean(-1, keepdim=True) if kind == "layer" else v
    v = v / (v.square().mean(-1, keepdim=True) + EPS).sqrt()
    v = v if gain is None else v * (gain + 1.0 if offset else gain)
    return torch.stack([v if bias is None else v + bias, u + scale * step * update], dim=-2)


def leaves(tensors, dtype=None) -> list[torch.Tensor | None]:
    return [None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]


def gradients(outputs, upstream, tensors) -> list[torch.Tensor | None]:
    used = [(y, d) for y, d in zip(outputs, upstream, strict=True) if d is not None]
    torch.autograd.backward([y for y, _ in used], [d.to(y.dtype) for y, d in used])
    return [None if t is None else t.grad for t in tensors]


def run(tensors, upstream, *, kind="rms", offset=False, step=1.0, scale=1.0, kernels="triton"):
    inputs = leaves(tensors)
    constants = [None if c == 1.0 else torch.tensor(c) for c in (step, scale)]
    norm = Affine(kind, inputs[2], inputs[3], EPS, offset)
    outputs = dual_step(*inputs[:2], norm, step=constants[0], scale=constants[1], kernels=kernels)
    return [outputs[0].detach(), *gradients(outputs, upstream, inputs)]


def upstream_of(tensors, use="both") -> list[torch.Tensor | None]:
    state, update = tensors[:2]
    both = torch.randn(state.shape).to(state.dtype), torch.randn(update.shape).to(state.dtype)
    return [d if used else None for d, used in zip(both, USES[use], strict=True)]


def check(tensors, use="both", *, kernels="triton", kind="rms", offset=False, step=1.0, scale=1.0) -> None:
    upstream = upstream_of(tensors, use)
    found = run(tensors, upstream, kind=kind, offset=offset, step=step, scale=scale, kernels=kernels)
    exact = leaves(tensors, torch.float64)
    y = equation(*exact, kind, offset, step, scale)
    expected = [y.detach(), *gradients((y, y[..., 0, :]), upstream, exact)]
    terms = uncancelled(tensors, upstream, kind, offset, step)
    for ours, theirs, like, term in zip(found, expected, [tensors[0], *tensors], terms, strict=True):
        if like is None:
            continue
        assert ours.dtype == like.dtype
        assert ours.isfinite().all()
        # Per stream: one may be far larger than the other.
        size = theirs.abs() + theirs.abs().amax(-1, keepdim=True)
        assert ((ours.double() - theirs).abs() <= ROUND[like.dtype] * size + ARITHMETIC * (size + term)).all()


def uncancelled(tensors, upstream, kind, offset, step) -> list[torch.Tensor | float]:
    """Size of the terms that meet in the gradient of the norm, which removes most of a gradient along its input."""
    state, update, gain, _ = (None if t is None else t.double() for t in tensors)
    v = state[..., 0, :] + step * update
    v = v - v.mean(-1, keepdim=True) if kind == "layer" else v
    inverse = (v.square().mean(-1, keepdim=True) + EPS).rsqrt()
    first = None if upstream[0] is None else upstream[0][..., 0, :]
    d = sum(d.double().abs() for d in (first, upstream[1]) if d is not None)
    d = d if gain is None else d * (gain + 1.0 if offset else gain).abs()
    term = d.amax(-1, keepdim=True) * inverse
    return [0.0, term.unsqueeze(-2), term, 0.0, 0.0]


@parametrize("kind", ["rms", "layer"], quick=["rms", "layer"])
@parametrize("dtype", ROUND, quick=[F32, BF16], ids=str)
@parametrize("use", USES, quick=["both"])
def test_values_and_gradients(kind, dtype, use):
    check(make(dtype=dtype), use, kind=kind, step=0.5, scale=0.3)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_reference_is_the_equation(kind):
    check(make(), kernels="reference", kind=kind, step=0.5, scale=0.3)
    check(make(gain=True, bias=False), kernels="reference", kind=kind, offset=True)


@pytest.mark.parametrize("use", USES)
def test_an_output_that_is_not_used(use):
    check(make(), use)


@parametrize("gain", [True, False], quick=[False])
@parametrize("bias", [True, False], quick=[False, True])
@parametrize("offset", [True, False], quick=[True])
def test_gains_and_biases(gain, bias, offset):
    check(make(gain=gain, bias=bias), offset=offset, scale=0.05)


@parametrize("dim", [1, 64, 127, 768, 1000, 8193], quick=[1, 127, 768])
def test_widths(dim):
    check(make((7,) if dim < 8000 else (2,), dim), kind="rms")


def test_more_rows_than_one_round_of_programs():
    check(make((61,), 64))


@pytest.mark.parametrize(("dtype", "update_dtype"), [(F32, BF16), (BF16, F32)])
def test_stream_and_update_of_different_types(dtype, update_dtype):
    check(make(dtype=dtype, update_dtype=update_dtype))


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
def test_zero_tiny_and_huge_rows(scale):
    state, update, *affine = make()
    check([state * scale, update * scale, *affine])


def test_zero_row_without_epsilon_stays_finite():
    state, update = torch.zeros(1, 2, 100).requires_grad_(), torch.zeros(1, 100)
    y, seen = dual_step(state, update, Affine("rms", None, None, 0.0), kernels="triton")
    (y.sum() + seen.sum()).backward()
    assert y.isfinite().all()
    assert state.grad.isfinite().all()


def test_shapes_and_strides():
    state, update, *affine = make((3, 5))
    check([state.transpose(0, 1), update.transpose(0, 1), *affine])
    inputs = leaves(make((2, 0)))
    y, seen = dual_step(*inputs[:2], Affine("rms", *inputs[2:], EPS), kernels="triton")
    (y.sum() + seen.sum()).backward()
    assert (y.shape, seen.shape) == ((2, 0, 2, 100), (2, 0, 100))
    assert not inputs[2].grad.any()


def test_input_is_a_view_of_the_first_stream():
    state, update, *_ = make()
    for kernels in ("triton", "reference"):
        y, seen = dual_step(state, update, Affine("rms", None, None, EPS), kernels=kernels)
        assert seen.data_ptr() == y.data_ptr()
        assert torch.equal(seen, y[..., 0, :])


def test_gradients_are_the_same_bits_every_time():
    tensors = make((61,), 64)
    upstream = upstream_of(tensors)
    assert all(map(torch.equal, run(tensors, upstream), run(tensors, upstream)))


def test_reference_has_first_and_second_derivatives():
    state, update, gain, bias = leaves(make((2,), 5), torch.float64)

    def step(state, update, gain, bias):
        return dual_step(state, update, Affine("layer", gain, bias, EPS), kernels="reference")

    assert torch.autograd.gradcheck(step, (state, update, gain, bias))
    assert torch.autograd.gradgradcheck(step, (state, update, gain, bias))


def test_second_derivative_of_the_kernel_says_what_to_do():
    inputs = leaves(make())
    y, _ = dual_step(*inputs[:2], Affine("rms", *inputs[2:], EPS), kernels="triton")
    (first,) = torch.autograd.grad(y.square().sum(), inputs[1], create_graph=True)
    with pytest.raises(NormLabError, match="kernels='reference'"):
        first.sum().backward()


def test_operators_keep_their_promises():
    state, update, gain, bias = make()
    d_state, d_input = upstream_of([state, update])
    for affine, grads in (((gain, bias), (d_state, None)), ((None, bias), (None, d_input))):
        options = (torch.tensor(0.5), None, *affine, 1, EPS, False)
        torch.library.opcheck(dual._forward_op, (state, update, *options))
        torch.library.opcheck(dual._backward_op, (state, update, *options, *grads))


def chain(state, update, gain, bias):
    norm = Affine("rms", gain, bias, EPS)
    state, seen = dual_step(state, update, norm, kernels="triton")
    state, seen = dual_step(state, torch.sin(seen), norm, scale=torch.tensor(0.5), kernels="triton")
    return (state * 2.0).sum() + (seen * seen).sum()


@pytest.mark.parametrize("way", ["compiled", "checkpointed"])
def test_compiled_and_checkpointed_chains_give_the_same(way):
    torch._dynamo.reset()
    tensors, found = make(), []
    other = {
        "compiled": torch.compile(chain, fullgraph=True, backend="aot_eager"),
        "checkpointed": lambda *inputs: checkpoint(chain, *inputs, use_reentrant=False),
    }[way]
    for loss in (chain, other):
        inputs = leaves(tensors)
        loss(*inputs).backward()
        found.append([t.grad for t in inputs])
    for one, two in zip(*found, strict=True):
        # The compiler adds the two gradients of a gain in another order.
        assert (one - two).abs().max() <= 4 * 2.0**-24 * two.abs().max()


def test_compiled_chain_adds_no_gradients_itself():
    torch._dynamo.reset()
    graphs: list[str] = []

    def backend(module, examples):
        from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func

        def note(graph, _):
            graphs.append(str(graph.graph))
            return make_boxed_func(graph.forward)

        return aot_module_simplified(module, examples, fw_compiler=note, bw_compiler=note)

    torch.compile(chain, fullgraph=True, backend=backend)(*leaves(make())).backward()
    assert graphs[-1].count("normlab.dual_backward") == 2
    # A gradient of the view would be scattered into a tensor of zeros.
    assert "select_scatter" not in graphs[-1]
    assert "select_backward" not in graphs[-1]


def test_wrong_shapes_and_types_are_named():
    state, update, *_ = make()
    norm = Affine("rms", None, None, EPS)
    for wrong in ((state, update[..., :9]), (state[..., :1, :], update), (update, update)):
        with pytest.raises(NormLabError, match=r"expected a state \(\.\.\., 2, D\)"):
            dual_step(*wrong, norm)
    with pytest.raises(NormLabError, match="float64"):
        dual_step(state.double(), update.double(), norm, kernels="triton")
    assert dual_step(state.double(), update.double(), norm)[0].dtype == torch.float64


@parametrize("spec", ["norm='layer'", "scale=0.05", "gain='none'", "norm='dyt'"], quick=["scale=0.05"])
def test_stacks_agree_and_use_the_kernel(spec, monkeypatch):
    calls = []
    monkeypatch.setattr("normlab.schemes.dual.dual_step", lambda *a, **k: calls.append(1) or dual_step(*a, **k))
    found = []
    for kernels in ("triton", "reference"):
        torch.manual_seed(0)
        layers = [(MLP(24, 40), MLP(24, 40)) for _ in range(2)]
        stack = normlab.Stack(f"dual({spec})", layers, 24, kernels=kernels).init_(
            generator=torch.Generator(torch.get_default_device()).manual_seed(0)
        )
        x = torch.randn(3, 24).requires_grad_()
        y = stack(x)
        (y * torch.linspace(-1.0, 1.0, 24)).sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in stack.parameters())])
    assert len(calls) == (0 if "dyt" in spec else 4)
    for one, two in zip(*found, strict=True):
        # Four sublayers, each some forty fp32 roundings in norms and products, forward and backward.
        assert (one - two).abs().max() <= 320 * 2.0**-24 * two.abs().max().clamp_min(1e-2)


def test_refined_steps_reach_the_kernel():
    write = DualWrite(normlab.norms.RMSNorm(24), scale=0.3, dt=0.5)
    state, update = torch.randn(3, 2, 24), torch.randn(3, 24)
    expected = write(state, update)
    after, seen = write.write_and_read(state, update, torch.nn.Identity(), FirstStream(), "triton")
    assert (after - expected).abs().max() <= ARITHMETIC * expected.abs().max()
    assert torch.equal(seen, after[..., 0, :])
