"""The symmetric case: the full system to 1e-8 for every law, scipy on the printed equation, and the tails."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from normlab.dynamics.system import laws
from normlab.dynamics.system.equiangular import Equiangular
from normlab.errors import NormLabError
from tests.dynamics.particles import flow, follow, start
from tests.matrix import parametrize

EVERY = laws.law_names()


def _times(*times: float) -> torch.Tensor:
    return torch.tensor(times, dtype=torch.float64)


@parametrize("kind", ["softmax", "unnormalised"], quick=["softmax"])
@parametrize("spec", EVERY, quick=["pre", "mix", "ngpt", "none"])
def test_the_full_system_stays_symmetric_and_follows_it(spec, kind):
    n, beta, radius = 6, 1.5, 1.2
    # Unnormalised attention that reads the state explodes in finite time: at 0.117 without a norm.
    times = [0.05, 0.1] if laws.find_law(spec, 4).reads_state else [1.0, 2.5]
    states = follow(flow(spec, beta, kind=kind), start(torch.eye(n, n + 2, dtype=torch.float64), radius), *times)
    expected = Equiangular(laws.find_law(spec, 4), n, beta, kind).orbit(_times(*times), radius=radius)
    for state, (rho, r) in zip(states, expected, strict=True):
        cosines = (state.theta[0] @ state.theta[0].mT)[~torch.eye(n, dtype=torch.bool)]
        torch.testing.assert_close(cosines, rho.expand_as(cosines), rtol=0, atol=1e-8)
        torch.testing.assert_close(state.radius[0], r.expand(n), rtol=1e-8, atol=0)


@pytest.mark.parametrize("spec", EVERY)
def test_a_law_sees_the_same_in_both(spec):
    """‖A‖, ⟨θ,A⟩, ‖P A‖ of the closed forms against those of tokens at a common cosine."""
    n, rho = 5, 0.3
    gram = (1 - rho) * torch.eye(n, dtype=torch.float64) + rho
    seen: dict = {}
    law = laws.find_law(spec, 4)

    def keep(motion):
        seen["motion"] = motion
        return law.speed(motion)

    system = flow(dataclasses.replace(law, speed=keep), 2.0)
    system(start(torch.linalg.cholesky(gram), 1.3))
    full = seen["motion"]
    one = torch.ones((), dtype=torch.float64)
    closed = Equiangular(law, n, 2.0).motion(0 * one, rho * one, 1.3 * one)
    for name in ("attention", "radial", "tangent"):
        torch.testing.assert_close(getattr(full, name)[0], getattr(closed, name).expand(n), rtol=1e-12, atol=0)


@parametrize("n", [2, 32], quick=[32])
@pytest.mark.parametrize("beta", [0.1, 5.0])
def test_scipy_on_the_printed_equations(n, beta):
    def weights(rho):
        z = np.exp(beta) + (n - 1) * np.exp(beta * rho)
        size = math.sqrt(
            np.exp(2 * beta)
            + 2 * (n - 1) * rho * np.exp(beta * (1 + rho))
            + (n - 1) * (1 + (n - 2) * rho) * np.exp(2 * beta * rho)
        )
        turn = 2 * np.exp(beta * rho) * (1 - rho) * (1 + (n - 1) * rho) / z
        return turn, size / z, (np.exp(beta) + (n - 1) * rho * np.exp(beta * rho)) / z

    def peri(t, y):
        turn, size, radial = weights(y[0])
        return [turn / (y[1] * size), radial / size]

    def pre(t, y):
        turn, _, radial = weights(y[0])
        return [turn / y[1], radial]

    for spec, slope in (("peri", peri), ("pre", pre)):
        expected = solve_ivp(slope, (0, 20.0), [0.0, 1.5], method="DOP853", rtol=1e-12, atol=1e-13).y[:, -1]
        found = Equiangular(laws.find_law(spec, 4), n, beta).orbit(_times(20.0), radius=1.5)[0]
        torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-9, atol=1e-9)


def _plain(t: float) -> float:
    return t


def _root(t: float) -> float:
    return math.sqrt(t + 1)


@parametrize(
    ("spec", "clock", "rate", "end"),
    [
        ("post", _plain, -2.0, 15.0),
        ("ngpt(alpha=1.0)", _plain, -2.0, 15.0),
        ("ngpt", _plain, -0.1, 300.0),
        ("pre", math.log, -2.0, 1e7),
        ("mix", math.log, -2.0, 1e7),
        ("peri", math.log, -2.0, 1e7),
        ("sqrt", _root, -4.0, 100.0),
        # Ours: clocks slowed by α = 8^(1/4), by 2 and by 2L = 8; a decaying step; a small one.
        ("deepnorm", _plain, -2.0 / 8**0.25, 20.0),
        ("spannorm", _plain, -1.0, 30.0),
        ("keel", _plain, -2.0 / 8, 120.0),
        ("geonorm", math.log1p, -2.0, 1e4),
        ("geonorm(decay='sqrt')", _root, -4.0, 100.0),
        ("pre(step=0.1)", math.log, -2.0, 1e7),
        # r → 2√t, so that s → 2t: half of Pre-Norm's exponent.
        ("lns", math.log, -1.0, 1e10),
    ],
    quick=["post", "pre", "sqrt", "keel", "geonorm"],
)
def test_tails(spec, clock, rate, end):
    one, two = Equiangular(laws.find_law(spec, 4), 16, 1.0).path(_times(end / 2, end), tolerance=1e-9)
    assert float(two.gap - one.gap) / (clock(end) - clock(end / 2)) == pytest.approx(rate, abs=1e-4)


def test_radii_of_the_tail():
    for spec in ("pre", "peri"):
        last = list(Equiangular(laws.find_law(spec, 4), 16, 1.0).path(_times(1e7), tolerance=1e-9))[-1]
        assert float(last.radius) / 1e7 == pytest.approx(1.0, abs=1e-4)


def test_a_cold_tail_keeps_its_digits():
    gap = list(Equiangular(laws.find_law("post", 4), 4, 1.0).path(_times(200.0, 300.0)))
    assert float(gap[1].gap - gap[0].gap) == pytest.approx(-200.0, rel=1e-9)


def test_many_temperatures_are_each_on_their_own():
    betas, times = torch.tensor([0.1, 1.0, 9.0], dtype=torch.float64), _times(0.5, 7.0)
    together = Equiangular(laws.find_law("peri", 4), 12, betas).orbit(times)
    assert together.shape == (2, 2, 3)
    for k, beta in enumerate(betas.tolist()):
        alone = Equiangular(laws.find_law("peri", 4), 12, beta).orbit(times)
        torch.testing.assert_close(together[..., k], alone, rtol=0, atol=1e-9)


def test_looks_on_the_way_change_nothing():
    system = Equiangular(laws.find_law("mix", 4), 12, 2.0)
    one = system.orbit(torch.tensor([5.0]))[-1]
    torch.testing.assert_close(system.orbit(torch.linspace(0.0, 5.0, 200))[-1], one, rtol=0, atol=1e-9)


def test_bad_input_is_told_in_one_line():
    with pytest.raises(NormLabError, match="two tokens to have an angle, got 1"):
        Equiangular(laws.find_law("post", 4), 1, 1.0)
