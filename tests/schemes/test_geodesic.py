"""GeoNorm's step: at x = (2, 0) by hand, how far it turns, and the radius that it keeps (facts 3.0, 5.1, 5.2)."""

import math

import pytest
import torch

from normlab.norms import rms
from normlab.ops import geodesic_step

from .small import EPS64, gaussian, network, pairs, vector

QUARTER = math.pi / 4
SEVEN = 0.5e-7  # numbers in tables have seven decimals
X = vector(2.0, 0.0)


@pytest.mark.parametrize(
    ("g", "decay", "expected"),
    [
        ((1, 1), 1, (1.7551651, 0.9588511)),
        ((-3, 1), 1, (1.7551651, 0.9588511)),
        ((1, 1), 0.5, (1.9378248, 0.4948079)),
        ((0, 10), 1, (1.4142136, 1.4142136)),
        ((0, 10), 0.5, (1.8477591, 0.7653669)),
    ],
)
@pytest.mark.parametrize("second_clamp", [True, False])
@pytest.mark.parametrize("pair", [(None, None), (1.0, 0.0)])
def test_geodesic_step_by_hand(g, decay, expected, second_clamp, pair):
    moved = geodesic_step(X, vector(*g), decay, QUARTER, a=pair[0], b=pair[1], second_clamp=second_clamp)
    torch.testing.assert_close(moved, vector(*expected), rtol=0, atol=SEVEN)


def test_learned_map_by_hand():
    moved = geodesic_step(X, vector(1, 1), 1.0, QUARTER, a=0.5, b=0.1)
    # The guard on b turns it into b·t/√(t² + 1e-6), t = 0.5: smaller by 2e-7, which moves a point at radius 2 by 4e-7.
    torch.testing.assert_close(moved, vector(1.8787454, 0.6857956), rtol=0, atol=SEVEN + 4e-7)


def test_second_clamp_on_and_off_by_hand():
    on = geodesic_step(X, vector(1, 1), 1.0, QUARTER, a=2.0, b=0.0)
    off = geodesic_step(X, vector(1, 1), 1.0, QUARTER, a=2.0, b=0.0, second_clamp=False)
    torch.testing.assert_close(on, vector(1.4142136, 1.4142136), rtol=0, atol=SEVEN)
    torch.testing.assert_close(off, vector(1.0806046, 1.6829420), rtol=0, atol=SEVEN)


@pytest.mark.parametrize(
    ("g", "decay", "angle"),
    [
        ((1, 1), 1, 0.5),  # below the clamp the two orders agree
        ((1, 1), 0.5, 0.25),
        ((0, 10), 1, QUARTER),  # and without decay
        ((0, 10), 0.5, QUARTER),  # 2.5 is clamped, where the other order turns by half the clamp
        ((0, 10), 0.1, 0.5),  # and here nothing is clamped
    ],
)
def test_decay_first_by_hand(g, decay, angle):
    moved = geodesic_step(X, vector(*g), decay, QUARTER, order="decay-first")
    expected = vector(2 * math.cos(angle), 2 * math.sin(angle))
    torch.testing.assert_close(moved, expected, rtol=0, atol=8 * EPS64)


@pytest.mark.parametrize(
    ("g", "a", "b", "second", "angle"),
    [
        ((0, 10), 0.5, 0.1, True, 0.5 * QUARTER + 0.1),  # neither a nor b is decayed
        ((0, 1), 2.0, 0.0, True, 0.5),
        ((0, 10), 2.0, 0.0, True, QUARTER),
        ((0, 10), 2.0, 0.0, False, 2 * QUARTER),
    ],
)
def test_the_learned_map_acts_behind_the_clamp(g, a, b, second, angle):
    moved = geodesic_step(X, vector(*g), 0.5, QUARTER, a=a, b=b, second_clamp=second, order="decay-first")
    # b is smaller than it says by b/(2t²)·1e-6, t = 5 here: 2e-9, at a radius of 2.
    torch.testing.assert_close(moved, vector(2 * math.cos(angle), 2 * math.sin(angle)), rtol=0, atol=5e-9)


