"""The network, which is the code that trains, converges to its scheme's law at first order, for every scheme."""

from __future__ import annotations

import math

import pytest
import torch

import normlab
from normlab.dynamics.system import laws
from normlab.dynamics.system.drift import RandomMLP
from normlab.dynamics.system.flow import Flow, ParticleState
from normlab.dynamics.system.network import ParticleNetwork, renormalises
from normlab.dynamics.system.weights import RandomWeights, make_attention
from normlab.errors import NormLabError
from tests.dynamics.particles import follow, uniform
from tests.matrix import parametrize

BETA = torch.tensor([1.5], dtype=torch.float64)
SCHEMES = [name for name in laws.law_names() if name != "sqrt"]
OPTIONS = [
    "pre(step=0.3)", "peri(step=0.3)", "peri(output_gain=0.5)", "ngpt(alpha=0.7)",
    "geonorm(max_angle=0.3)", "geonorm(decay='sqrt')", "geonorm(decay='none')", "geonorm(decay='linear')",
    "geonorm(order='decay-first')", "geonorm(order='decay-first', max_angle=0.3, decay='sqrt')", "geonorm(step=3.0)",
    "mix(post_fraction=0.75)", "keel(alpha='sqrt')", "deepnorm(alpha=3.0)", "layerscale(gamma=0.5)",
]  # fmt: skip


def _error(
    scheme, attention, exact: ParticleState, begin: ParticleState, *, depth: int, time: float, cut: int, drift=None
) -> float:
    network = ParticleNetwork(scheme, attention, depth=depth, cut=cut, drift=drift)
    end = list(network.orbit(begin, [time]))[-1]
    return float(torch.maximum((end.theta - exact.theta).abs().max(), (end.radius - exact.radius).abs().max()))


def _order(
    spec: str, weights: RandomWeights, cuts: tuple[int, int] = (64, 128), *, radius: float = 1.0, drift=None
) -> float:
    scheme, depth = normlab.scheme(spec), 4
    # Without any norm the softmax sharpens with the square of radii that grow exponentially.
    time = 1.0 if scheme.law(depth).reads_state else 3.0
    attention = make_attention(weights, beta=BETA)
    begin = uniform(5, 6, radius=radius)
    exact = follow(Flow(scheme.law(depth), attention, drift), begin, time, tolerance=1e-10)[0]
    errors = [_error(scheme, attention, exact, begin, depth=depth, time=time, cut=c, drift=drift) for c in cuts]
    return math.log2(errors[0] / errors[1])


@parametrize("spec", [*SCHEMES, *OPTIONS], quick=["pre", "geonorm", "ngpt"])
def test_first_order_toward_the_law(spec):
    """Half the step, half the error: simulator, theory and training code describe the same thing."""
    assert _order(spec, RandomWeights(matrices="identity", dim=6)) == pytest.approx(1.0, abs=0.06)


# Random values pull some tokens inwards, and a small radius turns fast: large ones where the scheme carries them.
PERI = "peri(entry_norm=False)"
RADII = {"post": 1.0, "pre": 3.0, PERI: 3.0, "lns": 3.0, "mix": 1.0, "keel": 3.0, "spannorm": 1.0, "gated": 3.0}


@pytest.mark.full
@pytest.mark.parametrize("spec", RADII)
def test_first_order_with_other_weights_in_every_layer(spec):
    weights = RandomWeights(matrices="gaussian", dim=6, heads=2, redraw=True, dtype=torch.float64)
    assert _order(spec, weights, radius=RADII[spec]) == pytest.approx(1.0, abs=0.1)


@parametrize("spec", ["post", "pre", PERI, "lns", "gated"], quick=["pre", "lns"])
def test_first_order_with_an_mlp(spec):
    """An MLP is not linear in its input, which LN-Scaling and gates shorten."""
    weights = RandomWeights(matrices="identity", dim=6)
    assert _order(spec, weights, radius=RADII[spec], drift=RandomMLP(dim=6, hidden=24)) == pytest.approx(1.0, abs=0.1)


def test_the_sphere_form_of_pre_norm_turns_alike():
    """It keeps its radius where a probe does not look."""
    begin, attention = uniform(5, 6), make_attention(RandomWeights(matrices="identity", dim=6), beta=BETA)
    plain, sphere = (
        next(ParticleNetwork(normlab.scheme("pre", form=form), attention, depth=3).orbit(begin, [3.0]))
        for form in ("plain", "sphere")
    )
    torch.testing.assert_close(sphere.theta, plain.theta)


def test_a_block_is_the_equation():
    """Peri-LN, one block of full size: x + N(A(N x))."""
    begin, attention = uniform(5, 6, radius=2.0), make_attention(RandomWeights(matrices="identity", dim=6), beta=BETA)
    end = next(ParticleNetwork(normlab.scheme(PERI), attention, depth=1).orbit(begin, [1.0]))
    pull = attention(begin.theta)
    x = 2 * begin.theta + pull / pull.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(end.theta * end.radius.unsqueeze(-1), x)
    torch.testing.assert_close(end.time, torch.ones(1, dtype=torch.float64))


def test_layers_of_a_refined_network_share_their_weights():
    weights = RandomWeights(matrices="gaussian", dim=6, redraw=True, dtype=torch.float64)
    asked: list[int] = []
    inner = make_attention(weights, beta=BETA)

    def attention(k: int):
        asked.append(k)
        return inner(k)

    list(ParticleNetwork(normlab.scheme("post"), attention, depth=2, cut=3).orbit(uniform(4, 6), [1.0, 2.0]))
    assert asked == [0, 0, 0, 1, 1, 1]


def test_single_precision_takes_an_update_of_zero():
    """nGPT normalises what the MLP proposes, which is nothing."""
    begin = ParticleState(*(part.float() for part in uniform(5, 6)))
    for name in normlab.list_schemes():
        network = ParticleNetwork(
            normlab.scheme(name), make_attention(RandomWeights(matrices="identity", dim=6), beta=BETA.float()), depth=2
        )
        assert next(network.orbit(begin, [2.0])).theta.isfinite().all(), name


def test_times_between_blocks_are_refused():
    network = ParticleNetwork(
        normlab.scheme("post"), make_attention(RandomWeights(matrices="identity", dim=6), beta=BETA), depth=2, cut=2
    )
    with pytest.raises(NormLabError, match="multiples of 1/2 alone"):
        list(network.orbit(uniform(4, 6), [0.3]))


def test_which_networks_put_a_start_on_the_sphere():
    """Those with a norm on the main path of their first block, or one at their entry."""
    found = {name for name in normlab.list_schemes() if renormalises(normlab.scheme(name))}
    assert found == {
        "deepnorm", "dual", "geonorm", "highway", "hybrid", "lambdas", "mix", "ngpt", "peri", "post", "spannorm",
    }  # fmt: skip
    assert not any(renormalises(normlab.scheme(spec)) for spec in ("geonorm(entry_norm=False)", PERI))
