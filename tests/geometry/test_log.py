"""angle, distance, log and transport: at every angle, at both ends, across the antipode."""

import math

import pytest
import torch

from normlab.geometry import angle, distance, exp, log, norm, project, transport, unit
from tests.geometry.oracles import SPHERE, geomstats_exp, geomstats_log, geomstats_transport
from tests.geometry.points import FULL, HALF, along, eps, frame, gaussian, rounding, vectors


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("theta", [1e-12, 1e-8, 1e-4, 1e-3, 0.1, 1.0, 3.0, math.pi - 1e-4])
def test_angle_has_an_error_of_eps_at_every_angle(theta, dtype):
    width = 8
    a, d, _ = frame(width)
    x, y = (3 * a).to(dtype), (7 * (math.cos(theta) * a + math.sin(theta) * d)).to(dtype)
    # Absolute, so eps/θ relative: x and y are rounded before any formula sees them (geoopt: 0.014 at x = y in fp32).
    assert angle(x, y).item() == pytest.approx(theta, rel=0, abs=rounding(width, dtype))
    assert distance(x, y).item() == pytest.approx(3 * theta, rel=0, abs=4 * rounding(width, dtype))


@pytest.mark.parametrize("dtype", HALF + FULL)
def test_angle_is_exact_at_both_ends(dtype):
    x = gaussian(20, 9, dtype=dtype)
    assert not distance(x, x).any()
    assert torch.equal(angle(x, -x), torch.full((20,), math.pi, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("function", [angle, distance])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gradient_of_angle_is_zero_at_both_ends(function, sign):
    x = gaussian(3, 4)
    slope = torch.autograd.functional.jacobian(lambda y: function(x, y), sign * x)
    assert not slope.any()


def test_log_and_distance_agree_with_geoopt_and_geomstats_away_from_the_ends():
    x, y = (unit(v) for v in vectors(2, 50, 6))
    keep = ((x * y).sum(-1).abs() < 0.9).nonzero().squeeze(-1)
    x, y = x[keep], y[keep]
    assert len(keep) > 30
    torch.testing.assert_close(log(x, y), SPHERE.logmap(x, y), rtol=0, atol=1e-12)
    torch.testing.assert_close(log(x, y), geomstats_log(x, y), rtol=0, atol=1e-12)
    torch.testing.assert_close(distance(x, y), SPHERE.dist(x, y), rtol=0, atol=1e-12)
    u = project(x, y)
    torch.testing.assert_close(exp(x, u), geomstats_exp(x, u), rtol=0, atol=1e-12)
    u, v = log(x, y), project(x, gaussian(*x.shape, seed=5))
    torch.testing.assert_close(transport(x, y, v), geomstats_transport(x, u, v), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("theta", [0.0, 1e-12, 1e-6, 0.2, 0.2004, 1.0, math.pi - 1e-3, math.pi - 1e-6])
def test_log_and_its_jacobian_follow_the_closed_form(theta, dtype):
    if dtype == torch.float32 and theta == math.pi - 1e-6:
        theta = math.pi - 1e-5  # 1e-6 is within ten eps of the antipode, where a direction has no digit
    radius, width = 2.5, 7
    a, d, e = frame(width)
    y = math.cos(theta) * a + math.sin(theta) * d
    velocity = math.cos(theta) * d - math.sin(theta) * a
    sine = math.sin(theta)
    stretch = theta / sine if theta else 1.0
    x, y, velocity, d, e = (v.to(dtype) for v in (radius * a, y, velocity, d, e))
    # The inputs' eps turns the heading by eps/sin θ near the antipode; a derivative that is itself `stretch` long
    # turns with it.
    turn = rounding(width, dtype) / (sine if theta > 1 else 1.0)
    value, slope = log(x, y), along(lambda p: log(x, p), y, torch.stack([velocity, e], -1))
    torch.testing.assert_close(value, radius * theta * d, rtol=0, atol=radius * math.pi * turn)
    expected = radius * torch.stack([d, stretch * e], -1)
    torch.testing.assert_close(slope, expected, rtol=0, atol=2 * radius * stretch * turn)


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("scale", [1.0, 3.7, 1e-9])
def test_antipode_is_reached_along_the_documented_axis(dtype, scale):
    width = 6
    x = gaussian(30, width, dtype=dtype)
    y = -scale * x
    u = log(x, y)
    axis = torch.nn.functional.one_hot(x.abs().argmin(-1), width).to(dtype)
    expected = math.pi * norm(x) * unit(project(x, axis))
    close = {"rtol": 0, "atol": math.pi * norm(x).max().item() * rounding(width, dtype)}
    torch.testing.assert_close(u, expected, **close)
    torch.testing.assert_close(norm(u), math.pi * norm(x), **close)
    torch.testing.assert_close(exp(x, u), -x, **close)
    # Half a great circle turns the velocity round and leaves what is orthogonal to it.
    torch.testing.assert_close(transport(x, y, u), -u, **close)
    v = project(u, project(x, gaussian(30, width, seed=9, dtype=dtype)))
    torch.testing.assert_close(transport(x, y, v), v, rtol=0, atol=4 * norm(v).max().item() * rounding(width, dtype))


@pytest.mark.parametrize("dtype", HALF + FULL)
@pytest.mark.parametrize("function", [log, transport])
def test_gradients_at_the_antipode_are_finite_and_of_order_one(function, dtype):
    x, y, u = (v.requires_grad_() for v in vectors(3, 5, 4, dtype=dtype))
    opposite = (-x.detach()).requires_grad_()
    arguments = (x, opposite) if function is log else (x, opposite, u)
    weight = y.detach()
    slopes = torch.autograd.grad((weight * function(*arguments)).sum(), arguments)
    # The axis turns by at most 1/sin of its angle to x, √2 here (least aligned of 4, so cos ≤ 1/2), per unit of x̂.
    size = (norm(weight) * (1 + norm(u) + norm(x)) * (1 + 1 / norm(x)) * math.pi * 4).max()
    for slope in slopes:
        assert slope.isfinite().all()
        assert slope.abs().max() <= size
    assert slopes[0].any()


@pytest.mark.parametrize("dtype", FULL)
def test_transport_near_the_antipode_continues_to_it(dtype):
    x = gaussian(6, dtype=torch.float64)
    axis = unit(log(x, -x))
    gap = math.sqrt(eps(dtype))
    near = exp(x, (math.pi - gap) * norm(x) * axis)
    u = gaussian(6, seed=1)
    at, close_by = (transport(x.to(dtype), y.to(dtype), u.to(dtype)) for y in (-x, near))
    # The two endpoints are `gap` apart and eps/gap = gap is the error of a direction known to eps there.
    torch.testing.assert_close(at, close_by, rtol=0, atol=8 * norm(u).item() * gap)
