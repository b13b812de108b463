"""The fused step of n streams against its equation, forward and every gradient, in Triton's interpreter."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from normlab import NormLabError
from normlab.kernels import streams
from normlab.kernels.residual import KINDS, Affine
from normlab.kernels.streams import read_streams, write_and_read_streams, write_streams
from tests.kernels.graphs import compiled_graphs, count
from tests.matrix import parametrize

pytestmark = pytest.mark.filterwarnings(
    # Dynamo itself instantiates autograd functions.
    "ignore:.*should not be instantiated:DeprecationWarning",
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
EPS = 1e-5
NAMES = ("x", "f", "post", "comb", "pre", "gain", "bias")
USES = {"state": (True, False), "input": (False, True), "both": (True, True)}
MODES = {
    # Which inputs a step has.
    "step": NAMES,
    "step, no mixing": ("x", "f", "post", "pre", "gain"),
    "write": ("x", "f", "post", "comb"),
    "write, no mixing": ("x", "f", "post"),
    "read": ("x", "pre", "gain", "bias"),
    "read, no gain": ("x", "pre"),
}
# Half an ulp of one: the rounding of a result. The interpreter truncates to bf16, which costs a whole one.
ROUND = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-7}
# fp32 sums of a row, of the streams and of the tokens (at most 14, 3 and 6 roundings, in trees), five in sequence.
ARITHMETIC = 5 * 23 * 2.0**-24


class Made(NamedTuple):
    """The inputs of a step; None for what it does without."""

    x: Tensor
    f: Tensor | None
    post: Tensor | None
    comb: Tensor | None
    pre: Tensor | None
    gain: Tensor | None
    bias: Tensor | None

    def map(self, change) -> Made:
        return Made(*(None if t is None else change(t) for t in self))

    def leaves(self, dtype=None) -> Made:
        return self.map(lambda t: t.detach().to(dtype or t.dtype).requires_grad_())

    @property
    def given(self) -> list[Tensor]:
        return [t for t in self if t is not None]


def make(mode="step", n=4, dim=100, rows=(2, 3), dtype=F32, update_dtype=None, *, shared=False) -> Made:
    own = () if shared else rows
    made = {
        "x": torch.randn(*rows, n, dim).to(dtype),
        "f": torch.randn(*rows, dim).to(update_dtype or dtype),
        "post": torch.randn(*own, n),
        "comb": torch.randn(*own, n, n),
        "pre": torch.randn(*own, n),
        "gain": torch.randn(dim) * 0.3 + 1.0,
        "bias": torch.randn(dim) * 0.3,
    }
    return Made(*(made[name] if name in MODES[mode] else None for name in NAMES))


def fused(made: Made, kind="rms", *, kernels="triton", offset=False) -> tuple[Tensor, ...]:
    """The outputs of the step that the inputs belong to."""
    norm = Affine(kind, made.gain, made.bias, EPS, offset)
    if made.pre is None:
        return (write_streams(made.x, made.f, made.post, made.comb, kernels=kernels),)
    if made.f is None:
        return read_streams(made.x, made.pre, norm, kernels=kernels)
    return write_and_read_streams(made.x, made.f, made.post, made.comb, made.pre, norm, kernels=kernels)


def equation(made: Made, kind="rms", *, offset=False) -> tuple[Tensor, ...]:
    """The step written out, without the code under test."""
    state = made.x if made.comb is None else torch.einsum("...st,...sd->...td", made.comb, made.x)
    state = state if made.f is None else state + torch.einsum("...t,...d->...td", made.post, made.f)
    if made.pre is None:
        return (state,)
    h = torch.einsum("...t,...td->...d", made.pre, state)
    h = h - h.mean(-1, keepdim=True) if kind == "layer" else h
    y = h if kind == "scale" else h / (h.square().mean(-1, keepdim=True) + EPS).sqrt()
    y = y if made.gain is None else y * (made.gain + 1.0 if offset else made.gain)
    return state, y if made.bias is None else y + made.bias


def sizes(made: Made, upstream, kind: str, offset: bool) -> list[Tensor]:
    """The equation and its gradients once more, with every minus a plus: what roundings are relative to."""
    x, f, post, comb, pre, gain, bias = made.map(lambda t: t.double().abs())
    signed = made.map(lambda t: t.double())
    state, *rest = equation(Made(x, f, post, comb, pre, None, None), "scale")
    upstream = [None if d is None else d.double().abs() for d in upstream]
    g = torch.zeros_like(x) if upstream[0] is None else upstream[0]
    found: dict[str, Tensor] = {}
    if pre is not None:
        gain = torch.ones(x.shape[-1]).double() if gain is None else signed.gain.add(float(offset)).abs()
        h = equation(signed._replace(gain=None, bias=None), "scale")[1]
        h = h - h.mean(-1, keepdim=True) if kind == "layer" else h
        inverse = torch.ones(()) if kind == "scale" else (h.square().mean(-1, keepdim=True) + EPS).rsqrt()
        total = rest[0] + (rest[0].mean(-1, keepdim=True) if kind == "layer" else 0.0)
        n = inverse * total
        # The inverse RMS is as far off as the row that it is computed from.
        spread = 1.0 + n.square().mean(-1, keepdim=True).sqrt()
        y = gain * n * spread + (0.0 if bias is None else bias)
        d = torch.zeros_like(h) if upstream[1] is None else upstream[1]
        found |= {"gain": (d * n * spread).reshape(-1, d.shape[-1]).sum(0), "bias": d.reshape(-1, d.shape[-1]).sum(0)}
        d = d * gain
        if kind != "scale":
            d = inverse * spread * (d + n * (d * n).mean(-1, keepdim=True) + d.mean(-1, keepdim=True))
        g = g + pre.unsqueeze(-1) * d.unsqueeze(-2)
        found["pre"] = (d.unsqueeze(-2) * state).sum(-1)
    found["x"] = g if comb is None else torch.einsum("...st,...td->...sd", comb, g)
    found["comb"] = torch.einsum("...sd,...td->...st", x, g)
    if f is not None:
        found |= {"f": torch.einsum("...t,...td->...d", post, g), "post": torch.einsum("...d,...td->...t", f, g)}
    by_token = [found[name] for name, t in zip(NAMES, made, strict=True) if t is not None]
    summed = [s.sum_to_size(t.shape) for s, t in zip(by_token, made.given, strict=True)]
    return [state, *([y] if pre is not None else []), *summed]


def upstream_of(made: Made, use="both") -> list[Tensor | None]:
    shape = made.x.shape
    both = [torch.randn(shape).to(made.x.dtype), torch.randn(*shape[:-2], shape[-1]).to(made.x.dtype)]
    if made.pre is None:
        return [both[0], None]
    return [d if used else None for d, used in zip(both, USES[use], strict=True)]


def gradients(outputs, upstream, made: Made) -> list[Tensor | None]:
    used = [(y, d) for y, d in zip(outputs, upstream, strict=False) if d is not None]
    torch.autograd.backward([y for y, _ in used], [d.to(y.dtype) for y, d in used])
    return [t.grad for t in made.given]


def check(made: Made, use="both", *, kind="rms", offset=False, kernels="triton") -> None:
    upstream = upstream_of(made, use)
    inputs, exact = made.leaves(), made.leaves(torch.float64)
    outputs, expected = fused(inputs, kind, offset=offset, kernels=kernels), equation(exact, kind, offset=offset)
    found = [*outputs, *gradients(outputs, upstream, inputs)]
    wanted = [*expected, *gradients(expected, upstream, exact)]
    likes = [*[made.x] * len(outputs), *made.given]
    for ours, theirs, like, size in zip(found, wanted, likes, sizes(made, upstream, kind, offset), strict=True):
        if theirs is None:
            assert ours is None or not ours.any()
            continue
        assert ours.dtype == like.dtype
        assert ours.shape == theirs.shape
        # Streams are rounded before they are read, and results when they are stored.
        rounding = max(ROUND[like.dtype], 2 * ROUND[made.x.dtype])
        assert ours.isfinite().all()
        assert ((ours.double() - theirs).abs() <= (rounding + ARITHMETIC) * (size + 1e-30)).all()


@parametrize("mode", MODES, quick=["step", "write", "read"])
@parametrize("shared", [True, False], quick=[True, False])
@parametrize("dtype", ROUND, quick=[F32, BF16], ids=str)
def test_values_and_gradients(mode, shared, dtype):
    check(make(mode, shared=shared, dtype=dtype))


@parametrize("mode", MODES, quick=["step, no mixing", "write, no mixing", "read, no gain"])
@parametrize("kind", ["rms", "layer", "scale"], quick=["layer"])
def test_kinds_of_norms(mode, kind):
    check(make(mode), kind=kind)
    check(make(mode), kind=kind, kernels="reference")


def test_gain_as_an_offset():
    check(make(), offset=True)


@parametrize("mode", ["step", "step, no mixing", "read"], quick=["step", "read"])
@pytest.mark.parametrize("use", USES)
def test_an_output_that_is_not_used(mode, use):
    check(make(mode), use)


@parametrize("n", [1, 2, 3, 4, 5, 8], quick=[1, 3, 4])
def test_numbers_of_streams(n):
    check(make(n=n, dim=20))


@parametrize("dim", [1, 64, 127, 768, 1000, 4097], quick=[1, 127, 768])
def test_widths(dim):
    check(make(dim=dim, rows=(5,) if dim < 4000 else (2,), n=3), kind="rms")


@parametrize("shared", [True, False], quick=[True])
def test_more_rows_than_one_round_of_programs(shared):
    check(make(rows=(61,), dim=64, n=2, shared=shared))


@pytest.mark.parametrize(("dtype", "update_dtype"), [(F32, BF16), (BF16, F32)])
def test_streams_and_update_of_different_types(dtype, update_dtype):
    check(make(dtype=dtype, update_dtype=update_dtype))


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
def test_zero_tiny_and_huge_streams(scale):
    made = make()
    check(made._replace(x=made.x * scale, f=made.f * scale))


def test_zero_coefficients():
    check(make().map(torch.clone)._replace(pre=torch.zeros(2, 3, 4), post=torch.zeros(2, 3, 4)))


def test_shapes_and_strides():
    made = make(rows=(3, 5))
    swapped = made._replace(**{name: getattr(made, name).transpose(0, 1) for name in NAMES[:5]})
    check(swapped)
    check(make(rows=()))
    inputs = make(rows=(2, 0)).leaves()
    state, seen = fused(inputs)
    (state.sum() + seen.sum()).backward()
    assert (state.shape, seen.shape) == ((2, 0, 4, 100), (2, 0, 100))
    inputs = make(rows=(0,), shared=True).leaves()
    sum(y.sum() for y in fused(inputs)).backward()
    assert not any(t.grad.any() for t in inputs[2:])


def test_the_other_side_of_the_matrix_is_told_apart():
    made = make()
    wrong = made._replace(comb=made.comb.mT)
    ours, theirs = fused(made)[0].double(), equation(wrong.map(Tensor.double))[0]
    limit = ARITHMETIC * sizes(made, upstream_of(made), "rms", False)[0]
    assert ((ours - theirs).abs() > limit).float().mean() > 0.9


@pytest.mark.full
def test_gradients_are_the_same_bits_every_time():
    made = make(rows=(61,), dim=64, shared=True)
    upstream, found = upstream_of(made), []
    for _ in range(2):
        inputs = made.leaves()
        found.append(gradients(fused(inputs), upstream, inputs))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("shared", [True, False])
def test_reference_has_first_and_second_derivatives(shared):
    made = make(rows=(2,), n=2, dim=3, shared=shared).leaves(torch.float64)

    def step(*tensors):
        return fused(Made(*tensors), "layer", kernels="reference")

    assert torch.autograd.gradcheck(step, tuple(made))
    assert torch.autograd.gradgradcheck(step, tuple(made))


def test_second_derivative_of_the_kernel_says_what_to_do():
    inputs = make().leaves()
    (first,) = torch.autograd.grad(fused(inputs)[0].square().sum(), inputs.f, create_graph=True)
    with pytest.raises(NormLabError, match="kernels='reference'"):
        first.sum().backward()


@parametrize("mode", MODES, quick=["step"])
@parametrize("shared", [True, False], quick=[False])
def test_operators_keep_their_promises(mode, shared):
    made = make(mode, n=2, dim=20, shared=shared)
    norm = (KINDS["rms"], EPS, False)
    torch.library.opcheck(streams._forward_op, (*made, *norm))
    torch.library.opcheck(streams._backward_op, (*made, *norm, *upstream_of(made)))


def chain(*tensors):
    """A step, its read apart from its write, and a step again."""
    made = Made(*tensors)
    state, seen = fused(made)
    state = fused(made._replace(x=state, f=torch.sin(seen), pre=None))[0]
    state, seen = fused(made._replace(x=state, f=None, post=None, comb=None))
    state, seen = fused(made._replace(x=state, f=torch.cos(seen)))
    return (state * 0.5).sum() + (seen * seen).sum()


@parametrize("way", ["compiled", "checkpointed"], quick=["checkpointed"])
def test_compiled_and_checkpointed_chains_give_the_same(way):
    torch._dynamo.reset()
    made, found = make(n=2, dim=20), []
    other = {
        "compiled": torch.compile(chain, fullgraph=True, backend="aot_eager"),
        "checkpointed": lambda *inputs: checkpoint(chain, *inputs, use_reentrant=False),
    }[way]
    for loss in (chain, other):
        inputs = made.leaves()
        loss(*inputs).backward()
        found.append([t.grad for t in inputs.given])
    for one, two in zip(*found, strict=True):
        # The compiler adds the gradients of coefficients, which every step uses, in another order.
        assert (one - two).abs().max() <= 8 * 2.0**-24 * two.abs().max()


def test_compiled_chain_adds_no_gradients_of_streams_itself():
    inputs = make(n=2, dim=20).leaves()
    _, backward = compiled_graphs(chain, *inputs)
    assert count(backward, "normlab.streams_backward") == 4
    assert count(backward, "aten.add", inputs.x.shape) == 0


def test_wrong_shapes_and_types_are_named():
    made = make()
    with pytest.raises(NormLabError, match=r"need post of shape \(2, 3, 4\), or \(4,\) if all tokens share it"):
        fused(made._replace(post=made.post[:1]))
    with pytest.raises(NormLabError, match=r"need comb of shape \(2, 3, 4, 4\)"):
        fused(made._replace(comb=made.comb[..., :3]))
    with pytest.raises(NormLabError, match=r"need an update \(2, 3, 100\)"):
        fused(made._replace(f=made.f[..., :9]))
    with pytest.raises(NormLabError, match="float64"):
        fused(made.map(Tensor.double))
    assert fused(made.map(Tensor.double), kernels="auto")[0].dtype == torch.float64


def test_more_streams_than_registers_hold():
    made = make("write", n=3, dim=16384, rows=(1,))
    with pytest.raises(NormLabError, match="3 streams of width 16384 exceed 32768 elements a token"):
        fused(made)
    assert fused(made, kernels="reference")[0].isfinite().all()
