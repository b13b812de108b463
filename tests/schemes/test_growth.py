"""Growth of the state at initialisation, against the law that a scheme states (facts 3.0, 5.1, 5.2)."""

import math

import pytest
import torch

import normlab
from normlab.norms import rms
from normlab.schemes.catalog.card import Card
from tests.matrix import parametrize

DEPTH, DIM, TOKENS = 24, 2048, 16
GROWTH = (
    "none",
    "pre",
    "pre(step=0.1)",
    "post",
    "output",
    "peri",
    "peri(step=0.1)",
    "peri(output_gain=0.5)",
    "mix",
    "lns",
    "deepnorm",
    "dual",
    "hybrid",
    "hybrid(star=True)",
    "ngpt",
    "keel",
    "layerscale",
    "geonorm",
    "spannorm",
    "highway",
    "highway(keep='variance', gate_bias=0.0)",
    "gated",
    "lambdas",
    "attnres",
)


@pytest.fixture(scope="module")
def grown():
    """RMS of every scheme's state over that of its entry, after each sublayer; all share the same random branches.

    A branch is a fresh random matrix with entries of variance 1/d. The squared norm of the state of one token scatters
    by a relative √(2/d) = 3 % a step and its inner products with updates by as much; 16 tokens bring that under 1 %.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, DIM, generator=generator)
    x = x / rms(x)
    bounds = {spec: normlab.scheme(spec).bind(depth=DEPTH, dim=DIM) for spec in GROWTH}
    with torch.no_grad():
        states = {spec: bound.entry()(x) for spec, bound in bounds.items()}
        entry = {spec: size(bounds[spec], states[spec]) for spec in GROWTH}
        sizes = {spec: {0: 1.0} for spec in GROWTH}
        for k in range(DEPTH):
            first, second = (torch.randn(DIM, DIM, generator=generator).div_(math.sqrt(DIM)) for _ in range(2))
            branches = [lambda x, w=first: x @ w, lambda x, w=second: x @ w]
            for spec, bound in bounds.items():
                block = bound.block(k)
                if spec != "spannorm":  # a state exists between its sublayers, too
                    between = block.steps[0](states[spec], branches[0])
                    sizes[spec][2 * k + 1] = size(bound, between) / entry[spec]
                states[spec] = block(states[spec], branches)
                sizes[spec][2 * k + 2] = size(bound, states[spec]) / entry[spec]
    return sizes


def size(bound, state):
    return float(bound.hidden(state).square().mean().sqrt())


@pytest.mark.full
@pytest.mark.parametrize("spec", GROWTH)
def test_growth_at_initialisation_follows_the_stated_law(grown, spec):
    law = normlab.scheme(spec).law(DEPTH)
    measured = grown[spec]
    expected = {i: law.rms(i) for i in measured}
    for i, value in measured.items():
        # The state of "none" is a product of i random factors: ‖x + Wx‖² scatters by a relative √(1.5/d) for each of
        # the tokens, and in the product this adds up. Four standard deviations.
        scatter = 4 * math.sqrt(1.5 / (4 * DIM) * i / TOKENS) if spec == "none" else 0.0
        assert value == pytest.approx(expected[i], rel=max(0.015, scatter)), i


@pytest.mark.full
@pytest.mark.parametrize(
    ("spec", "i", "expected"),
    [
        ("pre", 24, 5.0),
        ("pre", 48, 7.0),
        ("output", 24, 5.0),
        ("peri", 48, 7.0),
        ("peri(step=0.1)", 24, 1.114),
        ("lns", 24, 2.684),
        ("lns", 48, 2.924),
        ("layerscale", 48, math.sqrt(1 + 0.1**2 * 48)),
        ("post", 48, 1.0),
        ("deepnorm", 48, 1.0),
        ("spannorm", 48, 1.0),
        ("keel", 48, 1.0),
        ("geonorm", 48, 1.0),
        ("ngpt", 48, 1.0),
    ],
)
def test_growth_numbers(grown, spec, i, expected):
    assert normlab.scheme(spec).law(DEPTH).rms(i) == pytest.approx(expected, abs=0.5e-3)
    assert grown[spec][i] == pytest.approx(expected, rel=0.015)


def sizes(name, depth, weight):
    """RMS after each block of branches that return `weight(sublayer)` times what they read: all pull the same way."""
    bound, dim = normlab.scheme(name).bind(depth=depth, dim=16), 16
    x = torch.randn(3, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    state, found = bound.entry().double()(x / rms(x)), []
    with torch.no_grad():
        for k in range(depth):
            branches = [lambda x, i=2 * k + j: weight(i) * x for j in range(2)]
            state = bound.block(k).double()(state, branches)
            found.append(size(bound, state))
    return found


EXPONENTS = {"bounded": 0.0, "random walk": 0.5, "linear": 1.0}


@parametrize("name", normlab.list_schemes(), quick=("pre", "post", "lns", "none"))
def test_the_stated_growth_is_the_worst_at_weights_of_one_size(name):
    """Equal branches that always pull along the state: RMS ∝ depth^p with the p of the class, or faster than any."""
    stated = normlab.scheme(name).law(DEPTH).forward
    # From 200 blocks on 1 + 10·i is a power law to a hundredth, with LayerScale's 0.1 on it, too; LN-Scaling's sum of
    # 1/√ℓ is 2√L − 1.46, a power of 0.523 there.
    if stated == "exponential":
        found = sizes(name, 50, lambda i: 1.0)
        # Without norms a factor 2 a sublayer; with residual scalars λ_r from 1.15 to 1.05 a block.
        assert found[-1] == pytest.approx(2.0**100, rel=1e-12) if name == "none" else found[-1] / found[24] > 1.05**25
        return
    shallow, deep = (sizes(name, depth, lambda i: 10.0)[-1] for depth in (200, 400))
    assert math.log2(deep / shallow) == pytest.approx(EXPONENTS[stated], abs=0.03)


@pytest.mark.parametrize("name", normlab.list_schemes())
def test_weights_that_grow_with_depth_break_what_is_not_proven_and_nothing_else(name):
    """Pre-Norm is no exception: x + 2^i·N(x) doubles from sublayer to sublayer, with every block a plain Pre-Norm."""
    proven = not Card.of(normlab.scheme(name)).certificate.startswith("none")
    found = sizes(name, 16, lambda i: 2.0**i)
    if proven:
        assert found[-1] <= 1 + 32  # at most what Peri-LN adds, one a sublayer
    else:
        assert found[-1] / found[7] > 2.0 ** (0.9 * 16)


def test_pre_norm_grows_by_what_its_weights_add():
    """1 + Σ Λ_i, exactly where all updates point along the state: linear for equal Λ, 2^i for Λ_i = 2^i."""
    for weight, expected in ((lambda i: 0.3, 1 + 0.3 * 80), (lambda i: 2.0**i, 2.0**80)):
        # 80 norms with an epsilon of 1e-6 under the root.
        assert sizes("pre", 40, weight)[-1] == pytest.approx(expected, rel=80 * 1e-6)
