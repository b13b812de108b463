"""Every number format, radius, width and shape gives the answer to its own rounding."""

import math

import pytest
import torch

from normlab.geometry import angle, distance, exp, log, norm, project, transport, unit
from tests.geometry.oracles import geomstats_exp, geomstats_log, geomstats_transport
from tests.geometry.points import FULL, FUNCTIONS, HALF, eps, gaussian, rounding, vectors


def reference(function, x, y, u):
    """Float64 answer from the textbook formulas, by acos and plain norms."""
    r = x.norm(dim=-1, keepdim=True)
    a, b = x / r, y / y.norm(dim=-1, keepdim=True)
    v = u - (a * u).sum(-1, keepdim=True) * a
    heading = geomstats_log(a, b)
    answers = {
        norm: r,
        unit: a,
        project: v,
        exp: r * geomstats_exp(a, v / r),
        angle: heading.norm(dim=-1),
        distance: (r * heading).norm(dim=-1),
        log: r * heading,
        transport: geomstats_transport(a, heading, v),
    }
    return answers[function]


@pytest.mark.parametrize("dtype", HALF + FULL)
@pytest.mark.parametrize("function", [function for function, _ in FUNCTIONS])
def test_every_dtype_is_right_to_its_own_rounding(function, dtype):
    width = 32
    x, y, u = vectors(3, 40, width, seed=8, dtype=dtype)
    arguments = (x, u) if function in (project, exp) else (x, y, u)[: dict(FUNCTIONS)[function]]
    answer = function(*arguments)
    expected = reference(function, x.double(), y.double(), u.double())
    assert answer.dtype == dtype
    # Half precision: one rounding of the float32 answer, half an eps relative. The float32 (or float64) answer: its
    # rounding at the size of the longest vector, three times for angles up to π; fp16 subnormals are far below it.
    work = torch.promote_types(dtype, torch.float32)
    size = max(norm(v.double()).max().item() for v in (x, u))
    rtol = eps(dtype) / 2 if dtype in HALF else 0
    torch.testing.assert_close(answer.double(), expected, rtol=rtol, atol=3 * size * rounding(width, work))


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_gradients_are_the_float32_gradients_rounded(dtype):
    half = [v.requires_grad_() for v in vectors(3, 5, 16, dtype=dtype)]
    wide = [v.detach().float().requires_grad_() for v in half]
    narrow = torch.autograd.grad(transport(*half).sum(), half)
    full = torch.autograd.grad(transport(*wide).sum(), wide)
    # The incoming gradient (ones) is exact in half precision and the outgoing one is rounded once.
    for ours, expected in zip(narrow, full, strict=True):
        assert torch.equal(ours, expected.to(dtype))


def test_mixed_dtypes_promote():
    x, u = gaussian(3, dtype=torch.float16), gaussian(3, dtype=torch.float32, seed=1)
    assert exp(x, u).dtype == torch.float32
    assert exp(x, u.double()).dtype == torch.float64
    assert torch.equal(exp(x, u), exp(x.float(), u))


def test_half_precision_squares_do_not_overflow():
    x = torch.full((1, 4), 300.0, dtype=torch.float16)
    u = torch.tensor([[300.0, -300.0, 300.0, -300.0]], dtype=torch.float16) * (math.pi / 2)
    # A quarter turn: u/‖u‖ · ‖x‖, to half an eps of float16 for u, π/2's own rounding and the result.
    expected = torch.tensor([[300.0, -300.0, 300.0, -300.0]])
    torch.testing.assert_close(exp(x, u).float(), expected, rtol=2 * eps(torch.float16), atol=0)


