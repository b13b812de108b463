"""What holds on every sphere: norms kept, scales and rotations passed through, steps undone."""

import math

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from normlab.geometry import angle, exp, log, norm, project, transport, unit
from tests.geometry.points import FULL, gaussian, rounding, vectors

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
