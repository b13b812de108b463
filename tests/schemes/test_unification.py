"""Schemes are one another in disguise: exact identities, and the order to which the others agree.

With n(v) = v/‖v‖ and y = R·n(x), a Pre-Norm step seen on the sphere of radius R is a Post-Norm step of size R/‖x‖:

    R·n(x + F(y)) = R·n(y + (R/‖x‖)·F(y))

Every side of every identity here is a step of the library.
"""

import itertools
import math

import pytest
import torch

import normlab

D = 8
EPS64 = torch.finfo(torch.float64).eps
SIZES = (1e-3, 0.5, 1.0, 40.0)
# One step: a branch, two norms and a sum, some 20 roundings in a row of numbers of the size of the result.
STEP = 40 * EPS64


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def branch(seed=0, dim=D):
    first, second = gaussian(2 * dim, dim, seed=seed) / math.sqrt(dim), gaussian(dim, 2 * dim, seed=seed + 1)
    return lambda x: torch.tanh(x @ first.T) @ second.T / math.sqrt(2 * dim)


def times(factor, f):
    return lambda x: factor * f(x)


def blocks(spec, depth=1, **options):
    bound = normlab.scheme(spec, **options).bind(depth=depth, dim=D)
    return [bound.block(k).double().requires_grad_(False) for k in range(depth)]


def step(spec, depth=1, k=0, **options):
    """The first step of block k, without epsilon."""
    return blocks(spec, depth, eps=0.0, **options)[k].steps[0]


def length(x):
    return x.norm(dim=-1, keepdim=True)


