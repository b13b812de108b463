import math
import warnings
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from normlab import geometry
from normlab.errors import NormLabError
from normlab.geometry import angle, distance, exp, log, norm, project, sinc_sqrt, transport, unit, versine_sqrt

with warnings.catch_warnings():
    # Both call torch.jit.script when imported, which torch deprecates; the second is torch's own, for forward mode.
    warnings.simplefilter("ignore", DeprecationWarning)
    import geoopt
    import torch._decomp.decompositions_for_jvp

SPHERE = geoopt.Sphere()
HALF = (torch.float16, torch.bfloat16)
FULL = (torch.float32, torch.float64)
LENGTHS = (0.0, 1e-12, 1e-6, 0.2, 1.0, math.pi - 1e-3, math.pi, 4.0, 2 * math.pi, 3 * math.pi)
# Each function of vectors with the number of its arguments; distances have no last dimension.
FUNCTIONS = ((norm, 1), (unit, 1), (project, 2), (exp, 2), (angle, 2), (distance, 2), (log, 2), (transport, 3))
POINTS = [(function, count) for function, count in FUNCTIONS if count > 1]


def eps(dtype):
    return torch.finfo(dtype).eps


def rounding(width, dtype):
    # Relative error of one function's answer. An inner product of `width` terms costs at most log2(width)/2 + 1 eps
    # with pairwise sums; two norms and a projection enter each function, and about four more roundings follow.
    return (3 * (math.log2(width) / 2 + 1) + 4) * eps(dtype)