@pytest.mark.parametrize("order", ["clamp-first", "decay-first"])
@pytest.mark.parametrize("t", [1e-5, 1e-3, 0.1])
def test_the_offset_fades_in(t, order):
    """b·t/√(t² + 1e-6): a tenth of a percent of b at t = 1e-6, 71 % at 1e-3, all of it far above."""
    moved = geodesic_step(X, vector(0, 2 * t), 0.5, QUARTER, a=1.0, b=0.1, order=order)
    offset = 0.1 * t / math.sqrt(t**2 + 1e-6)
    angle = 0.5 * (t + offset) if order == "clamp-first" else 0.5 * t + offset
    assert math.atan2(float(moved[1]), float(moved[0])) == pytest.approx(angle, rel=1e-13)


@pytest.mark.parametrize("g", [(0, 0), (3, 0), (-3, 0)])
@pytest.mark.parametrize("decay", [1.0, 0.5, 1 / 12])
@pytest.mark.parametrize("pair", [(None, None), (1.0, 0.0)])
def test_update_without_tangent_part_stays_and_still_learns(g, decay, pair):
    update, upstream = vector(*g).requires_grad_(), vector(0.7, -1.3)
    moved = geodesic_step(X, update, decay, QUARTER, a=pair[0], b=pair[1])
    torch.testing.assert_close(moved, X, rtol=0, atol=0)
    (gradient,) = torch.autograd.grad((moved * upstream).sum(), update)
    torch.testing.assert_close(gradient, decay * vector(0.0, -1.3), rtol=2 * EPS64, atol=0)


@pytest.mark.parametrize(
    ("decay", "at_12", "at_24"),
    [("harmonic", 4.87, 5.93), ("sqrt", 8.81, 13.26), ("linear", 10.21, 19.63), ("none", 18.85, 37.70)],
)
def test_greatest_total_rotation(decay, at_12, at_24):
    for depth, expected in ((12, at_12), (24, at_24)):
        net = network("geonorm", depth, 8, decay=decay, final_norm=False)
        total = 0.0
        for block in net.blocks:
            for step in block.steps:
                x = gaussian(8, seed=1)
                moved = step(x, lambda x: 1e6 * gaussian(8, seed=2))
                total += math.acos(float(x @ moved / (x.norm() * moved.norm())))
        assert total == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("size", [1e-3, 0.1, 10.0])
def test_geonorm_keeps_the_radius_and_turns_by_theta(size):
    x = gaussian(64, 16)
    g = size * gaussian(64, 16, seed=1)
    for factor in (1.0, 0.3):
        moved = geodesic_step(x, g, factor, QUARTER)
        tangent = g - (x * g).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True) * x
        theta = factor * (tangent.norm(dim=-1) / x.norm(dim=-1)).clamp_max(QUARTER)
        # Norms of 16 terms on both sides and a sum of two products: a dozen roundings.
        torch.testing.assert_close(moved.norm(dim=-1), x.norm(dim=-1), rtol=12 * EPS64, atol=0)
        # atan2 of the two components, accurate at small angles where acos is not.
        along = (moved * x).sum(-1) / x.norm(dim=-1)
        across = (moved * tangent).sum(-1) / tangent.norm(dim=-1)
        # Roundings of x' are relative to its radius, so the angle is known to a few eps and no better.
        torch.testing.assert_close(torch.atan2(across, along), theta, rtol=0, atol=16 * EPS64)


def test_geonorm_keeps_the_radius_over_many_blocks():
    net, x = network("geonorm(decay='none')", 64, 8), gaussian(5, 8)
    state = net.entry(x)
    torch.testing.assert_close(
        state.norm(dim=-1), torch.full((5,), math.sqrt(8), dtype=x.dtype), rtol=4 * EPS64, atol=0
    )
    for block, pair in zip(net.blocks, pairs(64, 8), strict=True):
        state = block(state, pair)
    # 128 steps, a few roundings each, all of them relative.
    torch.testing.assert_close(rms(state), torch.ones_like(rms(state)), rtol=128 * 8 * EPS64, atol=0)