def close(a, b, steps=1):
    torch.testing.assert_close(a, b, rtol=0, atol=steps * STEP * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize(("norm", "radius"), [("rms", math.sqrt(D)), ("l2", 1.0)])
@pytest.mark.parametrize("size", SIZES)
def test_pre_norm_on_the_sphere_is_post_norm_with_a_shrinking_step(norm, radius, size):
    pre, post = step("pre", norm=norm, gain="none"), step("post", norm=norm, gain="none")
    f, x = branch(), size * gaussian(16, D)
    y = radius * x / length(x)
    moved = pre(x, f)
    left = radius * moved / length(moved)
    right = post(y, times(radius / length(x), f))
    close(left, right)


@pytest.mark.full
@torch.no_grad()
def test_the_hidden_step_decays_like_the_root_of_depth():
    """R/‖x‖ in Pre-Norm with independent branches: 1/√(1 + i·σ²), a decay that nobody wrote down."""
    depth, dim = 64, 256
    bound = normlab.scheme("pre").bind(depth=depth, dim=dim)
    x, hidden = gaussian(8, dim), []
    for k in range(depth):
        hidden.append(float((math.sqrt(dim) / length(x)).mean()))
        x = bound.block(k).double()(x, [branch(4 * k, dim), branch(4 * k + 2, dim)])
    assert hidden == sorted(hidden, reverse=True)
    slope = math.log(hidden[60] / hidden[15]) / math.log(60 / 15)
    # Updates are orthogonal to the state only up to 1/√d each: 90 of them scatter ‖x‖² by √90/√d·(1/90), and the eight
    # tokens share matrices. The one in 1 + i·σ² lifts the slope by another 0.02.
    assert slope == pytest.approx(-0.5, abs=0.08)


@pytest.mark.parametrize("size", SIZES)
def test_whole_pre_norm_network_as_post_norm_steps(size):
    """The identity step after step: directions of a Pre-Norm network from Post-Norm steps and a radius beside them."""
    depth = 12
    f, x = [branch(seed=2 * k) for k in range(depth)], size * gaussian(4, D)
    pre, post = step("pre", gain="none"), step("post", gain="none")
    y, radius = math.sqrt(D) * x / length(x), length(x)
    for g in f:
        step_size = math.sqrt(D) / radius
        # The radius follows from the same step: ‖x'‖ = (‖x‖/R)·‖y + (R/‖x‖)F(y)‖.
        y, radius = post(y, times(step_size, g)), radius * length(y + step_size * g(y)) / math.sqrt(D)
        x = pre(x, g)
    # Branches here have slopes of about one, so an error at most doubles in a step of size one and less later.
    close(y, math.sqrt(D) * x / length(x), steps=16 * depth)
    close(radius, length(x), steps=16 * depth)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("options", [{}, {"step": 0.1}, {"norm": "layer", "bias": True}, {"gain": "offset"}])
def test_sphere_form_of_pre_norm_is_pre_norm(eps, options):
    depth, x = 6, 0.3 * gaussian(4, D)
    f = [(branch(seed=4 * k), branch(seed=4 * k + 2)) for k in range(depth)]
    plain, sphere = (
        normlab.scheme("pre", form=form, eps=eps, **options).bind(depth=depth, dim=D) for form in ("plain", "sphere")
    )
    state, on_sphere = plain.entry()(x), sphere.entry()(x)
    for k in range(depth):
        state, on_sphere = (
            b.block(k).double().requires_grad_(False)(s, f[k]) for b, s in ((plain, state), (sphere, on_sphere))
        )
        y, radius = on_sphere[..., :-1], on_sphere[..., -1:]
        rms = length(state) / math.sqrt(D)
        assert torch.equal(sphere.hidden(on_sphere), y)
        close(y, state / rms, steps=16 * (k + 1))
        close(radius, rms, steps=16 * (k + 1))
    ours, theirs = (b.exit().double().requires_grad_(False)(s) for b, s in ((sphere, on_sphere), (plain, state)))
    close(ours, theirs, steps=16 * depth)


@pytest.mark.parametrize("depth", [2, 12])
def test_deepnorm_and_keel_are_post_norm_with_a_small_step(depth):
    """N(αx + F) = N(x + F/α)."""
    f, x = branch(), gaussian(16, D)
    post = step("post")
    alpha = (2 * depth) ** 0.25
    close(step("deepnorm", depth)(x, f), post(x, times(1 / alpha, f)))
    on_sphere = math.sqrt(D) * x / length(x)
    # KEEL's inner norm is the identity at unit RMS.
    close(step("keel", depth, k=1)(on_sphere, f), post(on_sphere, times(1 / (2 * depth), f)))


@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.9])
def test_ngpt_is_post_norm_on_unit_branches(alpha):
    """n(h + α(b − h)) = n(h + α/(1−α)·b): Post-Norm with an output norm inside and a step of α/(1−α)."""
    f, x = branch(), gaussian(16, D)
    h = x / length(x)

    def unit_branch(x):
        return alpha / (1 - alpha) * f(x) / length(f(x))

    # α is held in single precision: a relative 6e-8 of it, in the whole as well.
    moved, expected = step("ngpt", alpha=alpha)(h, f), step("post", norm="l2", gain="none")(h, unit_branch)
    single = torch.finfo(torch.float32).eps
    torch.testing.assert_close(moved, expected, rtol=0, atol=2 * single * alpha / (1 - alpha))


def test_lns_on_linear_branches_is_pre_norm_with_a_decaying_step():
    matrix, x = gaussian(D, D), gaussian(16, D)

    def linear(x):
        return x @ matrix

    for k in range(5):
        close(step("lns", 5, k)(x, linear), step("pre")(x, times(1 / math.sqrt(k + 1), linear)))


def test_peri_is_pre_norm_with_a_step_that_forgets_the_size_of_the_branch():
    """N_out(c·F) = N_out(F): Peri's step is Pre-Norm's with Δt = 1/RMS(F)."""
    f, x = branch(), gaussian(16, D)
    seen = math.sqrt(D) * x / length(x)
    size = length(f(seen)) / math.sqrt(D)
    close(step("peri")(x, f), step("pre")(x, times(1 / size, f)))
    close(step("peri")(x, times(1000.0, f)), step("peri")(x, f))