@pytest.mark.parametrize("power", [-100, 100])
def test_huge_and_tiny_radii_only_move_the_exponent(power):
    def run(scale):
        x, y, u = (v.requires_grad_() for v in vectors(3, 8, 6, dtype=torch.float32))
        sx, su = scale * x.detach(), scale * u.detach()
        sx.requires_grad_()
        su.requires_grad_()
        values = [project(sx, su), exp(sx, su), log(sx, y), transport(sx, y, su), distance(sx, y), norm(sx)]
        slopes = [torch.autograd.grad(v.sum(), (sx, su), allow_unused=True) for v in values]
        return [v.detach() / scale for v in values], [s for pair in slopes for s in pair if s is not None]

    # A power of two (1.3e±30) scales without rounding, so every value and gradient must come out bit for bit.
    scaled, plain = run(2.0**power), run(1.0)
    for ours, expected in zip(scaled[0] + scaled[1], plain[0] + plain[1], strict=True):
        assert expected.isfinite().all()
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("radius", [1e-30, 1e30])
def test_scale_law_at_radii_whose_squares_leave_float32(radius):
    x, y, u = vectors(3, 8, 6, dtype=torch.float32)
    tight = {"rtol": 0, "atol": 3 * norm(x).max().item() * rounding(6, torch.float32)}
    torch.testing.assert_close(exp(radius * x, radius * u) / radius, exp(x, u), **tight)
    torch.testing.assert_close(log(radius * x, y / radius) / radius, log(x, y), **tight)
    torch.testing.assert_close(angle(radius * x, y / radius), angle(x, y), **tight)


def test_width_one_is_two_points():
    x = torch.tensor([[2.0], [-3.0]])
    y, u = torch.tensor([[5.0], [5.0]]), torch.tensor([[4.0], [0.1]])
    assert torch.equal(exp(x, u), x)
    assert torch.equal(angle(x, y), torch.tensor([0.0, math.pi]))
    assert torch.equal(distance(x, y), torch.tensor([0.0, 3 * math.pi]))
    for tangent in (project(x, u), log(x, y), transport(x, y, u)):
        assert torch.equal(tangent, torch.zeros(2, 1))
    grads = torch.autograd.functional.jacobian(lambda p, q: log(p, q).sum() + transport(p, q, u).sum(), (x, y))
    assert not any(g.any() for g in grads)


def test_width_two_turns_by_the_angle():
    x = gaussian(20, 2)
    theta = 6 * torch.rand(20, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    left = torch.stack([-x[:, 1], x[:, 0]], -1)
    turned = theta.cos() * x + theta.sin() * left
    close = {"rtol": 0, "atol": 7 * norm(x).max().item() * rounding(2, torch.float64)}
    torch.testing.assert_close(exp(x, theta * left), turned, **close)
    # In the plane transport turns tangents with the point, the short way round.
    torch.testing.assert_close(transport(x, turned, left), theta.cos() * left - theta.sin() * x, **close)


@pytest.mark.parametrize(("function", "count"), FUNCTIONS)
def test_empty_batches_broadcasting_and_strides(function, count):
    shapes = ((3, 1, 4), (2, 4), (3, 2, 4))[:count]
    arguments = [gaussian(*shape, seed=k) for k, shape in enumerate(shapes)]
    lead = torch.broadcast_shapes(*(shape[:-1] for shape in shapes))
    full = [v.expand(*lead, 4).contiguous() for v in arguments]
    expected = function(*full)
    assert expected.shape[:2] == lead
    torch.testing.assert_close(function(*arguments), expected, rtol=0, atol=0)
    strided = [v.transpose(0, -1).contiguous().transpose(0, -1) for v in full]
    assert count == 1 or not strided[0].is_contiguous()
    # Strides may reorder a sum of four: two roundings of the inner products, within one `rounding`.
    torch.testing.assert_close(function(*strided), expected, rtol=0, atol=10 * rounding(4, torch.float64))
    empty = function(*(v[:0].requires_grad_() for v in full))
    assert empty.shape == (0, *expected.shape[1:])
    empty.sum().backward()


@pytest.mark.parametrize(("function", "count"), FUNCTIONS)
def test_shapes_are_inferred_on_the_meta_device(function, count):
    arguments = [torch.empty(3, 5, device="meta") for _ in range(count)]
    assert function(*arguments).shape == function(*vectors(count, 3, 5)).shape
