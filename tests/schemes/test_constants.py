"""Published constants of depth, step angles and numbers of parameters (facts 3.0, 5.1, 5.2)."""

import math

import pytest

import normlab
from normlab.norms import rms

from .small import gaussian, network, nothing, std_factor, vector

FOUR = 0.5e-4  # numbers in tables have four decimals


def written_constant(module):
    """A factor that is left out stands for one."""
    return getattr(module, "value", 1.0)


@pytest.mark.parametrize(
    ("depth", "alpha", "beta", "blocks", "sublayers", "keel", "harmonic"),
    [
        (6, 1.8612, 0.3799, 0.4082, 0.2887, 12, 2.4500),
        (12, 2.2134, 0.3195, 0.2887, 0.2041, 24, 3.1032),
        (24, 2.6321, 0.2686, 0.2041, 0.1443, 48, 3.7760),
        (32, 2.8284, 0.2500, 0.1768, 0.1250, 64, 4.0585),
    ],
)
def test_depth_constants(depth, alpha, beta, blocks, sublayers, keel, harmonic):
    for block in network("deepnorm", depth, 4).blocks:
        assert all(written_constant(step.write.keep) == pytest.approx(alpha, abs=FOUR) for step in block.steps)
    assert std_factor("deepnorm", "v", depth) == pytest.approx(beta, abs=FOUR)
    assert std_factor("spannorm", "o", depth) == pytest.approx(blocks, abs=FOUR)
    assert std_factor("pre", "down", depth) == pytest.approx(sublayers, abs=FOUR)
    for block in network("keel", depth, 4).blocks[1:]:
        assert all(written_constant(step.write.keep) == keel for step in block.steps)
    law = normlab.scheme("lns").law(depth)
    assert (law.rms(2 * depth) ** 2 - 1) / 2 == pytest.approx(harmonic, abs=FOUR)


def test_deepnorm_constants_of_an_encoder_and_its_decoder():
    """N = 6 encoder and M = 8 decoder blocks."""
    encoder, bind = "deepnorm(decoder_depth=8)", {"depth": 6, "dim": 4}
    step = normlab.scheme(encoder).bind(**bind).block(0).steps[0]
    assert written_constant(step.write.keep) == pytest.approx(1.4437, abs=FOUR)
    assert std_factor(encoder, "v", 6) == pytest.approx(0.4881, abs=FOUR)
    decoder = normlab.scheme("deepnorm").bind(depth=8, dim=4, branches=3)
    assert len(decoder.block(0).steps) == 3
    assert all(written_constant(s.write.keep) == pytest.approx(2.2134, abs=FOUR) for s in decoder.block(7).steps)
    assert std_factor("deepnorm", "v", 8, branches=3) == pytest.approx(0.3195, abs=FOUR)


def test_lns_factors():
    blocks = network("lns", 12, 4, eps=0.0).blocks
    for number, expected in ((1, 1.0), (2, 0.7071), (3, 0.5774), (4, 0.5), (12, 0.2887)):
        seen = []
        for step in blocks[number - 1].steps:
            step(vector(1.0, -1.0, 1.0, 1.0), lambda x, seen=seen: seen.append(x) or nothing(x))
        for read in seen:
            assert float(rms(read.detach())) == pytest.approx(expected, abs=FOUR)


@pytest.mark.parametrize(
    ("depth", "fraction", "count"), [(12, 0.25, 3), (24, 0.25, 6), (7, 0.25, 1), (3, 0.25, 0), (32, 0.06, 1)]
)
def test_mix_counts_its_post_blocks(depth, fraction, count):
    blocks = network("mix", depth, 4, post_fraction=fraction).blocks
    x = gaussian(4)
    # A zero branch tells them apart: Post-Norm normalises, Pre-Norm returns x.
    kinds = [bool((block(x, [nothing, nothing]) - x).abs().max() > 1e-3) for block in blocks]
    assert kinds == [True] * count + [False] * (depth - count)


@pytest.mark.parametrize(("alpha", "degrees", "digits"), [(0.05, 3.0128, FOUR), (0.5, 45.0, 1e-6)])
def test_ngpt_step_angle(alpha, degrees, digits):
    step = network("ngpt", 1, 4, alpha=alpha).blocks[0].steps[0]
    moved = step(vector(1, 0, 0, 0), lambda h: vector(0, 7, 0, 0))
    assert math.degrees(math.atan2(float(moved[1]), float(moved[0]))) == pytest.approx(degrees, abs=digits)


@pytest.mark.parametrize(
    ("spec", "vectors", "scalars"),
    [
        ("pre", lambda L: 2 * L + 1, 0),
        ("post", lambda L: 2 * L, 0),
        ("output", lambda L: 2 * L + 1, 0),
        ("peri(entry_norm=False)", lambda L: 4 * L + 1, 0),
        ("peri", lambda L: 4 * L + 2, 0),
        ("mix", lambda L: 2 * L + 1, 0),
        ("lns", lambda L: 2 * L + 1, 0),
        ("deepnorm", lambda L: 2 * L, 0),
        ("dual", lambda L: 2 * L + 1, 0),
        ("hybrid", lambda L: L + 1, 0),
        ("hybrid(star=True)", lambda L: L + 2, 0),
        ("ngpt", lambda L: 2 * L, 0),
        ("keel", lambda L: 4 * L - 2, 0),
        ("layerscale", lambda L: 4 * L + 1, 0),
        ("geonorm", lambda L: 1, 4),
        ("spannorm", lambda L: 2 * L + 1, 0),
    ],
)
def test_extra_parameters(spec, vectors, scalars):
    depth, dim = 5, 7
    net = network(spec, depth, dim)
    parts = [net.entry, *net.blocks, net.exit]
    assert sum(p.numel() for part in parts for p in part.parameters()) == vectors(depth) * dim + scalars * depth
