"""The fused step of streams with dynamic coefficients against its equations, forward and backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from normlab import NormLabError
from normlab.kernels import dynamic_streams as module
from normlab.kernels.backends import interpreting
from normlab.kernels.dynamic_streams import DynamicRead, dynamic_step, weights_of
from normlab.kernels.residual import Affine, apply
from tests.kernels.chains import assert_same_otherwise
from tests.kernels.graphs import compiled_graphs, count
from tests.matrix import parametrize

pytestmark = pytest.mark.filterwarnings(
    # Dynamo itself instantiates autograd functions.
    "ignore:.*should not be instantiated:DeprecationWarning",
)

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
EPS, NORM_EPS, CONSTANT = 1e-5, 1e-6, 1e-3
# Half an ulp of one. The interpreter truncates to bf16, which costs a whole one.
ROUND = {F16: 2.0**-11, BF16: 2.0**-7 if interpreting() else 2.0**-8}
# Two factors in two bf16 parts each, and the product of their second parts, which is left out.
PARTS = 3 * ROUND[BF16] ** 2
# (all streams of a token together, activation, inside)
KINDS = {
    "mhc": (True, "sigmoid", True),
    "hc": (False, "tanh", False),
    "hc without tanh": (False, "identity", False),
    "other": (False, "sigmoid", True),
}


class Made(NamedTuple):
    """Inputs, and gradients of the streams, of the read and of the logits; None for what nobody uses or has."""

    x: Tensor
    f: Tensor
    post: Tensor
    comb: Tensor | None
    weight: Tensor
    scale: Tensor
    base: Tensor
    gain: Tensor | None
    d_state: Tensor | None
    d_seen: Tensor | None
    d_u: Tensor | None


def make(kind="mhc", rows=(7,), n=4, dim=40, dtype=BF16, outputs=None, mixes=True, use="state seen u") -> Made:
    together = KINDS[kind][0]
    outputs = outputs or (n * (n + 1 + mixes) if together else n + 2)
    x, f, d_state, d_seen = (torch.randn(*rows, *own, dim).to(dtype) for own in ((n,), (), (n,), ()))
    post, comb = torch.randn(*rows, n), torch.randn(*rows, n, n) if mixes else None
    weight = torch.randn(outputs, n * dim if together else dim) * 0.1
    scale, base, gain = torch.randn(n), torch.randn(n), torch.randn(dim)
    d_u = torch.randn(*rows, *(() if together else (n,)), outputs)
    used = [d if name in use.split() else None for name, d in (("state", d_state), ("seen", d_seen), ("u", d_u))]
    return Made(x, f, post, comb, weight, scale, base, gain, *used)


def read_of(kind: str, weight: Tensor, scale: Tensor, base: Tensor) -> DynamicRead:
    _, activation, inside = KINDS[kind]
    return DynamicRead(weight, EPS, scale, base, activation, inside, CONSTANT)  # type: ignore[arg-type]


def step(kind: str, leaves: list[Any], kernels="triton", offset=False) -> tuple[Tensor, ...]:
    x, f, post, comb, weight, scale, base, gain = leaves
    norm = Affine("rms", gain, None, NORM_EPS, offset)
    return dynamic_step(x, f, post, comb, read_of(kind, weight, scale, base), norm, kernels=kernels)


def equations(kind: str, leaves: list[Any], stored: Tensor, offset=False) -> tuple[Tensor, ...]:
    """The module's formula, in the dtype of the inputs, with X' as the kernel has stored it."""
    x, f, post, comb, weight, scale, base, gain = leaves
    mixed = x if comb is None else torch.einsum("...st,...sd->...td", comb, x)
    state = mixed + post.unsqueeze(-1) * f.unsqueeze(-2)
    # A rounding has the gradient of what it rounds.
    state = state + (stored.to(state.dtype) - state).detach()
    rows = state.flatten(-2) if KINDS[kind][0] else state
    u = rows @ weight.T / (rows.square().mean(-1, keepdim=True) + EPS).sqrt()
    pre = weights_of(u[..., : x.shape[-2]] if KINDS[kind][0] else u[..., 0], read_of(kind, weight, scale, base))
    h = (pre.unsqueeze(-1) * state).sum(-2)
    return state, apply(Affine("rms", gain, None, NORM_EPS, offset), h), u


def gradients(out: tuple[Tensor, ...], made: Made, leaves: list[Any]) -> list[Tensor | None]:
    used = [(o, d.to(o.dtype)) for o, d in zip(out, made[8:], strict=True) if d is not None]
    torch.autograd.backward(*map(list, zip(*used, strict=True)))
    return [None if leaf is None else leaf.grad for leaf in leaves]


def run(kind: str, made: Made, stored: Tensor | None = None, offset=False) -> list[Tensor | None]:
    """(X', y, u, gradients); by the equations in fp64 if the streams that the kernel has stored are given."""
    dtype = None if stored is None else F64
    leaves = [None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in made[:8]]
    out = step(kind, leaves, offset=offset) if stored is None else equations(kind, leaves, stored, offset)
    return [*(o.detach() for o in out), *gradients(out, made, leaves)]


NAMES = ("X'", "y", "u", "x", "f", "post", "comb", "weight", "scale", "base", "gain")


def perturbed(kind: str, made: Made, stored: Tensor, offset: bool) -> list[Tensor]:
    """How much results move if every operand of a product in parts is off by 2^-8: what roundings are relative to."""
    moved = [torch.zeros(()) for _ in NAMES]
    exact = run(kind, made, stored, offset)
    for _ in range(6):
        noisy = [t if t is None else t + t * 2.0**-8 * torch.empty_like(t, dtype=F32).uniform_(-1, 1) for t in made]
        noise = stored.double() * (1 + 2.0**-8 * torch.empty_like(stored, dtype=F64).uniform_(-1, 1))
        found = run(kind, Made(*(None if t is None else t.double() for t in noisy)), noise, offset)
        moved = [
            m if a is None else torch.maximum(m, (a - b).abs()) for m, a, b in zip(moved, found, exact, strict=True)
        ]
    return [2.0**8 * m for m in moved]


def check(kind: str, made: Made, offset=False) -> None:
    found = run(kind, made, offset=offset)
    stored = found[0]
    assert stored is not None
    # X' itself: a rounding, and those of at most five products in fp32.
    x, f, post, comb = (None if t is None else t.double() for t in made[:4])
    mixed = x if comb is None else torch.einsum("...st,...sd->...td", comb, x)
    exact = mixed + post[..., None] * f[..., None, :]
    terms = x.abs() if comb is None else torch.einsum("...st,...sd->...td", comb.abs(), x.abs())
    terms = terms + post.abs()[..., None] * f.abs()[..., None, :]
    assert ((stored.double() - exact).abs() <= ROUND[stored.dtype] * exact.abs() + 8 * 2.0**-24 * terms + 1e-7).all()
    theirs, sizes = run(kind, made, stored, offset), perturbed(kind, made, stored, offset)
    for name, one, two, size in list(zip(NAMES, found, theirs, sizes, strict=True))[1:]:
        if two is None:
            # Of an output that nobody uses nothing comes back, or nothing but zeros.
            assert one is None or not one.any(), name
            continue
        assert one is not None, name
        assert one.shape == two.shape
        assert one.isfinite().all(), name
        # A result in half precision is rounded; products in parts are, and some hundred fp32 operations.
        rounding = ROUND.get(one.dtype, 0.0)
        # The largest of six random moves is within a factor of ten of the largest there is.
        allowed = rounding * two.abs() + (10 * PARTS + 200 * 2.0**-24) * (size + size.mean()) + 1e-6
        assert ((one.double() - two).abs() <= allowed).all(), name


@parametrize("dtype", [BF16, F16], quick=[BF16, F16], ids=str)
@parametrize("kind", KINDS, quick=["mhc", "hc"])
def test_values_and_gradients(kind, dtype):
    check(kind, make(kind, dtype=dtype))


@parametrize("mixes", [True, False], quick=[False])
@parametrize("n", [2, 3], quick=[3])
@parametrize("kind", ["mhc", "hc"], quick=["mhc"])
def test_other_numbers_of_streams(kind, n, mixes):
    check(kind, make(kind, n=n, mixes=mixes))


def test_an_exit_has_a_weight_for_every_stream_and_nothing_else():
    check("mhc", make("mhc", outputs=4, use="seen"))


@parametrize("dim", [1, 64, 127, 300], quick=[1, 127])
def test_widths(dim):
    check("mhc", make(rows=(3,), dim=dim))


@parametrize("rows", [1, 16, 33, 150], quick=[33])
def test_numbers_of_rows(rows):
    # 150: more tiles than there are programs, in uneven shares.
    check("hc", make("hc", (rows,)))


@parametrize("use", ["state", "seen", "u", "state seen", "seen u", "state u"], quick=["state", "seen", "state u"])
def test_an_output_that_is_not_used(use):
    check("mhc", make(rows=(2, 3), use=use))


@parametrize("gain", ["none", "offset", "half"], quick=["offset"])
def test_gains(gain):
    made = make()
    if gain == "none":
        made = made._replace(gain=None)
    if gain == "half":
        made = made._replace(gain=made.gain.bfloat16())
    check("mhc", made, offset=gain == "offset")


@parametrize("size", [0.0, 1e-3, 1e3], quick=[0.0])
def test_zero_tiny_and_huge_streams(size):
    made = make(rows=(3,))
    check("mhc", made._replace(x=made.x * size, f=made.f * size))


def test_a_swapped_matrix_is_not_the_same():
    made = make()
    one, two = run("mhc", made), run("mhc", made._replace(comb=made.comb.mT.contiguous()))
    assert (one[0].float() - two[0].float()).abs().max() > 0.5
    # dcomb[s, t] is X_s·G_t: the gradient is not symmetric, either.
    assert (one[6] - one[6].mT).abs().max() > 0.5


def test_coefficients_that_all_tokens_share():
    made = make(rows=(5,))
    shared = made._replace(post=made.post[0], comb=made.comb[0])
    each = made._replace(post=made.post[:1].expand(5, 4), comb=made.comb[:1].expand(5, 4, 4))
    for name, one, two in zip(NAMES, run("mhc", shared), run("mhc", each), strict=True):
        if name in ("post", "comb"):
            two = two.sum(0)
        assert torch.allclose(one.float(), two.float(), rtol=1e-5, atol=1e-5), name


def test_an_update_in_fp32():
    made = make(rows=(5,))
    found = run("mhc", made._replace(f=made.f.float()))
    assert found[4].dtype == F32
    for one, two in zip(found, run("mhc", made), strict=True):
        assert (one.double() - two.double()).abs().max() <= 2 * ROUND[BF16] * two.double().abs().max()


def test_what_is_not_a_number_stays_in_its_token():
    made = make(rows=(20,))
    made.x[1, 2, 5] = torch.nan
    found = dict(zip(NAMES, run("mhc", made), strict=True))
    others = [i for i in range(20) if i != 1]
    for name in ("X'", "y", "u", "x", "f", "post", "comb"):
        assert found[name][others].isfinite().all(), name
    assert found["u"][1].isnan().all()


def test_shapes_and_strides():
    made = make(rows=(3, 5))
    check("mhc", Made(*(None if t is None else t.transpose(0, 1) if t.dim() > 2 else t for t in made)))
    check("mhc", make(rows=()))
    gain, weight = torch.randn(80)[::2], torch.randn(160, 24).T * 0.1
    check("mhc", made._replace(scale=torch.randn(1).expand(4), base=torch.randn(8)[::2], gain=gain, weight=weight))
    x, *_ = found = run("mhc", make(rows=(2, 0)))
    assert x.shape == (2, 0, 4, 40)
    for gradient in found[-4:]:
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.full
def test_results_are_the_same_bits_every_time():
    made = make(rows=(150,))
    assert all(map(torch.equal, run("mhc", made), run("mhc", made)))


def test_the_read_is_that_of_the_streams_as_they_are_stored():
    made = make()
    state, seen, u = step("mhc", list(made[:8]))
    read = read_of("mhc", made.weight, made.scale, made.base)
    h = (weights_of(u[..., :4], read).unsqueeze(-1) * state.float()).sum(-2)
    expected = apply(Affine("rms", made.gain, None, NORM_EPS), h)
    assert ((seen.float() - expected).abs() <= ROUND[BF16] * expected.abs() + 1e-5).all()


@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_the_equation(kind):
    made = Made(*(t.double() for t in make(kind)))
    state, seen, u = step(kind, list(made[:8]), "reference")
    for one, two in zip((state, seen, u), equations(kind, list(made[:8]), state), strict=True):
        assert (one - two).abs().max() <= 500 * 2.0**-53 * two.abs().max()


def test_reference_has_first_and_second_derivatives():
    leaves = [t.double().requires_grad_() for t in make(rows=(2,), n=2, dim=3)[:8]]
    assert torch.autograd.gradcheck(lambda *given: step("mhc", list(given), "auto"), leaves)
    assert torch.autograd.gradgradcheck(lambda *given: step("mhc", list(given), "auto")[1], leaves)


@pytest.mark.parametrize("why", ["dtype", "streams", "width", "outputs", "norm", "bias"])
def test_what_the_kernel_does_not_cover_takes_a_kernel_for_each_step(why, monkeypatch):
    made = make(
        n=5 if why == "streams" else 4, dim=2100 if why == "width" else 40, dtype=F32 if why == "dtype" else BF16
    )
    norm = Affine("layer" if why == "norm" else "rms", made.gain, made.gain if why == "bias" else None, NORM_EPS)
    called = []
    monkeypatch.setattr(module, "_forward_op", lambda *a: called.append(a))
    # More outputs than the kernel's product has rows: those beyond would never be written.
    weight = torch.cat([made.weight, made.weight[:9]]) if why == "outputs" else made.weight
    read = read_of("mhc", weight, made.scale, made.base)
    found = dynamic_step(*made[:4], read, norm, kernels="triton")
    exact = dynamic_step(*made[:4], read, norm, kernels="reference")
    assert not called
    for one, two in zip(found, exact, strict=True):
        assert (one - two).abs().max() <= 4 * ROUND[BF16] * two.abs().max()


def test_wrong_shapes_and_types_are_named():
    made = make()
    read = read_of("mhc", made.weight, made.scale, made.base)
    with pytest.raises(NormLabError, match=r"a weight \(K, 40\), or \(K, 160\) with K at least 4; got \(24, 159\)"):
        dynamic_step(*made[:4], read._replace(weight=made.weight[:, 1:]))
    with pytest.raises(NormLabError, match=r"a scale and a base \(4,\), got \(3,\)"):
        dynamic_step(*made[:4], read._replace(scale=made.scale[1:]))
    with pytest.raises(NormLabError, match="need post of shape"):
        dynamic_step(*made[:2], made.post[:, 1:], None, read, Affine("rms", None, None, 1e-6), kernels="triton")
    with pytest.raises(NormLabError, match="float64"):
        dynamic_step(made.x.double(), *made[1:4], read, kernels="triton")


def test_second_derivative_of_the_kernel_says_what_to_do():
    leaves = [t.requires_grad_() for t in make()[:8]]
    _, seen, _ = step("mhc", leaves)
    (first,) = torch.autograd.grad(seen.float().square().sum(), leaves[4], create_graph=True)
    with pytest.raises(NormLabError, match="kernels='reference'"):
        first.sum().backward()


@parametrize("kind", ["mhc", "hc"], quick=["mhc"])
@parametrize("use", ["state seen u", "seen"], quick=["seen"])
def test_operators_keep_their_promises(kind, use):
    made = make(kind, (2, 3), use=use)
    options = (1 if kind == "mhc" else 2, kind == "mhc")
    inputs = (*made[:8], EPS, *options, CONSTANT, NORM_EPS, False)
    torch.library.opcheck(module._forward_op, inputs)
    state, _, *numbers = module._forward_op(*inputs)
    torch.library.opcheck(module._backward_op, (*made[:8], *options, False, state, *numbers, *made[8:]))


def chain(x: Tensor, f: Tensor, weight: Tensor, scale: Tensor, base: Tensor) -> Tensor:
    """Three steps of two streams, as a scheme makes them: coefficients of a write come from the step before it."""
    read, norm = DynamicRead(weight, EPS, scale, base, "sigmoid", inside=True), Affine("rms", None, None, NORM_EPS)
    post, comb, seen = f[..., :2].float(), None, f
    for _ in range(3):
        x, seen, u = dynamic_step(x, seen + f, post, comb, read, norm, kernels="triton")
        post, comb = u[..., 2:4].sigmoid(), u[..., 4:].reshape(*u.shape[:-1], 2, 2).softmax(-2)
    return (x.float() * 0.5).sum() + seen.float().sum() + post.sum()


def chain_inputs() -> list[Tensor]:
    streams = [torch.randn(2, 3, 2, 20).bfloat16(), torch.randn(2, 3, 20).bfloat16()]
    return [*streams, 0.1 * torch.randn(8, 40), torch.randn(2), torch.randn(2)]


@parametrize("way", ["compiled", "checkpointed"], quick=["checkpointed"])
def test_compiled_and_checkpointed_chains_give_the_same(way, request):
    made = chain_inputs()
    request.getfixturevalue("no_default_device")
    assert_same_otherwise(chain, made, way, roundings=8)


def test_compiled_chain_adds_no_gradients_of_streams_itself(request):
    inputs = [t.requires_grad_() for t in chain_inputs()]
    request.getfixturevalue("no_default_device")
    _, backward = compiled_graphs(chain, *inputs)
    assert count(backward, "normlab.dynamic_streams_backward") == 3
    assert count(backward, "aten.add", inputs[0].shape) == 0
