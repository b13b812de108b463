"""What is left of a scheme without its branches, and which one it is without its constants (facts 3.0, 5.1, 5.2)."""

import math

import pytest
import torch

import normlab

from .small import EPS64, branch, gaussian, network, normalised, nothing, pairs, run, std_factor

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
