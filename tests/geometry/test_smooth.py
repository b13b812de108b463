"""Smooth functions of t = θ², and the lengths and directions that the rest is made of."""

import math
from fractions import Fraction

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from normlab.geometry import norm, project, sinc_sqrt, unit, versine_sqrt
from tests.geometry.points import FULL, HALF, eps, gaussian, rounding


def taylor(t, odd, order):
    """Derivative number `order` of Σ (-t)^k / (2k + odd)! in exact arithmetic; 60 terms settle it for t ≤ 100."""
    terms = range(order, 60)
    return float(
        sum(Fraction((-1) ** k * math.perm(k, order), math.factorial(2 * k + odd)) * t ** (k - order) for k in terms)
    )


def cos_sqrt(t):
    return 1 - versine_sqrt(t)


def derivatives(function, t):
    t = t.clone().requires_grad_()
    value = function(t)
    (first,) = torch.autograd.grad(value.sum(), t, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), t)
    return value.detach(), first.detach(), second


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize(("function", "odd"), [(cos_sqrt, 0), (sinc_sqrt, 1)])
def test_smooth_functions_and_two_derivatives_on_both_sides_of_the_switch(function, odd, dtype):
    one = torch.ones((), dtype=dtype)
    below, above = torch.nextafter(one, 0 * one), torch.nextafter(one, 2 * one)
    t = torch.stack([0 * one, *(one * 10.0**-k for k in (24, 12, 4, 2)), one / 2, below, one, above])
    t = torch.cat([t, torch.tensor([1.5, 9.8696, 40.0, 100.0], dtype=dtype)])
    for order, answer in enumerate(derivatives(function, t)):
        expected = torch.tensor([taylor(Fraction(v), odd, order) for v in t.tolist()], dtype=torch.float64)
        # Eight roundings of terms no larger than 1, and the half eps of √t turned into √t/2 eps of phase.
        allowed = (8 + t.double().sqrt() / 2) * eps(dtype)
        assert ((answer.double() - expected).abs() <= allowed).all(), (order, answer.double() - expected)
        assert (answer[6] - answer[7]).abs() <= 8 * eps(dtype)


@pytest.mark.parametrize("function", [cos_sqrt, sinc_sqrt])
def test_derivatives_stay_finite_where_the_unused_series_would_overflow(function):
    for answer in derivatives(function, torch.tensor([0.0, 1e13, 1e38])):
        assert answer.isfinite().all()
        assert answer.abs().max() <= 1


@pytest.mark.parametrize("dtype", HALF)
def test_smooth_functions_round_once_in_half_precision(dtype):
    t = torch.linspace(0, 9, 37).to(dtype)
    root = t[1:].double().sqrt()
    assert torch.equal(sinc_sqrt(t)[1:], (root.sin() / root).float().to(dtype))
    assert sinc_sqrt(t)[0] == 1


@pytest.mark.parametrize("dtype", FULL)
def test_versine_keeps_its_digits_near_zero(dtype):
    t = torch.tensor([1e-30, 1e-12, 1e-6], dtype=dtype)
    # 1 - cos √t = t/2 - t²/24 + t³/720 - ...; three roundings, each half an eps.
    expected = t.double() / 2 - t.double() ** 2 / 24 + t.double() ** 3 / 720
    assert ((versine_sqrt(t).double() - expected).abs() <= 2 * eps(dtype) * expected).all()


def test_smooth_functions_pass_gradgradcheck_and_vmap():
    t = torch.tensor([0.0, 0.3, 0.9, 1.1, 7.0], dtype=torch.float64, requires_grad=True)
    for function in (versine_sqrt, sinc_sqrt):
        # Central differences would step to t < 0 at 0: the series is right there too (cosh).
        assert gradcheck(function, t, check_forward_ad=True)
        assert gradgradcheck(function, t)
        assert torch.equal(torch.func.vmap(function)(t), function(t))


# Lengths and directions


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_norm_and_unit_survive_squares_that_do_not(size, dtype):
    x = torch.tensor([[3.0, -4.0, 12.0]], dtype=dtype) * size
    # Division by the largest, three squares and their sum, a root and a product: six roundings, the input's one more.
    assert norm(x).item() == pytest.approx(13 * size, rel=7 * eps(dtype))
    assert norm(x).shape == (1, 1)
    assert norm(unit(x)).item() == pytest.approx(1, rel=14 * eps(dtype))
    x.requires_grad_()
    (slope,) = torch.autograd.grad(norm(x).sum(), x)
    torch.testing.assert_close(slope * 13, torch.tensor([[3.0, -4.0, 12.0]], dtype=dtype), rtol=14 * eps(dtype), atol=0)


@pytest.mark.parametrize("function", [norm, unit])
def test_zero_vector_has_zero_length_direction_and_gradients(function):
    x = torch.zeros(2, 3, requires_grad=True)
    assert not function(x).any()
    (slope,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum() + (x * x).sum(), x)
    assert not slope.any()
    assert not curvature.any()


def test_project_is_tangent_even_where_u_is_nearly_radial():
    x = gaussian(50, 16, dtype=torch.float32)
    u = 1e6 * x + project(x, gaussian(50, 16, seed=1, dtype=torch.float32))
    p = project(x, u)
    cosine = (unit(x).double() * unit(p).double()).sum(-1)
    # After the second pass only the rounding of p's own size is left: x̂ and p each carry it.
    assert (cosine.abs() <= 2 * rounding(16, torch.float32)).all()
