"""Numbers and algebraic identities that do not depend on our code (facts, sections 3.0, 5.1 and 5.2)."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.functional import jacobian

import normlab
from normlab.norms import rms
from normlab.ops import geodesic_step
from normlab.roles import Role

EPS64 = torch.finfo(torch.float64).eps
QUARTER = math.pi / 4
# Numbers in tables have four or seven decimals.
FOUR, SEVEN = 0.5e-4, 0.5e-7


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(spec, depth, dim, **options):
    """(entry, blocks, exit) in float64, with gains as they start."""
    bound = normlab.scheme(spec, **options).bind(depth=depth, dim=dim)
    entry, exit_, *blocks = (
        part.double().requires_grad_(False) for part in (bound.entry(), bound.exit(), *map(bound.block, range(depth)))
    )
    return SimpleNamespace(entry=entry, blocks=blocks, exit=exit_)


def run(net, x, pairs):
    state = net.entry(x)
    for block, pair in zip(net.blocks, pairs, strict=True):
        state = block(state, pair)
    return net.exit(state)


def branch(dim, seed, hidden=9):
    first, second = gaussian(hidden, dim, seed=seed) / math.sqrt(dim), gaussian(dim, hidden, seed=seed + 1)
    return lambda x: torch.tanh(x @ first.T) @ second.T / math.sqrt(hidden)


def pairs(depth, dim):
    return [(branch(dim, 10 * k), branch(dim, 10 * k + 5)) for k in range(depth)]


def nothing(x):
    return torch.zeros_like(x)


def normalised(x, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


# -- GeoNorm at x = (2, 0) -------------------------------------------------------------------------------------------

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


# -- constants of depth ----------------------------------------------------------------------------------------------


def written_constant(module):
    """A factor that is left out stands for one."""
    return getattr(module, "value", 1.0)


def std_factor(spec, role, depth, **bind):
    """What a scheme multiplies the standard deviation of one square matrix with, against that of q."""
    scheme = normlab.scheme(spec)
    bound = scheme.bind(depth=depth, dim=8, **bind)
    parameter = torch.nn.Parameter(torch.empty(8, 8))
    of = {name: scheme.initial_std(Role("w", parameter, name), 0.02, bound) for name in ("q", role)}
    return of[role] / of["q"]


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


# -- growth at initialisation ----------------------------------------------------------------------------------------

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


# -- zero branches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["none", "pre", "peri", "output", "lns", "layerscale", "geonorm(entry_norm=False)"])
def test_zero_branch_returns_the_state(spec):
    x = gaussian(3, 6)
    for block in network(spec, 3, 6).blocks:
        assert torch.equal(block(x, [nothing, nothing]), x)


@pytest.mark.parametrize("spec", ["post", "deepnorm", "keel", "spannorm"])
def test_zero_branch_normalises_the_state(spec):
    x = gaussian(3, 6)
    for k, block in enumerate(network(spec, 3, 6, eps=0.0).blocks):
        moved = block(x, [nothing, nothing])
        expected = x if spec == "keel" and k == 0 else normalised(x, 0.0)
        # Two norms in a row, each a sum of six squares and three roundings.
        torch.testing.assert_close(moved, expected, rtol=12 * EPS64, atol=0)


def test_zero_branches_of_the_double_stream_return_twice_the_norm():
    x = gaussian(3, 6)
    result = run(network("dual", 3, 6, eps=0.0, final_eps=0.0), x, [(nothing, nothing)] * 3)
    torch.testing.assert_close(result, 2 * normalised(x, 0.0), rtol=20 * EPS64, atol=0)


def test_zero_mlp_hides_attention_in_spannorm_but_not_in_post():
    x, attention = gaussian(3, 6), branch(6, 3)
    span, post = network("spannorm", 2, 6, eps=0.0), network("post", 2, 6, eps=0.0)
    for block in span.blocks:
        torch.testing.assert_close(block(x, [attention, nothing]), normalised(x, 0.0), rtol=8 * EPS64, atol=0)
    for block in post.blocks:
        assert float((block(x, [attention, nothing]) - normalised(x, 0.0)).abs().max()) > 0.1


def test_zero_branch_of_ngpt_is_guarded():
    """Without a guard it is 0/0. The target is then the origin, and the state stays where it was."""
    x = gaussian(3, 6)
    h = (x / x.norm(dim=-1, keepdim=True)).requires_grad_()
    moved = network("ngpt", 1, 6).blocks[0].steps[0](h, nothing)
    # n((1-α)h) with eps = 1e-6 under the root: 1e-12/2 of the length.
    torch.testing.assert_close(moved, h, rtol=1e-12, atol=0)
    assert bool(torch.autograd.grad(moved.sum(), h)[0].isfinite().all())


# -- reductions ------------------------------------------------------------------------------------------------------


def same(a, b, depth, dim=6):
    """Two schemes on the same branches, bit for bit."""
    x, f = gaussian(3, dim), pairs(depth, dim)
    assert torch.equal(run(network(a, depth, dim), x, f), run(network(b, depth, dim), x, f))


def test_sandwich_is_peri_with_a_whole_step():
    assert normlab.scheme("sandwich") == normlab.scheme("peri", step=1.0) == normlab.scheme("peri")


def test_mix_without_post_blocks_is_pre():
    same("mix(post_fraction=0.0)", "pre", 4)


def test_mix_of_post_blocks_is_post_with_a_final_norm():
    x, f = gaussian(3, 6), pairs(4, 6)
    mix, post = network("mix(post_fraction=1.0)", 4, 6), network("post", 4, 6)
    torch.testing.assert_close(run(mix, x, f), normalised(run(post, x, f)), rtol=8 * EPS64, atol=0)


def test_lns_with_one_block_is_pre():
    same("lns", "pre", 1)


def test_deepnorm_without_its_constants_is_post():
    same("deepnorm(alpha=1.0, beta=1.0)", "post", 4)
    for role in ("v", "o", "gate", "up", "down"):
        assert std_factor("deepnorm(alpha=1.0, beta=1.0)", role, 4) == std_factor("post(init='xavier')", role, 4) == 1.0


def test_keel_with_unit_skip_is_post_with_an_inner_norm():
    x, f = gaussian(3, 6), pairs(4, 6)
    keel, post = network("keel(alpha=1.0)", 4, 6), network("post", 4, 6)
    for k in range(1, 4):
        inner = [lambda x, f=f: f(normalised(x)) for f in f[k]]
        # Lengths of order one; the inner norm is rounded in another way (division for reciprocal root).
        torch.testing.assert_close(keel.blocks[k](x, f[k]), post.blocks[k](x, inner), rtol=0, atol=40 * EPS64)


def test_layerscale_at_one_is_pre():
    same("layerscale(gamma=1.0)", "pre", 4)
    same("layerscale(gamma=1.0, scalar=True)", "pre", 4)


def test_scalar_layerscale_is_pre_with_a_step():
    same("layerscale(gamma=0.25, scalar=True)", "pre(step=0.25)", 4)


@pytest.mark.parametrize("step", [1.0, 0.1])
def test_peri_is_pre_on_normed_branches(step):
    x, f = gaussian(3, 6), pairs(4, 6)
    normed = [tuple(lambda x, f=f: normalised(f(x), 0.0) for f in pair) for pair in f]
    peri, pre = (
        run(network(f"peri(eps=0.0, step={step}, entry_norm=False)", 4, 6), x, f),
        run(network(f"pre(eps=0.0, step={step})", 4, 6), x, normed),
    )
    # Eight updates with a handful of roundings each, read by branches of slope about one.
    torch.testing.assert_close(peri, pre, rtol=0, atol=200 * EPS64)


def test_ngpt_without_a_step_stays_and_with_a_whole_one_arrives():
    net = network("ngpt(eps=0.0)", 1, 6)
    step, f, x = net.blocks[0].steps[0], branch(6, 1), gaussian(3, 6)
    h = x / x.norm(dim=-1, keepdim=True)
    step.write.alpha.weight.data.zero_()
    torch.testing.assert_close(step(h, f), h, rtol=8 * EPS64, atol=0)
    step.write.alpha.weight.data.fill_(1 / (0.05 * math.sqrt(6)))
    torch.testing.assert_close(step(h, f), f(h) / f(h).norm(dim=-1, keepdim=True), rtol=0, atol=8 * EPS64)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_input_norm_of_geonorm_changes_nothing_on_the_sphere(eps):
    x, f = gaussian(3, 6), pairs(4, 6)
    with_norm = run(network("geonorm", 4, 6, input_norm=True, gain="none", eps=eps), x, f)
    without = run(network("geonorm", 4, 6, input_norm=False, gain="none", eps=eps), x, f)
    # The norm divides by √(1 + eps) and rounds; eight steps, each amplified by slopes of about one.
    torch.testing.assert_close(with_norm, without, rtol=0, atol=8 * 4 * (eps / 2 + 10 * EPS64))
    if eps:
        assert not torch.equal(with_norm, without)


# -- norms -----------------------------------------------------------------------------------------------------------


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


@torch.no_grad()
def test_ngpt_stays_on_the_unit_sphere_in_single_precision():
    bound = normlab.scheme("ngpt").bind(depth=8, dim=64)
    f = [tuple(lambda x, f=f: f(x.double()).float() for f in pair) for pair in pairs(8, 64)]
    state = bound.entry()(gaussian(5, 64).float())
    for k in range(8):
        state = bound.block(k)(state, f[k])
        # A reciprocal root, one product and half of the rounding of a sum: two units in the last place.
        assert float((state.double().norm(dim=-1) - 1).abs().max()) <= 2 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("spec", ["post", "deepnorm", "spannorm", "keel"])
def test_renormalising_schemes_have_unit_rms_after_every_block(spec):
    net = network(spec, 4, 8, eps=0.0)
    state = net.entry(gaussian(5, 8))
    for k, (block, pair) in enumerate(zip(net.blocks, pairs(4, 8), strict=True)):
        state = block(state, pair)
        if spec != "keel" or k > 0:
            torch.testing.assert_close(rms(state), torch.ones_like(rms(state)), rtol=6 * EPS64, atol=0)


# -- Jacobians and the size of output projections --------------------------------------------------------------------


def block_jacobian(spec, factor, dim=6, **options):
    """Of one attention step, whose branch is multiplied by a factor in its last matrix."""
    step = network(spec, 2, dim, eps=0.0, **options).blocks[1].steps[0]
    f, x = branch(dim, 4), gaussian(dim)
    return jacobian(lambda x: step(x, lambda y: factor * f(y)), x), jacobian(
        lambda x: step.update(x, lambda y: factor * f(y)), x
    )


@pytest.mark.parametrize("spec", ["peri", "peri(step=0.1)", "output"])
@pytest.mark.parametrize("factor", [1e-3, 3.0, 1e3])
def test_jacobian_behind_an_output_norm_is_free_of_the_size_of_the_last_matrix(spec, factor):
    one, scaled = block_jacobian(spec, 1.0)[0], block_jacobian(spec, factor)[0]
    # The factor cancels up to its own roundings: a product in each of six rows, and a norm; entries are at most 2.
    torch.testing.assert_close(scaled, one, rtol=0, atol=16 * EPS64)


@pytest.mark.parametrize("spec", ["pre", "pre(step=0.5)", "lns", "layerscale"])
def test_branch_jacobian_of_pre_grows_with_the_last_matrix(spec):
    one, four, three = (block_jacobian(spec, factor)[1] for factor in (1.0, 4.0, 3.0))
    assert torch.equal(four, 4 * one)  # powers of two cost no rounding
    torch.testing.assert_close(three, 3 * one, rtol=0, atol=16 * EPS64 * float(one.abs().max()))
    whole, wholly = block_jacobian(spec, 1.0)[0], block_jacobian(spec, 4.0)[0]
    identity = torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(wholly - identity, 4 * (whole - identity), rtol=0, atol=16 * EPS64)


def test_jacobian_of_geonorm_is_free_of_the_size_above_the_clamp_alone():
    """2.4, screening step 4: below the clamp the Jacobian grows with the factor."""
    above = [block_jacobian("geonorm", factor, entry_norm=False)[0] for factor in (100.0, 300.0)]
    torch.testing.assert_close(*above, rtol=0, atol=64 * EPS64)
    below = [block_jacobian("geonorm", factor, entry_norm=False)[0] for factor in (1e-3, 1e-1)]
    assert float((below[0] - below[1]).abs().max()) > 1e-3
