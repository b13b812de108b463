"""The fused RMSNorm with a small linear map against its equation, forward and backward, in Triton's interpreter."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import normlab
from normlab import NormLabError
from normlab.kernels import normalised_projection as module
from normlab.kernels.backends import interpreting
from normlab.kernels.normalised_projection import normalised_projection
from normlab.kernels.streams import read_streams, write_streams
from tests.kernels.chains import assert_same_otherwise
from tests.kernels.graphs import compiled_graphs, count
from tests.matrix import parametrize

pytestmark = pytest.mark.filterwarnings(
    # Dynamo itself instantiates autograd functions.
    "ignore:.*should not be instantiated:DeprecationWarning",
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
EPS = 1e-5
USES = {"rows": (True, False), "result": (False, True), "both": (True, True)}
# Half an ulp of one. The interpreter truncates to bf16, which costs a whole one.
ROUND = {F16: 2.0**-11, BF16: 2.0**-7 if interpreting() else 2.0**-8}
# Two factors in two bf16 parts each, and the product of their second parts, which is left out.
PARTS = 3 * ROUND[BF16] ** 2


class Made(NamedTuple):
    """Rows, weight, and the gradients of the rows and of the result; None for what nobody uses."""

    x: Tensor
    weight: Tensor
    d_x: Tensor | None
    d_u: Tensor | None


def make(rows=(7,), outputs=6, dim=100, dtype=BF16, use="both") -> Made:
    x, d_x = (torch.randn(*rows, dim).to(dtype) for _ in range(2))
    weight, d_u = 0.1 * torch.randn(outputs, dim), torch.randn(*rows, outputs)
    return Made(x, weight, *(d if used else None for d, used in zip((d_x, d_u), USES[use], strict=True)))


def run(made: Made, kernels="triton", dtype=None, eps=EPS) -> list[Tensor | None]:
    """(u, gradient of x, gradient of the weight)."""
    x, weight = (t.detach().to(dtype or t.dtype).requires_grad_() for t in made[:2])
    y, u = normalised_projection(x, weight, eps, kernels=kernels)
    used = [(out, d.to(out.dtype)) for out, d in ((y, made.d_x), (u, made.d_u)) if d is not None]
    torch.autograd.backward(*map(list, zip(*used, strict=True)))
    return [u.detach(), x.grad, weight.grad]


def sizes(made: Made, eps=EPS) -> list[Tensor]:
    """u and the gradients once more, with every minus a plus: what roundings are relative to."""
    x, weight, d_x, d_u = (None if t is None else t.double().abs() for t in made)
    inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt().clamp_max(1e30)
    u = inverse * (x @ weight.T)
    d_x = torch.zeros_like(x) if d_x is None else d_x
    d = inverse * (torch.zeros_like(u) if d_u is None else d_u)
    dx = d_x + d @ weight + inverse * (d * u).mean(-1, keepdim=True) * u.shape[-1] / x.shape[-1] * x
    return [u, dx, torch.einsum("...k,...d->kd", d, x)]


def check(made: Made, eps=EPS) -> None:
    found, exact = run(made, eps=eps), run(made, "reference", torch.float64, eps)
    # Tensor cores add 16 products at once and truncate: a sum of columns, of outputs or of rows.
    sums = (max(made.x.numel() // made.x.shape[-1], made.x.shape[-1]) / 16 + 20) * 2.0**-23
    for ours, theirs, size, rounding in zip(found, exact, sizes(made, eps), (0, ROUND[made.x.dtype], 0), strict=True):
        if theirs is None:
            assert ours is None
            continue
        assert ours.shape == theirs.shape
        assert ours.isfinite().all()
        assert ((ours.double() - theirs).abs() <= (rounding + PARTS + sums) * (size + 1e-30)).all()
    assert found[1].dtype == made.x.dtype


@parametrize("dtype", [BF16, F16], quick=[BF16, F16], ids=str)
@parametrize("outputs", [1, 6, 24, 64], quick=[24])
def test_values_and_gradients(dtype, outputs):
    check(make(outputs=outputs, dtype=dtype))


@parametrize("dim", [1, 64, 127, 300, 1536], quick=[1, 300])
def test_widths(dim):
    check(make((3,), 6, dim))


@parametrize("rows", [1, 32, 65, 200], quick=[200])
def test_numbers_of_rows(rows):
    # 200: more tiles than there are programs, in uneven shares.
    check(make((rows,), 6, 40))


@pytest.mark.parametrize("use", USES)
def test_an_output_that_is_not_used(use):
    check(make((2, 3), use=use))


@pytest.mark.parametrize("size", [0.0, 1e-4, 1e4])
def test_zero_tiny_and_huge_rows(size):
    made = make((3,))
    check(made._replace(x=made.x * size))


def test_zero_row_without_epsilon_stays_finite():
    made = make((3,))
    made.x[1] = 0.0
    found = run(made, eps=0.0)
    assert all(t.isfinite().all() for t in found)
    assert not found[0][1].any()


def test_what_is_not_a_number_stays_in_its_row():
    made = make((3,), 6, 40)
    made.x[1, 5] = torch.nan
    u, dx, dw = run(made)
    for found in (u, dx):
        assert found[1].isnan().all()
        assert found[[0, 2]].isfinite().all()
    assert dw[:, 5].isnan().all()


def test_shapes_and_strides():
    made = make((3, 5), 6, 40)
    check(Made(*(t.transpose(0, 1) if t.dim() == 3 else t for t in made)))
    check(made._replace(weight=(0.1 * torch.randn(40, 6)).T, d_u=torch.ones(()).expand(3, 5, 6)))
    check(make((), 6, 40))
    u, dx, dw = run(make((2, 0), 6, 40))
    assert (u.shape, dx.shape) == ((2, 0, 6), (2, 0, 40))
    assert torch.equal(dw, torch.zeros(6, 40))


def test_gradients_are_the_same_bits_every_time():
    made = make((200,), 6, 40)
    assert all(map(torch.equal, run(made), run(made)))


def test_second_parts_are_not_forgotten():
    made = make((20,), 6, 100)
    exact = run(made, "reference", torch.float64)
    rounded = run(made._replace(weight=made.weight.bfloat16().float(), d_u=made.d_u.bfloat16().float()), dtype=F32)
    for ours, theirs, true in list(zip(run(made), rounded, exact, strict=True))[::2]:
        # Rounded to bf16 once, a factor is wrong by 2^-8; in two parts, by 2^-8 (2^-7, truncated) of that.
        assert 16 * (ours - true).abs().max() <= (theirs - true).abs().max()


def test_rows_are_handed_on_and_not_copied():
    made = make()
    for kernels in ("triton", "reference"):
        y, _ = normalised_projection(made.x, made.weight, EPS, kernels=kernels)
        assert y.data_ptr() == made.x.data_ptr()


def test_reference_is_the_equation():
    x, weight, *_ = (t.double() for t in make((2, 3)))
    expected = (x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()) @ weight.T
    _, u = normalised_projection(x, weight, EPS, kernels="reference")
    # One rounding for each of the hundred terms of two sums.
    assert (u - expected).abs().max() <= 200 * 2.0**-53 * expected.abs().max()


@pytest.mark.parametrize(("dtype", "outputs"), [(F32, 6), (BF16, 65)])
def test_what_the_kernel_does_not_cover_uses_the_reference(dtype, outputs):
    made = make(outputs=outputs, dtype=dtype)
    assert all(map(torch.equal, run(made), run(made, "reference")))


def test_wrong_shapes_and_types_are_named():
    made = make()
    with pytest.raises(NormLabError, match=r"got \(7, 99\) and \(6, 100\)"):
        normalised_projection(made.x[:, 1:], made.weight, EPS)
    with pytest.raises(NormLabError, match="float64"):
        normalised_projection(made.x.double(), made.weight, EPS, kernels="triton")


def test_reference_has_first_and_second_derivatives():
    inputs = tuple(t.double().requires_grad_() for t in make((2,), 3, 4)[:2])
    assert torch.autograd.gradcheck(lambda x, w: normalised_projection(x, w, EPS), inputs)
    assert torch.autograd.gradgradcheck(lambda x, w: normalised_projection(x, w, EPS), inputs)


def test_second_derivative_of_the_kernel_says_what_to_do():
    x, weight = (t.requires_grad_() for t in make()[:2])
    _, u = normalised_projection(x, weight, EPS, kernels="triton")
    (first,) = torch.autograd.grad(u.square().sum(), weight, create_graph=True)
    with pytest.raises(NormLabError, match="kernels='reference'"):
        first.sum().backward()


@parametrize("use", ["both", "result"], quick=["both"])
def test_operators_keep_their_promises(use):
    made = make((2, 3), 6, 40, use=use)
    torch.library.opcheck(module._forward_op, (made.x, made.weight, EPS))
    saved = module._forward_op(made.x, made.weight, EPS)
    torch.library.opcheck(module._backward_op, (made.x, made.weight, *saved, made.d_x, made.d_u))


def chain(x: Tensor, f: Tensor, weight: Tensor) -> Tensor:
    """Two steps of two streams, as a scheme with dynamic coefficients makes them."""
    for _ in range(2):
        x, found = normalised_projection(x, weight, EPS, kernels="triton")
        x, seen = read_streams(x, found[..., 0], kernels="triton")
        x = write_streams(x, seen + f, found[..., 1].sigmoid(), kernels="triton")
    return (x.float() * 0.5).sum()


def streams() -> list[Tensor]:
    return [torch.randn(2, 3, 2, 20).bfloat16(), torch.randn(2, 3, 20).bfloat16(), 0.1 * torch.randn(2, 20)]


@parametrize("way", ["compiled", "checkpointed"], quick=["checkpointed"])
def test_compiled_and_checkpointed_chains_give_the_same(way, request):
    made = streams()
    request.getfixturevalue("no_default_device")
    assert_same_otherwise(chain, made, way, roundings=4)


def test_compiled_chain_adds_no_gradients_of_rows_itself():
    inputs = [t.requires_grad_() for t in streams()]
    _, backward = compiled_graphs(chain, *inputs)
    assert count(backward, "normlab.normalised_projection_backward") == 2
    assert count(backward, "aten.add", inputs[0].shape) == 0


@pytest.mark.full
def test_that_count_sees_a_state_that_is_not_handed_on():
    def careless(x: Tensor, f: Tensor, weight: Tensor) -> Tensor:
        _, found = normalised_projection(x, weight, EPS, kernels="triton")
        return write_streams(x, f, found[..., 1].sigmoid(), kernels="triton")

    inputs = [t.requires_grad_() for t in streams()]
    assert count(compiled_graphs(careless, *inputs)[1], "aten.add", inputs[0].shape) == 1


@pytest.mark.full
@pytest.mark.parametrize("spec", ["hc(streams=5)", "mhc(streams=5, rounds=2)"])
def test_compiled_stacks_add_no_gradients_of_streams_themselves(spec, request):
    # With more streams than the kernel of a whole step has.
    stack = normlab.Stack(spec, [(torch.nn.Identity(),) * 2], 24, kernels="triton")
    state = torch.randn(2, 3, 24).bfloat16().requires_grad_()
    request.getfixturevalue("no_default_device")
    _, backward = compiled_graphs(stack, state)
    reads = 3 if "mhc" in spec else 2  # both branches', and that of an exit with weights
    assert count(backward, "normlab.normalised_projection_backward") == reads
    assert count(backward, "aten.add", (2, 3, 5, 24), (2, 3, 120)) == 0


HALF = ("hc", "hc(norm='layer')", "hc(gain='offset')", "hc(gain='none')", "mhc", "mhc(rounds=2)", "mhc(mixing='none')")


@parametrize("spec", HALF, quick=["hc", "mhc(rounds=2)"])
def test_coefficients_of_half_precision_streams_are_the_references(spec):
    step = normlab.scheme(spec).bind(depth=2, dim=24).block(0).steps[0]
    with torch.no_grad():
        for parameter in step.parameters():
            parameter += torch.randn(parameter.shape) * 0.3
    found, streams = [], torch.randn(2, 3, 4, 24).bfloat16()
    for kernels in ("triton", "reference"):
        state = streams.clone().requires_grad_()
        # In fp32, the kernel's result is that of the reference; both read the same streams.
        after, *coefficients = step.read.coefficients(state, kernels)
        loss = sum((c * torch.linspace(-1.0, 1.0, c.shape[-1])).sum() for c in coefficients) + after.float().sum()
        step.zero_grad()
        loss.backward()
        found.append([*coefficients, state.grad.float(), *(p.grad for p in step.parameters() if p.grad is not None)])
    for one, two in zip(*found, strict=True):
        # Logits of size at most ten, of 96 columns; then gradients in bf16.
        rounding = 2 * ROUND[BF16] if one.shape == (2, 3, 4, 24) else 0.0
        assert (one - two).abs().max() <= (rounding + 10 * PARTS + 96 * 2.0**-23) * two.abs().max().clamp_min(1.0)
