"""Integrators: their order, the sphere, batches, and the full system against scipy."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

import normlab
from normlab.dynamics.system import laws
from normlab.dynamics.system.attention import ParticleAttention
from normlab.dynamics.system.clocks import LogClock
from normlab.dynamics.system.flow import Flow, ParticleState, length
from normlab.dynamics.system.integrators import DormandPrince, RungeKutta4
from normlab.dynamics.system.weights import RandomWeights, fixed_weights, make_attention
from normlab.errors import NormLabError
from normlab.schemes.contract.law import Law, on_sphere
from tests.dynamics.particles import ORACLES, by_scipy, clustered, flow, follow, start, uniform, variance
from tests.matrix import parametrize


@parametrize("spec", ORACLES, quick=("mix",))
def test_the_full_system_is_what_scipy_says(spec):
    begin, beta, time = uniform(7, 3, radius=1.5), 2.0, 3.0
    theta, radius = by_scipy(ORACLES[spec], begin, beta, time, pauses=(1.0,) if spec == "mix" else ())
    for method in (
        DormandPrince(tolerance=1e-11),
        RungeKutta4(step=0.005),
        DormandPrince(tolerance=1e-11, clock=LogClock()),
    ):
        end = next(method.orbit(flow(spec, beta), begin, [time]))
        torch.testing.assert_close(end.theta[0], torch.from_numpy(theta), rtol=0, atol=2e-9)
        torch.testing.assert_close(end.radius[0], torch.from_numpy(radius), rtol=0, atol=2e-9)


def _orders(method, system: Flow, begin: ParticleState, time: float, sizes: list[float]) -> list[float]:
    exact = follow(system, begin, time, tolerance=1e-13)[0]
    errors = [
        float((next(method(size).orbit(system, begin, [time])).theta - exact.theta).abs().max()) for size in sizes
    ]
    return [math.log2(a / b) for a, b in itertools.pairwise(errors)]


@parametrize("spec", ["post", "pre", "peri", "sqrt"], quick=["pre"])
def test_runge_kutta_is_of_fourth_order(spec):
    orders = _orders(lambda h: RungeKutta4(step=h), flow(spec, 3.0), uniform(12, 4), 4.0, [0.1, 0.05, 0.025])
    assert orders[-1] == pytest.approx(4.0, abs=0.15)


@parametrize("redraw", [False, True], quick=[True])
def test_switches_and_layers_cost_no_order(redraw):
    weights = RandomWeights(matrices="gaussian", dim=4, redraw=redraw, dtype=torch.float64)
    law = normlab.scheme("mix", post_fraction=0.3).law(5)
    assert law.switches == (1.0,)
    system = Flow(law, make_attention(weights, beta=torch.tensor([2.0], dtype=torch.float64)))
    # A horizon inside a layer, and steps that the layers are no multiple of.
    orders = _orders(lambda h: RungeKutta4(step=h), system, uniform(6, 4, radius=2.0), 2.6, [0.1, 0.05, 0.025])
    assert orders[-1] == pytest.approx(4.0, abs=0.3)


def test_the_tolerance_is_kept():
    system, begin = flow("pre", 4.0), uniform(12, 4)
    exact = follow(system, begin, 10.0, tolerance=1e-13)[0].theta
    errors = [
        float((follow(system, begin, 10.0, tolerance=t)[0].theta - exact).abs().max()) for t in (1e-5, 1e-7, 1e-9)
    ]
    # Errors of steps add up, and tokens near a watershed pull them apart by a factor of ten or so.
    assert all(error < 100 * t for error, t in zip(errors, (1e-5, 1e-7, 1e-9), strict=True))
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_stay_on_the_sphere(dtype):
    begin = ParticleState(*(part.to(dtype) for part in uniform(10, 5)))
    attend = ParticleAttention(beta=torch.tensor([3.0], dtype=dtype))
    for method in (RungeKutta4(step=0.5), DormandPrince(tolerance=1e-4)):
        for state in method.orbit(Flow(normlab.scheme("peri").law(8), attend), begin, [1.0, 20.0]):
            assert state.theta.dtype == state.radius.dtype == state.time.dtype == dtype
            # Five squares, a sum, a root and a division.
            assert float((length(state.theta) - 1).abs().max()) <= 4 * torch.finfo(dtype).eps


@parametrize("spec", ["post", "pre", "peri", "mix"], quick=["mix"])
def test_a_batch_takes_steps_of_each_systems_own(spec):
    """Hot and cold systems together, as each of them alone."""
    begin, betas = uniform(6, 3, systems=4), torch.tensor([0.1, 1.0, 5.0, 40.0], dtype=torch.float64)
    law, times = normlab.scheme(spec).law(4), [0.7, 5.0]
    together = follow(Flow(law, ParticleAttention(beta=betas)), begin, *times, tolerance=1e-9)
    for s in range(4):
        one = ParticleState(begin.theta[s : s + 1], begin.radius[s : s + 1], begin.time[s : s + 1])
        alone = follow(Flow(law, ParticleAttention(beta=betas[s : s + 1])), one, *times, tolerance=1e-9)
        for state, other in zip(together, alone, strict=True):
            # The same steps, of which products in a batch round otherwise.
            torch.testing.assert_close(state.theta[s], other.theta[0], rtol=0, atol=1e-10)
            torch.testing.assert_close(state.radius[s], other.radius[0], rtol=1e-10, atol=0)


def test_a_system_at_rest_does_not_hold_the_others_up():
    antipodal = start(torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64))
    begin = ParticleState(*(torch.cat(parts) for parts in zip(antipodal, uniform(2, 2), strict=True)))
    end = follow(flow("peri", 0.0), begin, 3.0)[0]
    assert torch.equal(end.theta[0], antipodal.theta[0])
    assert not torch.equal(end.theta[1], begin.theta[1])


def test_looks_on_the_way_change_nothing():
    system, begin = flow("pre", 3.0), uniform(8, 3)
    one = follow(system, begin, 5.0)[0]
    many = follow(system, begin, *torch.linspace(0.05, 5.0, 100).tolist())[-1]
    torch.testing.assert_close(many.theta, one.theta, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_a_switch_the_limit_from_below_holds(dtype):
    """Pre-Norm's radius must not move before the switch, in any precision."""
    law = normlab.scheme("mix", post_fraction=0.5).law(6)
    begin = ParticleState(*(part.to(dtype) for part in uniform(5, 3, radius=2.0)))
    for method in (RungeKutta4(step=0.25), DormandPrince(tolerance=1e-5)):
        for clock in (method.clock, LogClock()):
            orbit = dataclasses.replace(method, clock=clock).orbit(
                Flow(law, ParticleAttention(beta=torch.ones(1, dtype=dtype))), begin, [3.0, 4.0]
            )
            before, after = orbit
            assert torch.equal(before.radius, begin.radius)
            assert bool((after.radius != begin.radius).all())


