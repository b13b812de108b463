"""Clocks: inverses, rates, and the identity of orbits under a change of time."""

from __future__ import annotations

import math

import pytest
import torch

from normlab.dynamics.system import laws
from normlab.dynamics.system.clocks import CommonSpeedClock, LogClock, PlainClock
from normlab.dynamics.system.integrators import DormandPrince, RungeKutta4
from normlab.errors import NormLabError
from normlab.schemes.contract.law import Law, on_sphere
from tests.dynamics.particles import flow, follow, uniform
from tests.matrix import parametrize

COMMON = ["post", "sqrt", "deepnorm", "spannorm", "dual", "hybrid", "geonorm(max_angle=3.0)"]


def _clocks():
    yield PlainClock()
    yield LogClock()
    yield LogClock(unit=0.1)
    for spec in COMMON:
        yield CommonSpeedClock(laws.find_law(spec, 4), 1e4)


@pytest.mark.parametrize("clock", list(_clocks()), ids=lambda clock: type(clock).__name__)
def test_time_and_tau_are_inverse_and_the_rate_is_the_slope(clock):
    for time in (0.0, 1e-3, 0.7, 31.0, 9e3):
        tau = torch.tensor([clock.tau(time)], dtype=torch.float64)
        assert float(clock.time(tau)) == pytest.approx(time, rel=1e-9, abs=1e-12)
        h = 1e-5 * (1 + tau)
        slope = (clock.time(tau + h) - clock.time((tau - h).clamp_min(0))) / (tau + h - (tau - h).clamp_min(0))
        # A one-sided difference at zero is off by h.
        torch.testing.assert_close(clock.rate(tau), slope, rtol=1e-4 if time == 0 else 1e-6, atol=0)


def test_the_clock_of_sqrt_is_its_closed_form():
    clock = CommonSpeedClock(laws.find_law("sqrt", 4), 1e6)
    for time in (0.5, 1e3, 1e6):
        assert clock.tau(time) == pytest.approx(2 * (math.sqrt(time + 1) - 1), rel=1e-12)


@parametrize(
    "spec", ["sqrt", "deepnorm", "spannorm", "geonorm(max_angle=3.0)"], quick=["sqrt", "geonorm(max_angle=3.0)"]
)
def test_a_common_speed_is_post_norm_on_another_clock(spec):
    """The orbits coincide: at time t this law is where Post-Norm is at τ(t)."""
    begin, times = uniform(8, 3), [0.5, 3.0, 9.0]
    clock = CommonSpeedClock(laws.find_law(spec, 4), 9.0)
    here = follow(flow(spec, 2.0), begin, *times)
    there = follow(flow("post", 2.0), begin, *(clock.tau(time) for time in times))
    for state, other in zip(here, there, strict=True):
        torch.testing.assert_close(state.theta, other.theta, rtol=0, atol=1e-8)


@pytest.mark.parametrize("clock", [LogClock(), LogClock(unit=5.0), CommonSpeedClock(laws.find_law("sqrt", 4), 9.0)])
@parametrize("spec", ["sqrt", "pre", "mix"], quick=["pre"])
def test_the_orbit_is_the_same_in_every_clock(spec, clock):
    begin, system = uniform(8, 3), flow(spec, 2.0)
    plain = follow(system, begin, 9.0)[0]
    other = list(DormandPrince(tolerance=1e-11, clock=clock).orbit(system, begin, [0.4, 9.0]))[-1]
    torch.testing.assert_close(other.theta, plain.theta, rtol=0, atol=1e-8)
    torch.testing.assert_close(other.radius, plain.radius, rtol=1e-8, atol=0)


def test_far_horizons_cost_few_steps():
    begin, system = uniform(4, 3), flow("pre", 1.4)
    end = next(RungeKutta4(step=0.1, clock=LogClock()).orbit(system, begin, [1e6]))
    assert float((end.radius / 1e6 - 1).abs().max()) < 1e-3


@pytest.mark.parametrize("spec", ["pre", "peri", "ngpt", "geonorm", "output", "lns", "mix"])
def test_speeds_of_tokens_own_have_no_common_clock(spec):
    with pytest.raises(NormLabError, match="no change of time makes it Post-Norm"):
        CommonSpeedClock(laws.find_law(spec, 4), 10.0)


def test_bad_clocks_are_told_in_one_line():
    cooling = Law(
        speed=lambda m: torch.ones_like(m.radius), temperature=lambda t: 1 / (1 + t), rms=on_sphere, forward="bounded",
        backward="",
    )  # fmt: skip
    for make in (
        lambda: CommonSpeedClock(cooling, 10.0),
        lambda: CommonSpeedClock(laws.find_law("post", 4), -1.0),
        lambda: LogClock(0.0),
    ):
        with pytest.raises(NormLabError) as caught:
            make()
        assert "\n" not in str(caught.value)


def test_a_clamp_that_long_outputs_reach_makes_the_speed_one_of_each_token():
    law = laws.find_law("geonorm(max_angle=3.0)", 4)
    CommonSpeedClock(law, 10.0, 3.0)
    with pytest.raises(NormLabError, match="no change of time makes it Post-Norm"):
        CommonSpeedClock(law, 10.0, 3.1)
