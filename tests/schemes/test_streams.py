"""Schemes with several residual streams: what they start as, symmetries, and what mixing can do to the streams."""

import math

import pytest
import torch

import normlab
from normlab.kernels.sinkhorn import sinkhorn
from normlab.norms import rms
from normlab.schemes.contract.streams import mix_streams
from normlab.testing.small import make_input, make_stack

from .agreement import with_gradients
from .small import EPS64, gaussian, network, pairs, run

N, D, DEPTH = 4, 8, 6


def scattered(spec, depth=DEPTH, dim=D, spread=0.7, **options):
    """A network whose coefficients are all random."""
    net = network(spec, depth, dim, **options)
    for seed, part in enumerate([net.entry, *net.blocks, net.exit]):
        for place, parameter in enumerate(part.parameters()):
            parameter.data += spread * gaussian(*parameter.shape, seed=1000 * seed + place)
    return net


# -- what they start as ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["mhc", "mhc(diagonal=8.0)", "mhc(streams=2)", "hy-v4", "glm-5-next"])
def test_manifold_connections_start_as_pre_norm(spec):
    """With W = 0 all streams stay equal and equal to Pre-Norm's state, but for the epsilons of the coefficients.

    A mixing multiplies by (1 + O(ε)), so do pre and post: at most 3·n·ε of the state in each of 2L sublayers, which
    later sublayers of slope about one pass on.
    """
    x, f = gaussian(3, D), pairs(DEPTH, D)
    ours, pre = run(network(spec, DEPTH, D), x, f), run(network("pre", DEPTH, D), x, f)
    torch.testing.assert_close(ours, pre, rtol=0, atol=10 * 2 * DEPTH * 3 * N * 1e-6)
    exact = run(network(spec, DEPTH, D, mix_eps=0.0), x, f)
    torch.testing.assert_close(exact, pre, rtol=0, atol=2000 * EPS64)


def test_random_weights_leave_the_start_near_pre_norm():
    x = make_input(dtype=torch.float64)
    # Sublayers start with the same weights under both.
    mhc, pre = (make_stack(spec, 6, std=0.3).double()(x).detach() for spec in ("mhc", "pre"))
    gap = float((mhc - pre).abs().max())
    # Logits have a size of α·std·√(nD) = 0.01·0.02·8, twelve times; more than the epsilons, since W is random.
    assert 1e-5 < gap < 0.05


# -- symmetries --------------------------------------------------------------------------------------------------------


def permute_(logits, order, dim, groups):
    """The logits for permuted streams: input blocks and outputs of every group."""
    n = len(order)
    rows, at = [], 0
    for size in groups:
        place = torch.arange(at, at + size)
        rows.append(place[order] if size == n else place.view(n, n)[order][:, order].flatten())
        at += size
    rows = torch.cat(rows)
    weight = logits.project.weight.data.view(-1, n, dim)[:, order].flatten(1)[rows]
    logits.project.weight.data.copy_(weight)
    logits.base.data.copy_(logits.base.data[rows])


@pytest.mark.parametrize("spec", ["mhc", "hy-v4"])
def test_streams_have_no_order(spec):
    """Permute all that belongs to the streams, and the result is the same."""
    x, f, order = gaussian(3, D), pairs(DEPTH, D), torch.tensor([2, 0, 3, 1])
    net, same = scattered(spec), scattered(spec)
    groups = [N, N, N * N][: 3 if spec == "mhc" else 2]
    for block in same.blocks:
        for step in block.steps:
            permute_(step.read.logits, order, D, groups)
    permute_(same.exit.logits, order, D, [N])
    torch.testing.assert_close(run(same, x, f), run(net, x, f), rtol=0, atol=5000 * EPS64)


# -- mixing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [0.1, 1.0, 3.0, 10.0, 30.0])
def test_columns_of_the_mixing_matrix_sum_to_one_at_any_logits(std):
    comb = sinkhorn(std * gaussian(4000, N, N, seed=3), 20, 1e-6)
    columns, rows = comb.sum(-2), comb.sum(-1)
    assert bool((comb >= 0).all())
    # The last operation divides by the sum plus ε: 1/(1 + ε/sum) with sums of at least about one half.
    assert float((columns - 1).abs().max()) <= 2e-6
    assert float(columns.max()) <= 1.0 + 4 * EPS64
    loose = float((rows - 1).abs().max())
    assert loose <= {0.1: 2e-6, 1.0: 1e-3}.get(std, 0.1)
    assert std < 3.0 or loose > 1e-2  # twenty rounds do not balance large logits