@pytest.mark.parametrize("method", [RungeKutta4(step=0.05), DormandPrince(tolerance=1e-6)], ids=["rk4", "dopri"])
def test_a_look_that_rounds_to_the_time_of_a_switch_does_not_skip_it(method):
    """Logarithmic times miss whole layers by a rounding error of double precision, which single precision lacks."""
    begin = ParticleState(*(part.float() for part in clustered(5, 3)))
    system = flow("keel", 1.0)
    system = dataclasses.replace(system, attention=ParticleAttention(beta=torch.ones(1)))
    before, after = method.orbit(system, begin, [math.nextafter(1.0, 0.0), 2.0])
    assert bool((before.radius > 1.4).all())
    assert torch.equal(after.radius, torch.ones_like(after.radius))


def test_keel_puts_radii_back_on_the_sphere_after_its_first_block():
    states = follow(flow("keel", 1.0), clustered(5, 3), 0.999999, 1.0, 2.0)
    assert float(states[0].radius.min()) > 1.9
    assert torch.equal(states[1].radius, torch.ones_like(states[1].radius))
    assert torch.equal(states[2].radius, torch.ones_like(states[2].radius))


@parametrize(
    ("spec", "span", "rate"),
    [
        ("post", lambda t: t, -2.0),
        ("ngpt(alpha=1.0)", lambda t: t, -2.0),
        ("ngpt(alpha=0.5)", lambda t: t, -1.0),
        ("pre", math.log, -2.0),
        ("mix", math.log, -2.0),
        ("peri", math.log, -2.0),
        ("sqrt", lambda t: math.sqrt(t + 1), -4.0),
    ],
    quick=["post", "pre"],
)
def test_tails_of_the_variance(spec, span, rate):
    """From a clustered start, V = 1: exponential, t^−2 and e^−4√t, each within 1e-4 of its rate."""
    grows = span is math.log
    times = (1e5, 1e6) if grows else (4.0, 6.0) if span(4.0) == 4.0 else (10.0, 20.0)
    clock = {"clock": LogClock()} if grows else {}
    # A cluster of 1e-3: what is not linear in it is of order 1e-6.
    one, two = follow(flow(spec, 1.0), clustered(8, 3, 1e-3), *times, tolerance=1e-12, **clock)
    slope = math.log(variance(two) / variance(one)) / (span(times[1]) - span(times[0]))
    assert slope == pytest.approx(rate, abs=1e-4)
    if spec in ("pre", "peri"):
        assert float((two.radius - one.radius).mean()) / 9e5 == pytest.approx(1.0, abs=1e-4)


