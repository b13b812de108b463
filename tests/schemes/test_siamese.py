"""SiameseNorm: what its two streams hold, what they reduce to, and the hybrid form inside attention."""

import math

import pytest
import torch

import normlab
from normlab.norms import rms
from normlab.testing.small import make_input, make_stack

from .small import EPS64, gaussian, network, pairs, run

D, DEPTH = 8, 12
FORMS = ["siamese", "siamese(form='hybrid')"]


def states(net, x, f):
    """The state after the entry and after every block, and what the branches returned."""
    heard = []

    def hear(branch):
        def call(x):
            heard.append(branch(x))
            return heard[-1]

        return call

    found = [net.entry(x)]
    for block, branches in zip(net.blocks, f, strict=True):
        found.append(block(found[-1], [hear(branch) for branch in branches]))
    return found, heard


@pytest.mark.parametrize("spec", FORMS)
def test_the_second_stream_collects_every_update_unscaled(spec):
    net, x = network(spec, DEPTH, D), gaussian(5, D)
    found, heard = states(net, x, pairs(DEPTH, D))
    total = x
    for update in heard:
        total = total + update
    assert torch.equal(normlab.scheme(spec).hidden(found[-1]), total)


def test_the_first_stream_stays_bounded_and_the_second_does_not():
    """p is a norm of gain one plus f/√(2(ℓ+1)); u adds up everything."""
    net, x = network("siamese", 48, D), gaussian(5, D)
    # All updates point the same way: the worst case.
    found, _ = states(net, x, [[lambda y: 3 * torch.ones_like(y)] * 2] * 48)
    for block, state in enumerate(found[1:]):
        assert float(rms(state[:, 0]).max()) <= 1 + 3 / math.sqrt(2 * (block + 1)) + 1e-12
    assert float(rms(found[-1][:, 1]).min()) > 3 * 96 - float(rms(x).max())


def test_a_silent_first_stream_leaves_pre_norm():
    """With gains of zero on p the branches read N_i(N_u(u)), which is N(u) but for the epsilon."""
    net, x, f = network("siamese", DEPTH, D, eps=0.0), gaussian(5, D), pairs(DEPTH, D)
    # A norm without epsilon has no value for p = 0: the gain alone is zero.
    for block in net.blocks:
        for step in block.steps:
            step.read.main.weight.data.zero_()
    net.exit.main.weight.data.zero_()
    torch.testing.assert_close(run(net, x, f), run(network("pre", DEPTH, D, eps=0.0), x, f), rtol=0, atol=2000 * EPS64)


@pytest.mark.parametrize("spec", FORMS)
def test_no_stream_leaves_its_bound(spec):
    net = network(spec, DEPTH, D)
    for seed, parameter in enumerate(p for block in net.blocks for p in block.parameters()):
        parameter.data += gaussian(*parameter.shape, seed=seed)
    state, bound = net.entry(gaussian(50, D)), float(rms(gaussian(50, D)).max())
    for block in net.blocks:
        for step in block.steps:
            f = gaussian(50, D, seed=9)
            state, size = step(state, lambda _, f=f: f), float(rms(f).max())
            bound = step.rms_bound(bound, lambda _, size=size: size)
            assert float(rms(state).max()) <= bound * (1 + 16 * EPS64)


def test_the_hybrid_form_puts_its_norms_inside_attention():
    stack = make_stack("siamese(form='hybrid')", 2)
    attention = stack.layers[0].branches[0]
    assert all(getattr(attention, name).dim == attention.head_dim for name in ("q_norm", "k_norm", "v_norm"))
    first, second = (step.read for step in stack.layers[1].block.steps)
    assert first.main is None
    assert torch.equal(first.scale.weight, torch.ones(stack.dim))
    assert second.main is not None
    assert second.scale is None
    assert stack(make_input()).isfinite().all()
    with pytest.raises(normlab.NormLabError, match="leave qk_norm off"):
        normlab.scheme("siamese", form="hybrid", qk_norm="head")


def test_simulation_is_refused_in_one_line():
    with pytest.raises(normlab.NormLabError, match="states no speed") as caught:
        normlab.simulate("siamese", tokens=4, dim=6)
    assert "\n" not in str(caught.value)