def gaussian(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def vectors(count, *shape, seed=0, dtype=torch.float64):
    return [gaussian(*shape, seed=1000 * seed + k, dtype=dtype) for k in range(count)]


def frame(width, seed=0, dtype=torch.float64):
    """Three orthonormal vectors: a point a, a direction d, and e orthogonal to both."""
    q, _ = torch.linalg.qr(gaussian(width, 3, seed=seed))
    return q.to(dtype).T.contiguous().unbind(0)


def along(function, at, direction):
    """Directional derivative by reverse mode (all the rows of the Jacobian)."""
    return torch.autograd.functional.jacobian(function, at) @ direction


# Oracles: the formulas of geomstats' Hypersphere, transcribed for unit points and tangent vectors.


def geomstats_exp(x, u):
    theta = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
    return theta.cos() * x + theta.sin() / theta * u


def geomstats_log(x, y):
    theta = (x * y).sum(-1, keepdim=True).clamp(-1, 1).acos()
    return theta / theta.sin() * y - theta / theta.tan() * x


def geomstats_transport(x, direction, u):
    theta = torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
    heading = direction / theta
    part = (heading * u).sum(-1, keepdim=True)
    return u - part * heading + part * (theta.cos() * heading - theta.sin() * x)


# Smooth functions of t


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


# exp


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


# angle, distance, log


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


# Properties


seeds = st.integers(0, 2**20)
widths = st.integers(1, 40)
scales = st.floats(-12, 12).map(lambda power: 10.0**power)
lengths = st.one_of(st.just(0.0), st.floats(-14, 1.2).map(lambda power: 10.0**power))
# Reproducible in CI, and no example database beside the tests.
prop = settings(derandomize=True, database=None, deadline=None, max_examples=60)


def close_relative(actual, expected, width, factor=1.0):
    size = max(norm(expected).max().item(), 1e-300)
    atol = factor * size * rounding(width, expected.dtype)
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@prop
@given(seeds, widths, scales, lengths, st.sampled_from(FULL))
def test_exp_preserves_the_norm(seed, width, radius, length, dtype):
    x, u = vectors(2, 3, width, seed=seed, dtype=dtype)
    x, u = radius * unit(x), radius * length * unit(u)
    close_relative(norm(exp(x, u)), norm(x), width)


@prop
@given(seeds, widths, scales, lengths)
def test_scale_law(seed, width, scale, length):
    x, u = vectors(2, 3, width, seed=seed)
    x, u = unit(x), length * unit(u)
    # Rounding ρx and ρu moves the angle by eps of itself; both sides carry exp's own error.
    close_relative(exp(scale * x, scale * u), scale * exp(x, u), width, factor=2 * (1 + length))


@prop
@given(seeds, st.integers(2, 12), lengths)
def test_rotation_equivariance(seed, width, length):
    x, y, u = vectors(3, 3, width, seed=seed)
    rotation, _ = torch.linalg.qr(gaussian(width, width, seed=seed))
    assume(angle(x, y).max() < 3)  # the antipodal axis is a choice of coordinates; 1/sin 3 = 7 multiplies errors below
    x, u = 2 * unit(x), 2 * length * unit(u)
    rx, ry, ru = x @ rotation.T, y @ rotation.T, u @ rotation.T
    # A rotation costs each vector one inner product's rounding, before and after.
    close_relative(exp(rx, ru), exp(x, u) @ rotation.T, width, factor=3 * (1 + length))
    close_relative(log(rx, ry), log(x, y) @ rotation.T, width, factor=3 * 7)
    torch.testing.assert_close(
        project(rx, ru), project(x, u) @ rotation.T, rtol=0, atol=3 * 2 * length * rounding(width, u.dtype)
    )
    torch.testing.assert_close(
        transport(rx, ry, ru),
        transport(x, y, u) @ rotation.T,
        rtol=0,
        atol=3 * 7 * 2 * length * rounding(width, u.dtype),
    )
    torch.testing.assert_close(angle(rx, ry), angle(x, y), rtol=0, atol=3 * rounding(width, u.dtype))


@prop
@given(seeds, st.integers(2, 40), scales)
def test_exp_and_log_undo_each_other(seed, width, radius):
    x, y = vectors(2, 3, width, seed=seed)
    x = radius * unit(x)
    assume(angle(x, y).max() < 3)
    # log knows the heading to eps/sin θ, at most 7 eps here; exp adds its own error at an angle below π.
    close_relative(exp(x, log(x, y)), norm(x) * unit(y), width, factor=7 + 1 + math.pi)
    u = 3 / (1 + norm(y)) * radius * project(x, y)  # shorter than 3 radii
    close_relative(log(x, exp(x, u)), u, width, factor=7 * (1 + math.pi) * max(1.0, radius / norm(u).max().item()))


@prop
@given(seeds, st.integers(2, 40))
def test_transport_is_an_isometry_onto_the_tangents_at_y_and_undoes_itself(seed, width):
    x, y, u = vectors(3, 3, width, seed=seed)
    assume(angle(x, y).max() < 3)
    v = project(x, u)
    there = transport(x, y, u)
    close_relative(norm(there), norm(v), width, factor=2)
    # The mirror a + b is known to eps/‖a + b‖, at most 7 eps here, and acts twice.
    close_relative(project(y, there), there, width, factor=14)
    close_relative(transport(y, x, there), v, width, factor=28)


@prop
@given(seeds, st.integers(2, 12), st.floats(1e-9, 3.0))
def test_transport_carries_the_velocity_of_the_geodesic(seed, width, length):
    x, u = vectors(2, width, seed=seed)
    x = 2 * unit(x)
    u = 2 * length * unit(project(x, u))
    s = torch.ones((), dtype=torch.float64)
    y, velocity = torch.func.jvp(lambda s: exp(x, s * u), (s,), (s,))
    close_relative(transport(x, y, u), velocity, width, factor=7 * (2 + length))


# Derivatives by every road


@pytest.mark.parametrize(("function", "count"), FUNCTIONS)
def test_gradcheck_and_gradgradcheck(function, count):
    arguments = tuple(v.requires_grad_() for v in vectors(count, 2, 4, seed=3))
    assert gradcheck(function, arguments, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, arguments, check_fwd_over_rev=True)


@pytest.mark.parametrize("function", [project, exp])
def test_gradcheck_and_gradgradcheck_at_zero_tangent(function):
    x = gaussian(2, 4).requires_grad_()
    zero = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(function, (x, zero), check_forward_ad=True)
    assert gradgradcheck(function, (x, zero), check_fwd_over_rev=True)


@pytest.mark.parametrize("function", [log, transport])
def test_gradcheck_and_gradgradcheck_at_equal_points(function):
    x, y, u = (v.requires_grad_() for v in (gaussian(2, 4), 2 * gaussian(2, 4), gaussian(2, 4, seed=1)))
    arguments = (x, y) if function is log else (x, y, u)
    assert gradcheck(function, arguments, check_forward_ad=True)
    assert gradgradcheck(function, arguments, check_fwd_over_rev=True)


def everything(x, y, u):
    return [function(*(x, u) if function in (project, exp) else (x, y, u)[:count]) for function, count in FUNCTIONS]


def special_points(dtype=torch.float64):
    """A generic row, a zero tangent at x = y, an antipode, x = 0, y = 0 and x = y = 0."""
    x, y, u = vectors(3, 6, 4, seed=4, dtype=dtype)
    y[1], u[1] = x[1], 0
    y[2] = -x[2]
    x[3] = y[4] = x[5] = y[5] = 0
    return x, y, u


def test_compiles_to_one_graph_with_the_same_values_and_gradients():
    def run(function):
        arguments = [v.requires_grad_() for v in special_points()]
        values = function(*arguments)
        return [v.detach() for v in values], torch.autograd.grad(sum(v.square().sum() for v in values), arguments)

    torch._dynamo.reset()
    compiled = run(torch.compile(everything, backend="aot_eager", fullgraph=True))
    # The same kernels in the same order up to decompositions, each a rounding; 64 covers the longest chain of them.
    torch.testing.assert_close(compiled, run(everything), rtol=64 * eps(torch.float64), atol=64 * eps(torch.float64))


def test_vmap_gives_what_the_batch_gives():
    arguments = special_points()
    for mapped, batched in zip(torch.func.vmap(everything)(*arguments), everything(*arguments), strict=True):
        # Reductions over the same four numbers: any order of them costs two roundings.
        torch.testing.assert_close(mapped, batched, rtol=32 * eps(torch.float64), atol=32 * eps(torch.float64))


def test_forward_mode_gives_what_reverse_mode_gives():
    arguments, tangents = special_points(), tuple(vectors(3, 6, 4, seed=6))
    values, forward = torch.func.jvp(everything, arguments, tangents)
    leaves = [v.requires_grad_() for v in special_points()]
    for k, value in enumerate(everything(*leaves)):
        assert torch.equal(value, values[k])
        weight = gaussian(*value.shape, seed=k)
        slopes = torch.autograd.grad((weight * value).sum(), leaves, allow_unused=True)
        pulled = sum((s * t).sum() for s, t in zip(slopes, tangents, strict=True) if s is not None)
        pushed = (weight * forward[k]).sum()
        # Two sums of 24 products of order ten, each entry with the rounding of its function.
        torch.testing.assert_close(pushed, pulled, rtol=0, atol=240 * rounding(4, torch.float64))


# Precision, sizes and shapes


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


# Missing spheres and bad input


def test_choices_at_zero():
    zero, y, u = torch.zeros(5), gaussian(5, dtype=torch.float32), gaussian(5, seed=1, dtype=torch.float32)
    assert torch.equal(project(zero, u), u)
    assert torch.equal(exp(zero, 1e30 * u), zero)
    assert torch.equal(log(zero, y), zero)
    assert torch.equal(log(y, zero), zero)
    assert distance(zero, y) == angle(zero, y) == angle(y, zero) == angle(zero, zero) == 0
    assert torch.equal(transport(zero, zero, u), u)
    for moved in (transport(zero, y, u), transport(y, zero, u)):
        torch.testing.assert_close(moved, project(y, u), rtol=0, atol=4 * rounding(5, torch.float32))


@pytest.mark.parametrize(("function", "count"), POINTS)
@pytest.mark.parametrize("zeros", [(True, False), (False, True), (True, True)])
def test_gradients_and_second_derivatives_are_finite_at_zero(function, count, zeros):
    arguments = [v.requires_grad_() for v in vectors(count, 5, dtype=torch.float32)]
    for argument, is_zero in zip(arguments, zeros, strict=False):
        argument.data *= not is_zero
    slopes = torch.autograd.grad(function(*arguments).sum(), arguments, create_graph=True)
    curvatures = torch.autograd.grad(
        sum((s * (1 + v)).sum() for s, v in zip(slopes, arguments, strict=True)), arguments
    )
    for tensor in (*slopes, *curvatures):
        assert tensor.isfinite().all()


@pytest.mark.parametrize(("function", "count"), FUNCTIONS)
def test_nan_is_passed_on(function, count):
    for k in range(count):
        arguments = vectors(count, 2, 3)
        arguments[k][0, 1] = math.nan
        answer = function(*arguments)
        assert answer[0].isnan().any()
        assert answer[1].isfinite().all()


def test_arguments_may_be_named():
    x, y, u = vectors(3, 4)
    assert torch.equal(transport(x, u=u, y=y), transport(x, y, u))


BAD = [
    (lambda: exp(torch.ones(3), torch.ones(4)), "exp: last dimensions must be equal, got shapes (3,) and (4,)"),
    (lambda: project(torch.ones(2, 3), torch.ones(2, 1)), "project: last dimensions must be equal"),
    (lambda: log(torch.ones(3), torch.ones(3, dtype=torch.int64)), "log: expected floating point"),
    (lambda: unit(torch.ones(3, dtype=torch.complex64)), "unit: expected floating point"),
    (lambda: sinc_sqrt(torch.ones(3, dtype=torch.int32)), "sinc_sqrt: expected floating point"),
    (lambda: norm(torch.tensor(1.0)), "norm: expected vectors along the last dimension, got shape ()"),
    (lambda: angle(torch.ones(2, 0), torch.ones(2, 0)), "angle: expected vectors along the last dimension"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises(NormLabError) as error:
        call()
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_module_has_no_other_public_functions():
    own = [name for name, value in vars(geometry).items() if getattr(value, "__module__", "") == geometry.__name__]
    public = {name for name in own if not name.startswith("_") and name != "P"}
    assert public == {function.__name__ for function, _ in FUNCTIONS} | {"sinc_sqrt", "versine_sqrt"}