def test_float32_follows_float64():
    begin = uniform(16, 8)
    fine = follow(flow("peri", 2.0), begin, 3.0)[0]
    coarse = ParticleState(*(part.float() for part in begin))
    system = Flow(normlab.scheme("peri").law(4), ParticleAttention(beta=torch.tensor([2.0])))
    end = next(RungeKutta4(step=0.05).orbit(system, coarse, [3.0]))
    # 60 steps of five roundings each, and what the flow makes of them.
    torch.testing.assert_close(end.theta.double(), fine.theta, rtol=0, atol=60 * 5 * 10 * 6e-8)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RungeKutta4(step=0.0), "a step is positive, got 0.0"),
        (lambda: RungeKutta4(step=math.nan), "a step is positive"),
        (lambda: DormandPrince(tolerance=-1.0), "a tolerance is positive"),
    ],
)
def test_bad_options_are_told_in_one_line(make, said):
    with pytest.raises(NormLabError, match=said):
        make()


@pytest.mark.parametrize("method", [RungeKutta4(step=0.1), DormandPrince(tolerance=1e-6)])
def test_a_law_that_turns_to_nan_ends_the_run(method):
    law = Law(speed=lambda m: (0.5 - m.time).sqrt(), rms=on_sphere, forward="bounded", backward="")
    with pytest.raises(NormLabError, match=r"not finite at time|shrank to nothing") as caught:
        list(method.orbit(Flow(law, ParticleAttention(beta=torch.ones(1, dtype=torch.float64))), uniform(4, 3), [2.0]))
    assert "\n" not in str(caught.value)


def test_a_radius_that_reaches_zero_ends_the_run():
    inwards = -torch.eye(3, dtype=torch.float64).unsqueeze(0)
    system = flow("pre", 1.0, value=inwards)
    with pytest.raises(NormLabError, match="a radius reached zero"):
        list(RungeKutta4(step=0.1).orbit(system, clustered(4, 3, radius=0.5), [2.0]))


def test_too_many_steps_are_not_taken():
    with pytest.raises(NormLabError, match="5 steps did not reach the horizon"):
        follow(flow("post", 5.0), uniform(6, 3), 10.0, most_steps=5)


def test_half_a_unit_of_time_is_a_fine_step():
    """Published simulators take 1000 steps of Euler to be off by 1e-3 here; twenty of these are off by 3e-5."""
    system, begin, times = flow("post", 4.0), uniform(32, 8), [2.0, 4.0, 6.0, 8.0, 10.0]

    def cosines(states) -> torch.Tensor:
        return torch.tensor([float((s.theta[0] @ s.theta[0].mT).mean()) for s in states])

    exact = cosines(follow(system, begin, *times, tolerance=1e-9))
    assert float((cosines(RungeKutta4(step=0.5).orbit(system, begin, times)) - exact).abs().max()) < 1e-4


@pytest.mark.parametrize("scheme", ["post", "pre"])
def test_steps_beyond_stability_are_refused_and_others_are_not(scheme):
    """In logarithmic time steps grow with t: Pre-Norm's rates fall as fast, Post-Norm's do not, and at t = 9 a step of
    0.3, which is 3 layers there, is too long.
    """
    begin, method = uniform(20, 2), RungeKutta4(step=0.3, clock=LogClock())
    orbit = method.orbit(flow(scheme, 30.0), begin, [300.0])
    if scheme == "pre":
        exact = follow(flow(scheme, 30.0), begin, 300.0, tolerance=1e-9)[0]
        torch.testing.assert_close(list(orbit)[-1].theta, exact.theta, rtol=0, atol=0.01)
    else:
        with pytest.raises(NormLabError, match=r"too long for this law at time .* try the method dopri"):
            list(orbit)


def test_tokens_that_have_met_do_not_shake():
    begin = start(torch.ones(10, 4, dtype=torch.float64))
    for state in RungeKutta4(step=0.3, clock=LogClock()).orbit(flow("post"), begin, [1e2, 1e4]):
        assert torch.equal(state.theta, begin.theta)


def test_late_times_do_not_lag_in_float32():
    """V turns a pair by one radian per unit of time. Late times of float32 are 5·10⁻⁴ apart, a step is a third."""
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    attention = make_attention(fixed_weights(value=turn), beta=torch.ones(1), causal=False, kind="softmax")
    begin = ParticleState(torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]), torch.ones(1, 2), torch.zeros(1))
    end = follow(Flow(laws.find_law("post", 1), attention), begin, 5000.0, tolerance=1e-5)[0]
    angle = torch.atan2(end.theta[0, 0, 1], end.theta[0, 0, 0]).double()
    # A step of this size is off by the tolerance at most, and there are 15,000; lagging adds half a radian.
    assert abs(math.remainder(float(angle) - 5000.0, 2 * math.pi)) < 0.05
