"""Hyper-connections: their start, symmetries, what bounds the streams, and the rules of their parameters."""

import pytest
import torch

import normlab
from normlab.norms import rms
from normlab.testing.small import make_input, make_stack

from .agreement import with_gradients
from .small import EPS64, gaussian, network, pairs, run

N, D, DEPTH = 4, 8, 6


def scattered(spec="hc", spread=0.4, **options):
    net = network(spec, DEPTH, D, **options)
    for seed, parameter in enumerate(p for block in net.blocks for p in block.parameters()):
        parameter.data += spread * gaussian(*parameter.shape, seed=seed)
    return net


@pytest.mark.parametrize("spec", ["hc", "shc", "hc(streams=1)", "hc(streams=3, tanh=False)"])
def test_hyper_connections_start_as_pre_norm(spec):
    """Output and gradients of the sublayers: every stream is Pre-Norm's state, and the final norm removes n.

    Without an epsilon, which a sum of n streams makes n² times smaller. Rounding grows by a few eps a sublayer.
    """
    stacks = [make_stack(normlab.scheme(name, eps=0.0), DEPTH).double() for name in (spec, "pre")]
    stacks[1].load_state_dict(stacks[0].state_dict(), strict=False)
    x, found = make_input(dtype=torch.float64), []
    for stack in stacks:
        sublayers = [p for layer in stack.layers for p in layer.branches.parameters()]
        found.append(with_gradients(stack(x), [x, *sublayers]))
    for ours, pre in zip(*found, strict=True):
        torch.testing.assert_close(ours, pre, rtol=0, atol=2000 * EPS64 * max(1.0, float(pre.detach().abs().max())))


def test_streams_have_no_order():
    x, f, order = gaussian(3, D), pairs(DEPTH, D), torch.tensor([2, 0, 3, 1])
    net, same = scattered(), scattered()
    for block in same.blocks:
        for step in block.steps:
            read = step.read
            read.read.data, read.write.data = read.read.data[order], read.write.data[order]
            read.mix.data = read.mix.data[order][:, order]
            weight = read.dynamic.project.weight.data
            weight[1:-1] = weight[1:-1][order]
    torch.testing.assert_close(run(same, x, f), run(net, x, f), rtol=1e-11, atol=1e-11)


def test_without_weights_the_dynamic_form_is_the_static_one():
    x, f = gaussian(3, D), pairs(DEPTH, D)
    dynamic, static = scattered(), network("shc", DEPTH, D)
    for block, plain in zip(dynamic.blocks, static.blocks, strict=True):
        for step in block.steps:
            step.read.dynamic.project.weight.data.zero_()
        kept = {name: value for name, value in block.state_dict().items() if "dynamic" not in name}
        plain.load_state_dict(kept)
    static.exit.load_state_dict(dynamic.exit.state_dict())
    assert torch.equal(run(dynamic, x, f), run(static, x, f))


@pytest.mark.parametrize("spec", ["hc", "shc", "hc(tanh=False)"])
def test_no_stream_leaves_its_bound(spec):
    """At random coefficients, for states that all point the same way, the worst case of a sum."""
    net = scattered(spec)
    for state in (net.entry(gaussian(50, D)), gaussian(50, N, D, seed=3), 1e3 * gaussian(50, N, D, seed=4)):
        for block in net.blocks:
            for step in block.steps:
                f = gaussian(50, D, seed=9)
                after, size = step(state, lambda _, f=f: f), float(rms(f).max())
                bound = step.rms_bound(float(rms(state).max()), lambda _, size=size: size)
                assert float(rms(after).max()) <= bound * (1 + 16 * EPS64)


def test_nothing_bounds_the_product_of_the_mixing_matrices():
    """A = 1.1·1 in every sublayer is a gain of 1.1^k, which mhc cannot have whatever its logits."""
    net = network("shc", DEPTH, D)
    for block in net.blocks:
        for step in block.steps:
            step.read.mix.data.mul_(1.1)
    state = net.entry(gaussian(3, D))
    after = state
    for block in net.blocks:
        after = block(after, [torch.zeros_like] * 2)
    torch.testing.assert_close(after, 1.1 ** (2 * DEPTH) * state, rtol=100 * EPS64, atol=0)


def test_rules_of_initialisation_and_decay():
    stack = make_stack("hc")
    found = {role.name: role for role in stack.find_roles()}
    read = "layers.1.block.steps.0.read"
    weight = found[f"{read}.dynamic.project.weight"]
    assert weight.role == "mix"
    assert stack.scheme.decays(weight)
    assert not weight.parameter.any()
    for name in ("read", "mix", "write", "dynamic.scale", "dynamic.norm.weight"):
        assert found[f"{read}.{name}"].role == "vector"
        assert not stack.scheme.decays(found[f"{read}.{name}"])
    # Of twelve sublayers the k-th reads stream k mod n.
    first = [int(step.read.read.argmax()) for layer in stack.layers for step in layer.block.steps]
    assert first == [0, 1, 2, 3, 0, 1, 2, 3]
    output = found["layers.0.branches.0.out.weight"]
    std = stack.scheme.initial_std(output, 0.02, stack.bound)
    assert std == pytest.approx(normlab.scheme("pre").initial_std(output, 0.02, stack.bound) / N**0.5)


def test_options_that_do_not_fit_are_refused_in_one_line():
    for options, message in (
        ({"streams": 0}, "streams must be at least 1"),
        ({"dynamic": False, "alpha": 0.1}, "belong to dynamic=True"),
    ):
        with pytest.raises(normlab.NormLabError, match=message):
            normlab.scheme("hc", **options)
