"""The fused residual step against its reference, forward and every gradient, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from normlab import NormLabError
from normlab.kernels.residual import Affine, residual_step
from tests.matrix import parametrize

pytestmark = pytest.mark.filterwarnings(
    # Dynamo itself instantiates autograd functions.
    "ignore:.*should not be instantiated:DeprecationWarning",
)

PLACES = {
    "pre": ("", "", "rms"),
    "pre layer": ("", "", "layer"),
    "post": ("", "rms", ""),
    "post layer": ("", "layer", ""),
    "output": ("rms", "", ""),
    "peri": ("rms", "", "rms"),
    "peri layer": ("layer", "", "layer"),
    "keel": ("", "rms", "rms"),
    "layerscale": ("scale", "", "rms"),
    "all": ("layer", "rms", "layer"),
    "none": ("", "", ""),
}
# Half an ulp of one: the rounding of the result. The interpreter truncates to bf16, which costs a whole one.
ROUND = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
# fp32 sums of a thousand terms, up to three norms one after the other, forward and backward: some fifty roundings.
ARITHMETIC = 50 * 2.0**-24


def affine(kind: str, dim: int, gain: bool, bias: bool, offset: bool) -> Affine | None:
    if not kind:
        return None
    weight = (torch.randn(dim) * 0.3 + (0.0 if offset else 1.0)).requires_grad_() if gain or kind == "scale" else None
    shift = (torch.randn(dim) * 0.3).requires_grad_() if bias and kind != "scale" else None
    return Affine(kind, weight, shift, 1e-5, offset)


def build(
    places: str, dim: int, dtype, *, update_dtype=None, rows=(2, 3), gain=True, bias=False, offset=False, k=False
):
    """Inputs of a step: tensors that need gradients, and the rest."""
    x = torch.randn(*rows, dim).to(dtype).requires_grad_()
    g = torch.randn(*rows, dim).to(update_dtype or dtype).requires_grad_()
    shape, write, read = (affine(kind, dim, gain, bias, offset) for kind in PLACES[places])
    constants = {"keep": torch.tensor(2.5), "step": torch.tensor(0.3), "scale": torch.tensor(0.7)} if k else {}
    return x, g, {"shape": shape, "write": write, "read": read, **constants}


def leaves(x, g, options) -> list[torch.Tensor]:
    found = [t for a in options.values() if isinstance(a, Affine) for t in (a.gain, a.bias) if t is not None]
    return [x, *([] if g is None else [g]), *found]


def doubled(x, g, options):
    """The same inputs in float64, where the reference is exact beside fp32."""

    def twin(t):
        return None if t is None else t.detach().double().requires_grad_()

    changed = {
        name: a._replace(gain=twin(a.gain), bias=twin(a.bias)) if isinstance(a, Affine) else a
        for name, a in options.items()
    }
    return twin(x), twin(g), changed


def run(x, g, options, kernels: str, users: str, weights):
    state, seen = residual_step(x, g, **options, kernels=kernels)
    loss = torch.zeros((), dtype=torch.float64)
    if "state" in users:
        loss = loss + (state.double() * weights[0]).sum()
    if "input" in users:
        loss = loss + (seen.double() * weights[1]).sum()
    return (state, seen), torch.autograd.grad(loss, leaves(x, g, options), allow_unused=True)


def check(x, g, options, users: str = "state input") -> None:
    weights = torch.randn(2, *x.shape, dtype=torch.float64).div(4).bfloat16().double()
    found, gradients = run(x, g, options, "triton", users, weights)
    expected, exact = run(*doubled(x, g, options), "reference", users, weights)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == x.dtype
        close(ours, theirs, ROUND[x.dtype])
    for leaf, ours, theirs in zip(leaves(x, g, options), gradients, exact, strict=True):
        if theirs is None:
            assert ours is None or not ours.any()
            continue
        assert ours.dtype == leaf.dtype
        # Gradients meet the rounded gradients of both outputs, and a state that was rounded before it was read.
        close(ours, theirs, max(ROUND[leaf.dtype], 3 * ROUND[x.dtype]))


def close(ours, theirs, rounding: float) -> None:
    assert ours.isfinite().all()
    error = (ours.double() - theirs).abs()
    assert (error <= (rounding + ARITHMETIC) * (theirs.abs() + theirs.abs().max())).all(), error.max()


@parametrize("places", PLACES, quick=["pre", "post layer", "peri", "layerscale", "all", "none"])
@parametrize("dtype", ROUND, quick=[torch.float32, torch.bfloat16], ids=str)
@parametrize("users", ["state", "input", "state input"], quick=["state input"])
def test_values_and_gradients(places, dtype, users):
    check(*build(places, 100, dtype), users)


@parametrize("places", PLACES, quick=["pre layer", "keel", "layerscale", "all"])
def test_constants_gains_and_biases(places):
    check(*build(places, 72, torch.float32, k=True, bias=True))
    check(*build(places, 72, torch.float32, offset=True, bias=True))
    check(*build(places, 72, torch.float32, gain=False))


@parametrize("places", ["pre", "post", "peri", "keel"], quick=["post", "peri"])
@parametrize("dim", [64, 127, 768, 1000, 8193], quick=[127, 768])
def test_widths(places, dim):
    check(*build(places, dim, torch.float32, rows=(7,) if dim < 8000 else (2,)))


@pytest.mark.parametrize("places", ["pre", "post", "peri"])
def test_stream_and_update_of_different_types(places):
    check(*build(places, 96, torch.float32, update_dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", ROUND, ids=str)
def test_a_norm_on_its_own(kind, dtype):
    x, _, options = build("pre" if kind == "rms" else "pre layer", 100, dtype, bias=True)
    check(x, None, options, "input")


@parametrize("places", PLACES, quick=["post", "peri layer", "layerscale", "all"])
@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
def test_zero_tiny_and_huge_rows(places, scale):
    x, g, options = build(places, 64, torch.float32)
    small = [(t.detach() * scale).requires_grad_() for t in (x, g)]
    check(*small, options)


def test_shapes_and_strides():
    x, g, options = build("peri", 64, torch.float32, rows=(3, 2, 5))
    check(x.detach().transpose(0, 2).requires_grad_(), g.detach().transpose(0, 2).requires_grad_(), options)
    empty = torch.empty(0, 64, requires_grad=True)
    state, seen = residual_step(empty, empty, **options, kernels="triton")
    assert state.shape == seen.shape == (0, 64)
    (state.sum() + seen.sum()).backward()


@parametrize("places", PLACES, quick=["pre", "post layer", "none"])
@parametrize("users", ["state", "input", "state input"], quick=["state input"])
def test_an_input_of_its_own_dtype_is_the_cast_one(places, users):
    x, g, options = build(places, 100, torch.float32, update_dtype=torch.float16, rows=(61,))
    weights = torch.randn(2, 61, 100).half()
    found = []
    for dtype in (torch.float16, None):
        state, seen = residual_step(x, g, **options, input_dtype=dtype, kernels="triton")
        assert (state.dtype, seen.dtype) == (torch.float32, dtype or torch.float32)
        outputs = {"state": state, "input": seen.half()}
        used = [(outputs[name] * w).sum() for name, w in zip(outputs, weights, strict=True) if name in users]
        gradients = torch.autograd.grad(used, leaves(x, g, options), allow_unused=True)
        found.append((state, seen.half(), *(t for t in gradients if t is not None)))
    for narrow, cast in zip(*found, strict=True):
        assert torch.equal(narrow, cast)


def test_a_norm_alone_may_have_an_input_of_its_own_dtype():
    x, _, options = build("pre", 100, torch.float32)
    for kernels in ("triton", "reference"):
        state, seen = residual_step(x, None, **options, input_dtype=torch.float16, kernels=kernels)
        assert seen.dtype == torch.float16
        assert torch.equal(seen, residual_step(x, None, **options, kernels=kernels)[1].half())
        assert torch.equal(state, x)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *_):
        return None


def test_outputs_whose_users_return_no_gradient_have_none():
    x, g, options = build("pre", 64, torch.float32)
    state, seen = residual_step(x, g, **options, kernels="triton")
    (NoGradient.apply(state).sum() + NoGradient.apply(seen).sum() + x.sum()).backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_sums_over_rows_are_deterministic():
    x, g, options = build("keel", 64, torch.float32, rows=(61,))
    weights = torch.randn(2, 61, 64, dtype=torch.float64)
    first, second = (run(x, g, options, "triton", "state input", weights)[1] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@parametrize("places", ["pre", "post", "peri"], quick=["pre"])
def test_compiled_chains_take_both_gradients_in_one_kernel(places):
    x, g, options = build(places, 64, torch.float32)
    graphs: list[str] = []

    def chain(x, g):
        state, seen = residual_step(x, g, **options, kernels="triton")
        state, seen = residual_step(state, seen * 0.5, **options, kernels="triton")
        return seen.square().sum() + state.sum()

    def backend(module, examples):
        from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func

        def note(graph, _):
            graphs.append(str(graph.graph))
            return make_boxed_func(graph.forward)

        return aot_module_simplified(module, examples, fw_compiler=note, bw_compiler=note)

    expected = torch.autograd.grad(chain(x, g), leaves(x, g, options))
    found = torch.autograd.grad(torch.compile(chain, fullgraph=True, backend=backend)(x, g), leaves(x, g, options))
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs.double(), 0.0)
    backward = graphs[-1]
    assert backward.count("normlab.residual_backward") == 2
    # Gains are used twice here and their gradients added; no tensor of the stream's shape is.
    assert not [line for line in backward.splitlines() if "aten.add" in line and "[2, 3, 64]" in line]


def test_operators_keep_their_contracts():
    x, g, options = build("keel", 64, torch.float32)
    write, read = options["write"], options["read"]
    affines = [None, None, write.gain.detach(), None, read.gain.detach(), None]
    rest = ([None, None, None], affines, [0, 1, 1], [0.0, 1e-5, 1e-5], [False, False, False])
    x, g = x.detach(), g.detach()
    tests = ("test_schema", "test_faketensor")
    for dtype in (torch.float32, torch.bfloat16):
        torch.library.opcheck(torch.ops.normlab.residual_forward, (x, g, *rest, dtype), test_utils=tests)
        backward = (x, g, None, *rest, x, g.to(dtype), torch.float32, torch.float32, True)
        torch.library.opcheck(torch.ops.normlab.residual_backward, backward, test_utils=tests)
        alone = (*backward[:8], None, g.to(dtype), torch.float32, torch.float32, False)
        torch.library.opcheck(torch.ops.normlab.residual_backward, alone, test_utils=tests)


def test_checkpointing_changes_nothing():
    from torch.utils.checkpoint import checkpoint

    x, g, options = build("peri", 64, torch.float32)

    def step(x, g):
        state, seen = residual_step(x, g, **options, kernels="triton")
        return state.sin().sum() + seen.cos().sum()

    plain = torch.autograd.grad(step(x, g), leaves(x, g, options))
    saving = torch.autograd.grad(checkpoint(step, x, g, use_reentrant=False), leaves(x, g, options))
    assert all(torch.equal(a, b) for a, b in zip(plain, saving, strict=True))


def test_what_cannot_run_says_so(monkeypatch):
    x, g, options = build("pre", 64, torch.float32)
    _, seen = residual_step(x, g, **options, kernels="triton")
    with pytest.raises(NormLabError, match="no second derivative; use kernels='reference'"):
        torch.autograd.grad(seen.sum(), x, create_graph=True)
    with pytest.raises(NormLabError, match=r"torch\.float64 is not one of"):
        residual_step(x.double(), g.double(), **options, kernels="triton")
    with pytest.raises(NormLabError, match="unknown kernels 'cuda'"):
        residual_step(x, g, **options, kernels="cuda")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(NormLabError, match="the tensor is on cpu, not on a CUDA device"):
        residual_step(x.cpu(), g.cpu(), kernels="triton")