def test_spannorm_without_attention_is_post_norm_of_the_mlp():
    """y = N(x) at unit RMS is x itself, so a block is one Post-Norm step through the MLP."""
    f, x = branch(), gaussian(16, D)
    on_sphere = math.sqrt(D) * x / length(x)
    span = blocks("spannorm", 2, eps=0.0)[1]
    close(span(on_sphere, [torch.zeros_like, f]), step("post")(on_sphere, f))


# -- GeoNorm: exponential map against retraction ---------------------------------------------------------------------

HALVINGS = [2.0**-k for k in range(3, 10)]


def gaps(update):
    """‖geodesic step − Post-Norm step‖/R for updates halved again and again, at unit RMS."""
    geo = step("geonorm", max_angle=math.pi, decay="none", learned=False)
    post = step("post", gain="none")
    x = gaussian(16, D, seed=3)
    x = math.sqrt(D) * x / length(x)
    g = update(x)
    return [length(geo(x, lambda x, h=h: h * g) - post(x, lambda x, h=h: h * g)) / math.sqrt(D) for h in HALVINGS], x, g


def tangent_part(x, g):
    return g - (x * g).sum(-1, keepdim=True) / length(x) ** 2 * x


def orders(found):
    return [float(torch.log2(a / b).mean()) for a, b in itertools.pairwise(found)]


def test_geonorm_and_post_norm_agree_to_second_order():
    found, x, g = gaps(lambda x: gaussian(16, D, seed=4))
    # The next term is smaller by the step: the measured order misses 2 by about h/ln 2, and is halved with it.
    assert orders(found)[-1] == pytest.approx(2.0, abs=4 * HALVINGS[-2])
    # Post-Norm turns by atan(t/(1 + r)) with r the radial part: t − atan(t/(1 + r)) = t·r + O(h³).
    t, r = length(tangent_part(x, g)) / math.sqrt(D), (x * g).sum(-1, keepdim=True) / D
    torch.testing.assert_close(found[-1] / HALVINGS[-1] ** 2, t * r.abs(), rtol=0, atol=10 * HALVINGS[-1])


def test_geonorm_and_post_norm_agree_to_third_order_across_the_state():
    found, _, g = gaps(lambda x: tangent_part(x, gaussian(16, D, seed=4)))
    # t − atan t = t³/3 − t⁵/5: the next term is smaller by 0.6 t², with t = h·‖v‖/‖x‖ up to 2h here.
    assert orders(found)[-1] == pytest.approx(3.0, abs=4 * HALVINGS[-2] ** 2 + 1e-5)
    for h, gap in zip(HALVINGS, found, strict=True):
        t = h * length(g) / math.sqrt(D)
        # Two points of a circle, t and atan t along it; the gap is the chord between them.
        torch.testing.assert_close(gap, 2 * torch.sin((t - torch.atan(t)) / 2), rtol=0, atol=20 * EPS64)
        torch.testing.assert_close(gap, t**3 / 3, rtol=0, atol=float((t**5).max()) / 5 + 20 * EPS64)


def test_geonorm_walks_exactly_where_the_retraction_only_aims():
    """The same great circle, another angle: t for the exponential map, atan t for the retraction."""
    geo = step("geonorm", max_angle=math.pi, decay="none", learned=False)
    post = step("post", gain="none")
    x = gaussian(16, D, seed=3)
    x = math.sqrt(D) * x / length(x)
    v = 0.5 * tangent_part(x, gaussian(16, D, seed=4))
    t = length(v) / math.sqrt(D)
    assert 0.5 < float(t.max()) < 1.2
    close(post(x, lambda x: v), geo(x, lambda x: torch.atan(t) / t * v))
    close(geo(x, lambda x: v), post(x, lambda x: torch.tan(t) / t * v))
