"""Norms that a scheme keeps, and Jacobians that the size of the last matrix does not reach (facts 3.0, 5.1, 5.2)."""

import pytest
import torch
from torch.autograd.functional import jacobian

import normlab
from normlab.norms import rms

from .small import EPS64, branch, gaussian, network, pairs

# -- norms -----------------------------------------------------------------------------------------------------------


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
