"""Properties of every scheme over drawn states, updates and rotations; first and second derivatives of every step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

import normlab
from normlab import norms
from normlab.ops import geodesic_step
from normlab.schemes.contract.parts import Add, AddNorm
from normlab.schemes.contract.scales import LearnedScale
from normlab.schemes.dual import DualWrite
from normlab.schemes.ngpt import SphereLerp
from normlab.schemes.pre import SphereAdd
from tests.matrix import parametrize

EPS64 = torch.finfo(torch.float64).eps
QUARTER = math.pi / 4
EXAMPLES = settings(derandomize=True, database=None, deadline=None, max_examples=40)

SEEDS = st.integers(0, 2**31)
DIMS = st.integers(2, 9)
LOG_SIZES = st.floats(-3, 3)
FACTORS = st.floats(0.01, 1.0)


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def length(x):
    return x.norm(dim=-1, keepdim=True)


def branch(dim, seed):
    first, second = gaussian(2 * dim, dim, seed=seed) / math.sqrt(dim), gaussian(dim, 2 * dim, seed=seed + 1)
    return lambda x: torch.tanh(x @ first.T) @ second.T / math.sqrt(2 * dim)


def linear(dim, seed):
    matrix = gaussian(dim, dim, seed=seed) / math.sqrt(dim)
    return lambda x: x @ matrix


def network(spec, depth, dim, **options):
    bound = normlab.scheme(spec, **options).bind(depth=depth, dim=dim)
    return bound, [
        part.double().requires_grad_(False) for part in (bound.entry(), *map(bound.block, range(depth)), bound.exit())
    ]


def run(parts, x, pairs):
    entry, *blocks, exit_ = parts
    state = entry(x)
    for block, pair in zip(blocks, pairs, strict=True):
        state = block(state, pair)
    return exit_(state)


# -- rotations -------------------------------------------------------------------------------------------------------

# Schemes with norms that turn with their input; vectors of gains prefer the axes and are left out or constant.
GAIN_FREE = {
    name: {} if name == "ngpt" else {"gain": "none"} | ({"learned": False} if name == "geonorm" else {})
    for name in normlab.list_schemes()
} | {
    "pre(form='sphere')": {"gain": "none"},
    "peri(step=0.1)": {"gain": "none"},
    "hybrid(star=True)": {"gain": "none"},
    "geonorm(decay='sqrt', input_norm=True)": {"gain": "none"},
    "mix(post_fraction=0.5)": {"gain": "none"},
}


def turned(f, rotation):
    return lambda x: f(x @ rotation) @ rotation.T


@parametrize("spec", GAIN_FREE, quick=("pre", "post", "geonorm"))
@EXAMPLES
@given(seed=SEEDS, dim=DIMS, size=st.floats(-1, 1))
def test_turning_the_embedding_and_every_branch_turns_the_result(spec, seed, dim, size):
    depth = 3
    x = 10**size * gaussian(4, dim, seed=seed)
    # A token of hardly any length has no stable direction: keep away from zero by more than the scale of updates.
    x = x + 0.1 * 10**size * torch.sign(x)
    rotation, _ = torch.linalg.qr(gaussian(dim, dim, seed=seed + 1))
    _, parts = network(spec, depth, dim, **GAIN_FREE[spec])
    pairs = [(branch(dim, seed + 4 * k), branch(dim, seed + 4 * k + 2)) for k in range(depth)]
    conjugated = [tuple(turned(f, rotation) for f in pair) for pair in pairs]
    straight = run(parts, x, pairs) @ rotation.T
    # A rotation costs dim roundings, relative to the longest vector; twelve are made here. Amplification by division by
    # small lengths (an output norm on a small update, a sum that cancels) is allowed for by a factor of 1e5: a scheme
    # that prefers an axis is off by order one.
    allowed = 1e5 * 12 * dim * EPS64 * max(1.0, float(straight.abs().max()))
    torch.testing.assert_close(run(parts, x @ rotation.T, conjugated), straight, rtol=0, atol=allowed)


def test_the_rotation_test_can_fail():
    """A gain that differs from axis to axis is not equivariant."""
    dim, x = 5, gaussian(4, 5)
    rotation, _ = torch.linalg.qr(gaussian(dim, dim, seed=1))
    _, parts = network("post", 1, dim)
    parts[1].steps[0].write.norm.weight.data[0] = 2.0
    pair = (branch(dim, 0), branch(dim, 2))
    conjugated = tuple(turned(f, rotation) for f in pair)
    difference = run(parts, x @ rotation.T, [conjugated]) - run(parts, x, [pair]) @ rotation.T
    assert float(difference.abs().max()) > 0.1


# -- scales ----------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(seed=SEEDS, dim=DIMS, rho=LOG_SIZES, size=LOG_SIZES, factor=FACTORS, pair=st.booleans(), second=st.booleans())
def test_geodesic_step_scales_with_its_arguments(seed, dim, rho, size, factor, pair, second):
    """geo(ρx, ρg) = ρ·geo(x, g)."""
    rho, x, g = 10**rho, gaussian(4, dim, seed=seed), 10**size * gaussian(4, dim, seed=seed + 1)
    options = {"a": 1.3, "b": 0.2} if pair else {}
    one = geodesic_step(x, g, factor, QUARTER, **options, second_clamp=second)
    other = geodesic_step(rho * x, rho * g, factor, QUARTER, **options, second_clamp=second)
    # The tangent part is a difference of numbers of size |g|; with b its direction counts, whatever is left of it.
    left = length(g - (x * g).sum(-1, keepdim=True) / length(x) ** 2 * x) / length(g)
    allowed = 100 * EPS64 * float((length(x) / left).max())
    torch.testing.assert_close(other / rho, one, rtol=0, atol=allowed)


@pytest.mark.parametrize("spec", ["none", "geonorm(entry_norm=False, final_norm=False)"])
@EXAMPLES
@given(seed=SEEDS, dim=DIMS, rho=LOG_SIZES)
def test_degree_one_with_linear_branches(spec, seed, dim, rho):
    x, rho = gaussian(4, dim, seed=seed), 10**rho
    _, parts = network(spec, 2, dim)
    pairs = [(linear(dim, seed + 2 * k), linear(dim, seed + 2 * k + 1)) for k in range(2)]
    one = run(parts, x, pairs)
    torch.testing.assert_close(run(parts, rho * x, pairs) / rho, one, rtol=0, atol=1e4 * EPS64 * float(one.abs().max()))


@parametrize(
    "spec",
    ["post", "deepnorm", "hybrid", "ngpt", "mix(post_fraction=1.0)", "geonorm", "spannorm"],
    quick=("post", "ngpt", "geonorm"),
)
@EXAMPLES
@given(seed=SEEDS, dim=DIMS, rho=LOG_SIZES)
def test_degree_zero_with_linear_branches(spec, seed, dim, rho):
    """The size of the embedding does not reach the head."""
    x, rho = gaussian(4, dim, seed=seed), 10**rho
    _, parts = network(spec, 2, dim, eps=0.0)
    pairs = [(linear(dim, seed + 2 * k), linear(dim, seed + 2 * k + 1)) for k in range(2)]
    one = run(parts, x, pairs)
    # Sums x + Fx may cancel by a factor of a thousand among so many draws; they are normalised afterwards.
    torch.testing.assert_close(run(parts, rho * x, pairs), one, rtol=0, atol=1e5 * EPS64 * float(one.abs().max()))


@pytest.mark.parametrize("spec", ["pre", "pre(step=0.3)", "lns", "layerscale", "pre(form='sphere')"])
@EXAMPLES
@given(seed=SEEDS, dim=DIMS, rho=LOG_SIZES)
def test_state_and_branches_scale_together_behind_an_input_norm(spec, seed, dim, rho):
    """The branch reads N(x), so x → ρx and F → ρF scale the state by ρ and leave the result alone."""
    x, rho = gaussian(4, dim, seed=seed), 10**rho
    _, parts = network(spec, 2, dim, eps=0.0)
    pairs = [(branch(dim, seed + 4 * k), branch(dim, seed + 4 * k + 2)) for k in range(2)]
    scaled = [tuple(lambda x, f=f: rho * f(x) for f in pair) for pair in pairs]
    torch.testing.assert_close(run(parts, rho * x, scaled), run(parts, x, pairs), rtol=0, atol=1e5 * EPS64)


@pytest.mark.parametrize("spec", ["peri", "output", "ngpt"])
@EXAMPLES
@given(seed=SEEDS, dim=DIMS, rho=LOG_SIZES)
def test_size_of_branches_does_not_matter_behind_an_output_norm(spec, seed, dim, rho):
    x, rho = gaussian(4, dim, seed=seed), 10**rho
    _, parts = network(spec, 2, dim, eps=0.0)
    pairs = [(branch(dim, seed + 4 * k), branch(dim, seed + 4 * k + 2)) for k in range(2)]
    scaled = [tuple(lambda x, f=f: rho * f(x) for f in pair) for pair in pairs]
    torch.testing.assert_close(run(parts, x, scaled), run(parts, x, pairs), rtol=0, atol=1e5 * EPS64)


# -- norms -----------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(seed=SEEDS, dim=DIMS, size=st.floats(-8, 8), factor=FACTORS, a=st.floats(-2, 4), b=st.floats(-1, 1))
def test_geodesic_step_keeps_the_norm(seed, dim, size, factor, a, b):
    x, g = gaussian(4, dim, seed=seed), 10**size * gaussian(4, dim, seed=seed + 1)
    for pair in ({}, {"a": a, "b": b}):
        for second in (True, False):
            moved = geodesic_step(x, g, factor, QUARTER, **pair, second_clamp=second)
            # Orthogonality of the tangent part is lost in proportion to what the projection cancels.
            left = length(g - (x * g).sum(-1, keepdim=True) / length(x) ** 2 * x) / length(g)
            allowed = 20 * EPS64 * float((1 / left).max())
            torch.testing.assert_close(length(moved), length(x), rtol=allowed, atol=0)


@parametrize(
    "spec", ["post", "deepnorm", "spannorm", "keel", "geonorm", "ngpt", "dual"], quick=("post", "ngpt", "geonorm")
)
@EXAMPLES
@given(seed=SEEDS, dim=DIMS, size=LOG_SIZES, strength=LOG_SIZES)
def test_states_stay_on_their_sphere(spec, seed, dim, size, strength):
    depth, x = 4, 10**size * gaussian(4, dim, seed=seed)
    bound, (entry, *blocks, _) = network(spec, depth, dim, eps=0.0, **({"final_eps": 0.0} if spec == "dual" else {}))
    radius = 1.0 if spec == "ngpt" else math.sqrt(dim)
    state = entry(x)
    for k, block in enumerate(blocks):
        fs = [branch(dim, seed + 4 * k), branch(dim, seed + 4 * k + 2)]
        state = block(state, [lambda x, f=f: 10**strength * f(x) for f in fs])
        if spec == "keel" and k == 0:
            continue  # its first block is Pre-Norm
        found = length(bound.hidden(state))
        # One norm of `dim` terms; GeoNorm never renormalises, so its roundings add up over the steps, amplified where
        # the update points along the state.
        roundings = 1e4 if spec == "geonorm" else dim + 8
        torch.testing.assert_close(found, torch.full_like(found, radius), rtol=roundings * EPS64, atol=0)


# -- derivatives -----------------------------------------------------------------------------------------------------


def check(function, *arguments, second=True):
    arguments = tuple(argument.clone().requires_grad_() for argument in arguments)
    assert gradcheck(function, arguments)
    if second:
        assert gradgradcheck(function, arguments)


X, G = gaussian(3, 4), gaussian(3, 4, seed=1)
A, B = torch.tensor(1.3, dtype=torch.float64), torch.tensor(0.2, dtype=torch.float64)
# Far enough from the kink at t = π/4 for finite differences of 1e-6: asserted below.
BELOW, ABOVE = 0.2, 5.0


def test_the_drawn_updates_lie_on_both_sides_of_the_clamp():
    tangent = G - (X * G).sum(-1, keepdim=True) / length(X) ** 2 * X
    t = length(tangent) / length(X)
    assert float((BELOW * t).max()) < 0.9 * QUARTER
    # Times 0.8, or twice that times 0.5, where the decay comes before the clamp.
    assert float((0.8 * ABOVE * t).min()) > 1.1 * QUARTER


ORDERED = pytest.mark.parametrize("order", ["clamp-first", "decay-first"])


@ORDERED
@pytest.mark.parametrize("size", [BELOW, ABOVE])
@parametrize("factor", [1.0, 0.8], quick=[0.8])
def test_derivatives_of_the_geodesic_step(size, factor, order):
    check(lambda x, g: geodesic_step(x, g, factor, QUARTER, order=order), X, size * G)


@ORDERED
@parametrize("second_clamp", [True, False], quick=[True])
@pytest.mark.parametrize("size", [BELOW, 2 * ABOVE])
def test_derivatives_of_the_geodesic_step_with_a_learned_map(size, second_clamp, order):
    def step(x, g, a, b):
        return geodesic_step(x, g, 0.5, QUARTER, a=a, b=b, second_clamp=second_clamp, order=order)

    check(step, X, size * G, A, B)


def test_derivatives_above_the_second_clamp():
    check(lambda x, g, a, b: geodesic_step(x, g, 1.0, QUARTER, a=a, b=b), X, ABOVE * G, 2 * A, B)


def test_derivatives_of_a_step_backwards():
    check(lambda x, g, a, b: geodesic_step(x, g, 1.0, QUARTER, a=a, b=b), X, BELOW * G, A, -4 * B)


def test_derivatives_with_the_widest_clamp():
    check(lambda x, g: geodesic_step(x, g, 1.0, math.pi), X, G)


@pytest.mark.parametrize("update", [torch.zeros_like(X), 2 * X, -0.5 * X], ids=["zero", "along", "against"])
@parametrize("learned", [False, True], quick=[True])
def test_derivatives_without_a_tangent_part(update, learned):
    """Where v/‖v‖ has none."""
    if learned:
        check(lambda x, g, a: geodesic_step(x, g, 0.5, QUARTER, a=a), X, update, A)
    else:
        check(lambda x, g: geodesic_step(x, g, 0.5, QUARTER), X, update)


def test_derivatives_of_a_zero_update_with_a_learned_offset():
    """The offset fades in over an angle of 1e-3, so that the slope at zero is δ(a + b/τ), steep but finite."""
    tau, b = 1e-3, 0.01
    update, upstream = torch.zeros_like(X).requires_grad_(), gaussian(3, 4, seed=2)
    moved = geodesic_step(X, update, 0.5, QUARTER, a=1.3, b=b)
    (gradient,) = torch.autograd.grad((moved * upstream).sum(), update)
    tangent = upstream - (X * upstream).sum(-1, keepdim=True) / length(X) ** 2 * X
    torch.testing.assert_close(gradient, 0.5 * (1.3 + b / tau) * tangent, rtol=1e-12, atol=1e-12)
    # Finite differences over 1e-6 see the curvature of 1/τ³: relative 1e-6·(3/2)(1e-6/τ)², below gradcheck's 1e-3.
    check(
        lambda x, g, a, b: geodesic_step(x, g, 0.5, QUARTER, a=a, b=b),
        X,
        torch.zeros_like(X),
        A,
        B * 0.05,
        second=False,
    )


NORMS = {
    f"{kind}-{gain}-{bias}": (kind, {"gain": gain, "bias": bias})
    for kind in norms.NORMS
    for gain, bias in (("plain", True), ("offset", False), ("none", False))
}


@pytest.mark.parametrize("name", NORMS)
def test_derivatives_of_norms(name):
    kind, options = NORMS[name]
    module = norms.norm(kind, 4, **options).double()
    names = [key for key, _ in module.named_parameters()]
    values = [p.detach() + 0.3 * gaussian(*p.shape, seed=i) for i, p in enumerate(module.parameters())]

    def apply(x, *parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

    check(apply, X, *values)


WRITES = {
    "add": lambda: Add(),
    "add-step": lambda: Add(0.3),
    "add-norm": lambda: AddNorm(norms.RMSNorm(4)),
    "add-norm-weights": lambda: AddNorm(norms.LayerNorm(4, bias=True), keep=2.2, step=0.7),
    "sphere-lerp": lambda: SphereLerp(LearnedScale(4, 0.3, 0.5), 1e-6, 1.0),
}


def check_write(module, state, update):
    module = module.double()
    names = [key for key, _ in module.named_parameters()]
    values = [p.detach() + 0.1 * gaussian(*p.shape, seed=i) for i, p in enumerate(module.parameters())]

    def apply(state, update, *parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (state, update))

    check(apply, state, update, *values)


@pytest.mark.parametrize("name", WRITES)
def test_derivatives_of_writes(name):
    check_write(WRITES[name](), X, G)


def test_derivatives_of_writes_with_wider_states():
    check_write(DualWrite(norms.RMSNorm(4), 0.5, 1.0), gaussian(3, 2, 4), G)
    # (y, ρ): any y and a positive radius.
    check_write(SphereAdd(0.5), torch.cat([X, X[:, :1].abs() + 0.5], dim=-1), G)


@parametrize("spec", normlab.list_schemes(), quick=("pre", "post", "spannorm", "ngpt"))
def test_derivatives_of_whole_networks(spec):
    """Two blocks of every scheme, with respect to the embedding and, through a factor, to every branch."""
    _, parts = network(spec, 2, 4)
    pairs = [(branch(4, 4 * k), branch(4, 4 * k + 2)) for k in range(2)]

    def apply(x, strength):
        return run(parts, x, [tuple(lambda x, f=f: strength * f(x) for f in pair) for pair in pairs])

    check(apply, X, torch.tensor(0.5, dtype=torch.float64))
