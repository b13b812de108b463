"""exp against its closed form and geoopt's, at any angle, and over ten thousand steps."""

import math

import pytest
import torch

from normlab.geometry import distance, exp, norm, project, unit
from tests.geometry.oracles import SPHERE
from tests.geometry.points import FULL, along, eps, frame, gaussian, rounding, vectors

LENGTHS = (0.0, 1e-12, 1e-6, 0.2, 1.0, math.pi - 1e-3, math.pi, 4.0, 2 * math.pi, 3 * math.pi)


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("length", LENGTHS)
def test_exp_and_its_jacobians_follow_the_closed_form_at_any_angle(length, dtype):
    radius, width = 2.5, 7
    a, d, e = frame(width, dtype=dtype)
    x, u = radius * a, radius * length * d
    cos, sin = math.cos(length), math.sin(length)
    sinc = sin / length if length else 1.0
    # The angle is known to a relative `rounding`, so its absolute error grows with the length; so do θ sin θ below.
    allowed = {"rtol": 0, "atol": (1 + length) * radius * rounding(width, dtype)}
    torch.testing.assert_close(exp(x, u), radius * (cos * a + sin * d), **allowed)

    def from_u(direction):
        return along(lambda v: exp(x, v), u, direction)

    def from_x(direction):
        return along(lambda p: exp(p, u), x, direction)

    torch.testing.assert_close(from_u(d), cos * d - sin * a, **allowed)
    torch.testing.assert_close(from_u(e), sinc * e, **allowed)
    torch.testing.assert_close(from_u(a), 0 * a, **allowed)
    torch.testing.assert_close(from_x(e), cos * e, **allowed)
    torch.testing.assert_close(from_x(d), cos * d - sin * a, **allowed)
    radial = (cos + length * sin) * a + (sin - length * cos) * d
    torch.testing.assert_close(from_x(a), radial, **(allowed | {"atol": (1 + length) * allowed["atol"]}))


def test_exp_at_zero_tangent_is_exact():
    x, zero = gaussian(4, 5), torch.zeros(4, 5, dtype=torch.float64)
    assert torch.equal(exp(x, zero), x)


@pytest.mark.parametrize("length", LENGTHS)
def test_distance_to_exp_is_the_length_folded_at_pi(length):
    radius, dtype = 0.3, torch.float64
    a, d, _ = frame(6)
    reached = distance(radius * a, exp(radius * a, radius * length * d)).item()
    folded = abs(math.remainder(length, 2 * math.pi))
    # exp places the point to (1 + length) roundings of the radius; measuring the angle back costs one more.
    assert reached == pytest.approx(radius * folded, rel=0, abs=(2 + length) * radius * rounding(6, dtype))


@pytest.mark.parametrize("length", [0.1, 1.0, 3.0, 5.0])
def test_exp_agrees_with_geoopt_forward_and_backward(length):
    raw, u, weight = vectors(3, 8, 6, seed=1)
    u = length * unit(project(raw, u)) + raw

    def loss(step):
        z, v = raw.clone().requires_grad_(), u.clone().requires_grad_()
        value = step(unit(z), v)
        return value.detach(), *torch.autograd.grad((weight * value).sum(), (z, v))

    # geoopt's formula holds on the unit sphere only, hence unit(z): its gradient is compared along the sphere.
    theirs = loss(lambda x, v: SPHERE.expmap(x, SPHERE.proju(x, v)))
    torch.testing.assert_close(loss(exp), theirs, rtol=1e-12, atol=1e-12)


def test_exp_has_a_gradient_at_zero_tangent_where_geoopt_has_none():
    x = unit(gaussian(5))
    zero = torch.zeros(5, dtype=torch.float64)
    theirs = along(lambda u: SPHERE.expmap(x, SPHERE.proju(x, u)), zero, zero + 1)
    ours = along(lambda u: exp(x, u), zero, zero + 1)
    assert theirs.isnan().all()
    torch.testing.assert_close(ours, project(x, zero + 1), rtol=0, atol=rounding(5, torch.float64))


@pytest.mark.full
@pytest.mark.parametrize("dtype", FULL)
def test_radius_wanders_like_rounding_over_ten_thousand_steps(dtype):
    width, steps = 512, 10_000
    angles = torch.tensor([0.01] * 4 + [1.0] * 4, dtype=torch.float64)
    x = unit(gaussian(8, width, dtype=dtype))
    tangents = (angles[:, None] * unit(gaussian(64, 8, width, seed=1))).to(dtype)
    start = norm(x.double()).squeeze(-1)
    for k in range(steps):
        x = exp(x, tangents[k % 64])
    drift = (norm(x.double()).squeeze(-1) / start - 1).abs()
    # Any radius is a legal one, so nothing pulls it back: a random walk, 4 σ √steps. A rounding has σ ≈ 0.4 eps (two of
    # 0.29); it weighs θ in the common factors of a step and √(Σ x̂⁴) ≈ √(3 / width) per rounding of the elements, of
    # which there are two. Rounding cos itself would be a bias of up to eps/4 a step: 2500 eps.
    allowed = 4 * math.sqrt(steps) * 0.4 * eps(dtype) * (angles + math.sqrt(6 / width))
    assert (drift <= allowed).all(), drift / eps(dtype)


def test_exp_stays_on_the_sphere_for_absurdly_long_tangents():
    x, u = gaussian(4, 5, dtype=torch.float32) * 1e-30, gaussian(4, 5, seed=1, dtype=torch.float32)
    for scale in (1.0, 1e30):
        y = exp(x, scale * u)
        torch.testing.assert_close(norm(y), norm(x), rtol=rounding(5, torch.float32), atol=0)
