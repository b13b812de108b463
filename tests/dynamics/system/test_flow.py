"""The flow of every law: initial velocities, symmetries, energy, and the statements that were corrected in print."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import normlab
from normlab.dynamics.system import laws
from normlab.dynamics.system.attention import ParticleAttention
from normlab.dynamics.system.clocks import LogClock, PlainClock
from normlab.dynamics.system.flow import Flow, ParticleState, dot, length, unit
from normlab.dynamics.system.integrators import RungeKutta4
from normlab.dynamics.system.weights import RandomWeights, make_attention
from normlab.errors import NormLabError
from normlab.schemes.contract.law import Law, on_sphere
from tests.dynamics.particles import clustered, flow, follow, start, uniform, variance
from tests.matrix import parametrize, quick_if

EVERY = laws.law_names()
GRADIENTS = [name for name in EVERY if name not in ("lns", "none", "output")]
"""Laws that climb one energy; the β of the others follows the time or the radii."""


def turning(system: Flow, state: ParticleState) -> torch.Tensor:
    """d/dt ⟨θ_j, θ_k⟩ of the first system."""
    half = system(state).theta[0] @ state.theta[0].mT
    return half + half.mT


def test_narrow_and_wide_lengths_are_the_same():
    for d in (1, 2, 8, 9, 50):
        x, y = torch.randn(2, 3, 4, d, dtype=torch.float64)
        torch.testing.assert_close(dot(x, y), (x * y).sum(-1))
        torch.testing.assert_close(length(x), x.square().sum(-1).sqrt())
        torch.testing.assert_close(length(unit(x)), torch.ones(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("beta", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("n", [2, 8])
def test_initial_speeds_from_orthonormal_tokens(n, beta):
    # Facts of arXiv 2510.22026, every row: (1/s_j + 1/s_k)/(e^β + n − 1), with s at time zero.
    radius, e = 2.5, math.exp(beta)
    slow, fast = 2 / (e + n - 1), 2 / math.sqrt(e * e + n - 1)
    expected = {
        "post": slow,
        "mix": slow,
        "sqrt": slow,
        "pre": slow / radius,
        "peri": fast / radius,
        "ngpt": 0.05 * fast,
        "ngpt(alpha=1.0)": fast,
        # Ours.
        "pre(step=0.1)": 0.1 * slow / radius,
        "lns": slow / radius,
        "deepnorm": slow / 8**0.25,
        "spannorm": slow / 2,
        "layerscale": 0.1 * slow / radius,
        "keel": slow / radius,
        "hybrid": slow,
        "dual": slow,
    }
    begin = start(torch.eye(n, n + 1, dtype=torch.float64), radius)
    for spec, speed in expected.items():
        rates = turning(flow(spec, beta), begin)
        apart = ~torch.eye(n, dtype=torch.bool)
        torch.testing.assert_close(rates[apart], torch.full_like(rates[apart], speed), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spec", ["post", "pre", "mix", "peri", "ngpt", "sqrt"])
def test_initial_speeds_are_those_of_the_orbit(spec):
    system, begin = flow(spec, 1.0), start(torch.eye(8, dtype=torch.float64))
    # A forward difference of three points: its error is of second order in 1e-3, times a third derivative of order one.
    rho = [float(dot(s.theta[0, 0], s.theta[0, 1])) for s in follow(system, begin, 1e-3, 2e-3)]
    speed = (4 * rho[0] - rho[1]) / 2e-3
    assert speed == pytest.approx(float(turning(system, begin)[0, 1]), rel=1e-4)


def test_geonorm_below_and_above_its_clamp():
    begin = start(torch.eye(2, dtype=torch.float64))
    rate = turning(flow("post", 0.0), begin)[0, 1]
    # At β = 0 the pull across is 1/2: below π/4, above 0.25.
    assert turning(flow("geonorm", 0.0), begin)[0, 1] == rate
    assert turning(flow("geonorm(max_angle=0.25)", 0.0), begin)[0, 1] == pytest.approx(float(rate) / 2, rel=1e-12)


@pytest.mark.parametrize("spec", EVERY)
def test_rotation_and_order_do_not_matter(spec):
    system, begin = flow(spec, 2.0), uniform(6, 4, radius=1.5)
    turn = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    order = torch.randperm(6)
    moved = ParticleState(begin.theta[:, order] @ turn, begin.radius[:, order], begin.time)
    method = RungeKutta4(step=0.1)
    plain = next(method.orbit(system, begin, [1.5]))
    other = next(method.orbit(system, moved, [1.5]))
    torch.testing.assert_close(other.theta, plain.theta[:, order] @ turn, rtol=0, atol=1e-12)
    torch.testing.assert_close(other.radius, plain.radius[:, order], rtol=1e-12, atol=0)


@pytest.mark.parametrize("spec", EVERY)
def test_velocities_are_tangent_and_identical_tokens_stay_so(spec):
    theta = uniform(5, 3).theta
    begin = start(torch.cat([theta, theta[:, :2]], dim=1), 1.3)
    system = flow(spec, 2.0)
    assert float(dot(system(begin).theta, begin.theta).abs().max()) < 1e-15 * 20
    end = next(RungeKutta4(step=0.1).orbit(system, begin, [1.5]))
    torch.testing.assert_close(end.theta[:, 5:], end.theta[:, :2], rtol=0, atol=1e-14)


@parametrize("spec", GRADIENTS, quick=["pre", "post", "peri", "geonorm", "ngpt"])
@quick_if(lambda spec, weights: weights == "symmetric" or spec == "pre")
@pytest.mark.parametrize("weights", ["identity", "symmetric"])
def test_energy_never_rises(spec, weights):
    """−Σ e^{β⟨θ_j, D θ_k⟩}, for QᵀK = V = D symmetric."""
    law = laws.find_law(spec, 4)
    drawn = RandomWeights(matrices=weights, dim=3, dtype=torch.float64)
    matrix = drawn.layer(0).score
    matrix = torch.eye(3, dtype=torch.float64) if matrix is None else matrix[0]
    system = Flow(law, make_attention(drawn, beta=torch.tensor([2.0], dtype=torch.float64)))
    times = torch.linspace(0.1, 6.0, 60).tolist()
    # A symmetric matrix may pull tokens inwards; radii this large last.
    orbit = RungeKutta4(step=0.05).orbit(system, uniform(7, 3, radius=8.0), times)
    energy = torch.tensor([float(torch.exp(2 * s.theta[0] @ matrix @ s.theta[0].mT).sum()) for s in orbit])
    assert bool((energy.diff() >= -1e-12 * energy[1:]).all())


def test_energy_climbs_at_the_rate_of_the_pull():
    # dE/dt = 2β Σ_j Z_j ‖P A_j‖²/s_j
    beta, state, system = 2.0, uniform(6, 3, radius=2.0), flow("pre", 2.0)
    theta = state.theta[0]
    weights = torch.exp(beta * theta @ theta.mT)
    pull = system.branch_output(state)[0]
    across = pull - dot(pull, theta).unsqueeze(-1) * theta
    expected = 2 * beta * (weights.sum(-1) * across.square().sum(-1) / 2.0).sum()
    found = (weights * beta * turning(system, state)).sum()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("spec", EVERY)
def test_an_antipodal_pair_stands_still(spec):
    begin = start(torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]], dtype=torch.float64))
    for beta in (0.0, 0.03, 2.0):
        velocity = flow(spec, beta)(begin)
        assert not velocity.theta.any()
        # At β = 0 nothing pulls at all: a law that divides by ‖A‖ must not say NaN.
        assert bool(velocity.radius.isfinite().all())


@pytest.mark.parametrize("spec", EVERY)
def test_in_one_dimension_nothing_turns(spec):
    begin = start(torch.tensor([[1.0], [-1.0], [1.0]], dtype=torch.float64), 3.0)
    assert not flow(spec, 1.0)(begin).theta.any()


def test_the_cone_condition_needs_its_correction():
    """δ < 1/(100 n²β²) admits the antipodal pair at small β, which never merges; δ < 1/(100 n²) as well does not."""
    n, beta = 2, 0.03
    pair = start(torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64))
    delta = 2.0
    assert delta < 1 / (100 * n**2 * beta**2)
    assert not flow("post", beta)(pair).theta.any()
    assert not delta < min(1, 1 / beta**2) / (100 * n**2)
    # Inside the corrected cone the variance falls at Post-Norm's rate.
    angle = math.acos(1 - 0.9 * min(1, 1 / beta**2) / (100 * n**2))
    close = start(torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]], dtype=torch.float64))
    before, after = variance(close), variance(follow(flow("post", beta), close, 1.0)[0])
    assert math.log(after / before) == pytest.approx(-2.0, rel=0.01)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_the_rate_of_ngpt_is_alpha_times_the_variance(alpha):
    """And not the variance over α, as the printed table has it."""
    states = follow(flow(f"ngpt(alpha={alpha})"), clustered(6, 3, 0.01), 4.0, 5.0)
    assert math.log(variance(states[1]) / variance(states[0])) == pytest.approx(-2 * alpha, abs=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 12), st.integers(2, 5), st.floats(0.0, 1.5), st.integers(0, 10**6))
def test_few_tokens_are_never_pulled_inwards(n, d, extra, seed):
    """n ≤ e^β: ⟨θ_j, A_j⟩ ≥ (e^β − (n − 1))/(n e^β) > 0, whatever the others do."""
    beta = math.log(n) + extra
    draw = torch.Generator(device="cpu").manual_seed(seed)
    theta = torch.randn(n, d, generator=draw, dtype=torch.float64, device="cpu")
    # Half of the tests: all others opposite the first one, the worst there is.
    theta[1:] = -theta[0] if seed % 2 else theta[1:]
    begin = start(theta)
    radial = dot(flow("pre", beta).branch_output(begin), begin.theta)
    bound = (math.exp(beta) - (n - 1)) / (n * math.exp(beta))
    assert float(radial.min()) >= bound * (1 - 1e-12)
    assert bound > 0


@parametrize("seed", [0, 1], quick=[0])
@pytest.mark.parametrize("spec", ["pre", "peri", "mix", "post", "sqrt", "ngpt(alpha=1.0)"])
def test_few_tokens_meet_at_one_point(spec, seed):
    grows = spec in ("pre", "peri", "mix")
    time, clock = (1e6, LogClock()) if grows else (60.0, PlainClock())
    end = follow(flow(spec, 1.4), uniform(4, 3, seed=seed), time, tolerance=1e-7, clock=clock)[0]
    assert math.exp(1.4) >= 4
    assert variance(end) < 1e-8


def test_attention_starts_small_so_that_dividing_by_it_starts_fast():
    """Uniform tokens: ‖A‖ = O(√(log n/n) + log n/d), hence speeds of order one where it is divided by."""
    n, d = 256, 128
    begin = uniform(n, d)
    size = length(flow("post", 1.0).branch_output(begin)).max()
    assert float(size) < 2 * (math.sqrt(math.log(n) / n) + math.log(n) / d)
    assert float(flow("peri", 1.0).speeds(begin).mean()) > 0.9
    assert float(flow("post", 1.0).speeds(begin).mean()) < 0.1


def test_radii_grow_linearly_with_tied_weights_and_like_a_walk_with_independent_ones():
    law, begin = normlab.scheme("pre").law(64), uniform(4, 16, systems=48, radius=1.0)
    method, times = RungeKutta4(step=0.5), [16.0, 64.0]
    beta = torch.tensor([1.0], dtype=torch.float64)

    def exponent(weights: RandomWeights) -> float:
        one, two = (
            float(s.radius.mean()) for s in method.orbit(Flow(law, make_attention(weights, beta=beta)), begin, times)
        )
        return math.log(two / one) / math.log(4)

    seeds = tuple(range(48))
    assert exponent(RandomWeights(matrices="identity", dim=16)) == pytest.approx(1.0, abs=0.1)
    walk = exponent(RandomWeights(matrices="gaussian", dim=16, redraw=True, seeds=seeds, dtype=torch.float64))
    # Gaussian steps in 16 dimensions: 192 tokens of 48 systems leave a few hundredths of noise.
    assert walk == pytest.approx(0.5, abs=0.08)


def test_layers_have_weights_of_their_own():
    weights = RandomWeights(matrices="gaussian", dim=3, redraw=True, dtype=torch.float64)
    beta = torch.tensor([1.0], dtype=torch.float64)
    system = Flow(normlab.scheme("post").law(4), make_attention(weights, beta=beta))
    assert system.switches(0.0, 3.0) == [1.0, 2.0]
    assert system.switches(0.5, 1.0) == []
    state = uniform(5, 3)
    for time in (0.0, 0.9, 1.0, 2.5):
        score, value = weights.layer(int(time))
        alone = ParticleAttention(beta=beta, score=score, value=value)
        assert torch.equal(system.branch_output(state._replace(time=state.time + time)), alone(state.theta))


def test_the_mlp_adds_to_the_pull():
    system, state = flow("post"), uniform(5, 3)
    drifting = Flow(system.law, system.attention, drift=lambda x: 2 * x.roll(1, -1))
    torch.testing.assert_close(drifting.branch_output(state), system.branch_output(state) + 2 * state.theta.roll(1, -1))


def test_a_law_without_speed_has_no_flow():
    law = Law(speed=None, rms=on_sphere, forward="bounded", backward="")
    with pytest.raises(NormLabError, match="states no speed"):
        Flow(law, ParticleAttention(beta=torch.tensor(1.0)))


def test_a_gated_state_fades_where_attention_gives_nothing():
    """x ← (1 − t) x in both sublayers, for an antipodal pair whose plain mean is zero; others stand still there."""
    begin = start(torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64), 2.0)
    faded = flow("highway", 0.0)(begin)
    assert faded.radius.flatten().tolist() == pytest.approx([-4 / (1 + math.exp(2))] * 2)
    assert not faded.theta.any()
    assert not flow("peri", 0.0)(begin).radius.any()