def test_the_right_side_never_expands_the_largest_stream_and_the_wrong_one_does():
    comb = sinkhorn(30.0 * gaussian(4000, N, N, seed=3), 20, 1e-6)
    x = gaussian(4000, N, D, seed=4)
    # Streams that all point the same way are the worst case for sums.
    for state in (x, x[:, :1].expand(-1, N, -1)):
        before = rms(state).amax(-2)
        assert bool((rms(mix_streams(comb, state)).amax(-2) <= before * (1 + 8 * EPS64)).all())
    wrong = rms(mix_streams(comb.mT, state)).amax(-2) / before
    assert float(wrong.max()) > 1.05


def test_equal_streams_pass_the_mixing_unchanged():
    comb = sinkhorn(3.0 * gaussian(50, N, N), 20, 1e-6)
    x = gaussian(50, 1, D).expand(-1, N, -1)
    torch.testing.assert_close(mix_streams(comb, x), x, rtol=2e-6, atol=0)


@pytest.mark.parametrize(("beta", "diagonal"), [(0, 0.25), (1, 0.475), (2, 0.711), (4, 0.948), (8, 0.999)])
def test_the_diagonal_bias_starts_between_average_and_identity(beta, diagonal):
    net = network(f"mhc(diagonal={float(beta)})", 1, D)
    comb = net.blocks[0].steps[0].read(gaussian(2, N, D))[2]
    assert comb.diagonal(dim1=-2, dim2=-1).flatten().tolist() == pytest.approx([diagonal] * 2 * N, abs=6e-4)


@pytest.mark.parametrize("spec", ["mhc", "hy-v4"])
def test_the_largest_stream_grows_by_at_most_twice_the_update(spec):
    """The bound behind the card's law, at random coefficients and large logits."""
    net = scattered(spec, spread=3.0)
    state = net.entry(gaussian(5, D))
    for block in net.blocks:
        for step in block.steps:
            f = 0.3 * gaussian(5, D, seed=9)
            after = step(state, lambda _, f=f: f)
            limit = rms(state).amax(-2) + (2 + 1e-6) * rms(f)
            assert bool((rms(after).amax(-2) <= limit * (1 + 16 * EPS64)).all())
            state = after


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["mhc", "hy-v4"])
def test_coefficients_are_full_precision_under_autocast_and_in_half_precision(spec):
    net = normlab.scheme(spec).bind(depth=2, dim=D).block(0)
    torch.manual_seed(0)
    for parameter in net.parameters():
        parameter.data.add_(0.5 * torch.randn(parameter.shape))
    state = torch.randn(3, N, D).bfloat16()
    _, *plain = net.steps[0].read(state.float())
    with torch.autocast("cpu", torch.bfloat16):
        seen, *coefficients = net.steps[0].read(state)
    assert seen.dtype == torch.bfloat16
    for one, two in zip(coefficients, plain, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


# -- what a read hands to its write ------------------------------------------------------------------------------------


def test_a_fused_stack_and_its_layers_one_by_one_agree():
    """The first read of a block is made by the block before it: what it computed must reach the write."""
    stack, x = make_stack("mhc", std=0.3).double(), make_input(dtype=torch.float64)
    for parameter in stack.parameters():
        parameter.data += 0.1 * gaussian(*parameter.shape)
    states: list[torch.Tensor] = []
    leaves = [x, *stack.parameters()]
    fused = with_gradients(stack(x), leaves)
    single = with_gradients(stack(x, states=states), leaves)
    assert len(states) == 5
    assert all(state.shape[-2:] == (N, x.shape[-1]) for state in states)
    for one, two in zip(fused, single, strict=True):
        assert torch.equal(one, two)


def test_options_that_do_not_fit_are_refused_in_one_line():
    for options, message in (
        ({"streams": 1}, "streams must be at least 2"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"mixing": "none", "rounds": 5}, "belong to mixing='sinkhorn'"),
        ({"magnitude": 0.0}, "magnitude must be positive"),
        ({"mix_eps": -1.0}, "mix_eps must not be negative"),
    ):
        with pytest.raises(normlab.NormLabError, match=message):
            normlab.scheme("mhc", **options)


def test_decay_and_width_rules_of_mixing_matrices():
    stack = make_stack("mhc")
    found = {role.name: role for role in stack.find_roles()}
    read = "layers.0.block.steps.0.read.logits"
    matrix = found[f"{read}.project.weight"]
    assert (matrix.role, matrix.fans) == ("mix", (N * 16, N * N + 2 * N))
    assert matrix.parameter.shape[matrix.model_axis] == N * 16
    scheme = stack.scheme
    assert scheme.decays(matrix)
    assert not scheme.decays(found[f"{read}.base"])
    assert not scheme.decays(found[f"{read}.scale"])
    # Whatever the std of other matrices.
    for std in (0.02, 0.5):
        assert scheme.initial_std(matrix, std, stack.bound) == 0.02
    assert math.isclose(float(matrix.parameter.detach().std()), 0.02, rel_tol=0.1)
