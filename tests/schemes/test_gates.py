"""Gates, residual scalars and attention over depth: what they reduce to, what bounds them, their optimiser rules."""

import math

import pytest
import torch

import normlab
from normlab.norms import rms
from normlab.testing.small import make_input, make_stack

from .agreement import with_gradients
from .small import EPS64, gaussian, network, nothing, pairs, run
from .test_streams import scattered

D, DEPTH = 8, 6


def same_as_pre(spec, atol, **options):
    x, f = gaussian(3, D), pairs(DEPTH, D)
    pre = run(network("pre", DEPTH, D), x, f)
    torch.testing.assert_close(run(network(spec, DEPTH, D, **options), x, f), pre, rtol=0, atol=atol)


# -- highway -----------------------------------------------------------------------------------------------------------


def test_an_open_gate_takes_the_branch_and_a_closed_one_the_state():
    net, x, f = network("highway(eps=0.0)", 1, D), gaussian(3, D), pairs(1, D)[0][0]
    step = net.blocks[0].steps[0]
    branch = step.update(x, f)
    for logit, expected in ((800.0, branch), (-800.0, x), (0.0, (x + branch) / 2)):
        step.write.gate.logit.data.fill_(logit)
        torch.testing.assert_close(step(x, f), expected, rtol=0, atol=4 * EPS64 * float(x.abs().max()))


def test_a_dynamic_gate_starts_as_a_static_one():
    x, f = gaussian(3, D), pairs(DEPTH, D)
    static, dynamic = (run(network("highway", DEPTH, D, gate=gate), x, f) for gate in ("static", "dynamic"))
    assert torch.equal(static, dynamic)


def test_no_channel_exceeds_state_and_update():
    """The bound in the largest channel, for any gate; the RMS has no such bound: channels may choose."""
    net = scattered("highway(gate='dynamic')", DEPTH, D, spread=3.0)
    for block in net.blocks:
        write, x, f = block.steps[0].write, gaussian(500, D, seed=1), gaussian(500, D, seed=2)
        y = write(x, f)
        assert bool((y.abs() <= torch.maximum(x.abs(), f.abs()) * (1 + 4 * EPS64)).all())
    write = network("highway", 1, 2).blocks[0].steps[0].write
    write.gate.logit.data.copy_(torch.tensor([-800.0, 800.0]))
    x, f = torch.tensor([[math.sqrt(2), 0.0], [0.0, math.sqrt(2)]], dtype=torch.float64)
    assert float(rms(write(x, f))) == pytest.approx(math.sqrt(2))
    assert write.rms_bound(1.0, 1.0) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("spec", ["highway", "highway(gate='dynamic')", "muse-spark", "highway(cut=3)"])
def test_the_bound_holds_for_random_gates_and_is_reached_by_equal_ones(spec):
    write = scattered(spec, 1, D, spread=2.0).blocks[0].steps[0].write
    for seed in range(20):
        x, f = gaussian(50, D, seed=seed), 2.0 * gaussian(50, D, seed=100 + seed)
        found, bound = rms(write(x, f)), write.rms_bound(float(rms(x).max()), float(rms(f).max()))
        assert float(found.max()) <= bound * (1 + 8 * EPS64)
    plain = network(spec, 1, D).blocks[0].steps[0].write
    if plain.gate.project is None:
        x = gaussian(1, D)
        size = float(rms(x))
        assert float(rms(plain(x, x))) == pytest.approx(plain.rms_bound(size, size), rel=1e-12)


def test_the_certificate_does_not_grow_with_the_depth():
    bounds = {depth: make_stack("highway", depth).certificate()[-1] for depth in (4, 40)}
    assert bounds[4] == pytest.approx(1.0, abs=1e-6)
    assert bounds[40] == pytest.approx(1.0, abs=1e-6)
    # α = √¾ and β = ½ add up along a line to ½/(1 − √¾) at most.
    assert make_stack("muse-spark", 40).certificate()[-1] == pytest.approx(0.5 / (1 - math.sqrt(0.75)), rel=1e-4)


def test_variance_is_kept_for_independent_branches():
    net, x = network("muse-spark", DEPTH, 4096), gaussian(1, 4096)
    state = x / rms(x)
    for k, block in enumerate(net.blocks):
        for i, step in enumerate(block.steps):
            state = step(state, lambda _, seed=2 * k + i: gaussian(1, 4096, seed=50 + seed))
    # Twelve inner products of independent vectors, each of relative size 1/64.
    assert float(rms(state)) == pytest.approx(1.0, abs=0.05)


# -- gated -------------------------------------------------------------------------------------------------------------


def test_gated_streams_start_as_pre_norm_with_half_the_input():
    x, f = gaussian(3, D), pairs(DEPTH, D)
    half = [tuple(lambda x, g=g: g(0.5 * x) for g in pair) for pair in f]
    ours, pre = run(network("gated(rank=3)", DEPTH, D), x, f), run(network("pre", DEPTH, D), x, half)
    torch.testing.assert_close(2 * ours, pre, rtol=0, atol=2000 * EPS64)


def test_what_a_branch_reads_is_bounded_and_blind_to_the_size_of_each_stream():
    net = scattered("gated(rank=3, eps=0.0)", DEPTH, D)
    read = net.blocks[1].steps[0].read
    state = gaussian(50, 4, D)
    sizes = torch.tensor([0.01, 1.0, 30.0, 1e4], dtype=torch.float64).view(4, 1)
    for one, two in zip(read(state), read(sizes * state), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=200 * EPS64 * float(one.abs().max()))
    assert float(rms(read(state)[0]).max()) <= read.rms_bound(math.inf)


# -- lambdas -----------------------------------------------------------------------------------------------------------

NEUTRAL = "lambdas(first_r=1.0, last_r=1.0, first_0=0.0, last_0=0.0, entry_norm=False)"


def test_neutral_scalars_are_pre_norm_bit_for_bit():
    """Gradients to rounding: what flows back into the state is added up in another order."""
    x = make_input(dtype=torch.float64)
    ours, pre = make_stack(NEUTRAL, std=0.3).double(), make_stack("pre", std=0.3).double()
    shared = [p for name, p in ours.named_parameters() if "lambda_" not in name]
    y, expected = ours(x), pre(x)
    assert torch.equal(y, expected)
    for a, b in zip(with_gradients(y, [x, *shared]), with_gradients(expected, [x, *pre.parameters()]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=500 * EPS64 * float(b.detach().abs().max()))


def test_initial_scalars_are_those_of_nanochat():
    """And with silent branches the state is 5.8, 21 and 219 times the embedding at 12, 24 and 48 blocks."""
    for depth, factor in ((12, 5.8), (24, 21), (48, 219)):
        net, x = network("nanochat", depth, D), gaussian(3, D)
        reads = [block.steps[0].read for block in net.blocks]
        expected = [(1.15 - 0.10 * i / (depth - 1), 0.20 - 0.15 * i / (depth - 1)) for i in range(depth)]
        # The parameters are made in float32.
        found = [(float(read.lambda_r), float(read.lambda_0)) for read in reads]
        assert sum(found, ()) == pytest.approx(sum(expected, ()), abs=1e-7)
        state = first = net.entry(x)
        for block in net.blocks:
            state = block(state, [nothing, nothing])
        ratio = (state[..., 0, :] / first[..., 0, :]).flatten()
        assert ratio.tolist() == pytest.approx([factor] * ratio.numel(), rel=0.01)
        assert torch.equal(state[..., 1, :], first[..., 1, :])


def test_a_single_block_has_the_first_values():
    read = network("lambdas", 1, D).blocks[0].steps[0].read
    assert (float(read.lambda_r), float(read.lambda_0)) == pytest.approx((1.15, 0.20), abs=1e-7)


def test_the_gradient_of_the_embedding_scalar_is_an_inner_product():
    net, f = network("lambdas", 1, D), pairs(1, D)[0]
    read = net.blocks[0].steps[0].read.requires_grad_()
    _, y = read(net.entry(gaussian(3, D)))
    g = gaussian(3, D, seed=4)
    (slope,) = torch.autograd.grad((y * g).sum(), [read.lambda_0])
    x0 = net.entry(gaussian(3, D))[..., 1, :]
    torch.testing.assert_close(slope, (g * x0).sum().view(1), rtol=0, atol=100 * EPS64)
    assert net.blocks[0](net.entry(gaussian(3, D)), f).isfinite().all()


def test_optimiser_groups_of_the_scalars():
    def groups(spec, **options):
        stack = make_stack(spec)
        names = {id(p): name.rpartition(".")[2] for name, p in stack.named_parameters()}
        found = stack.param_groups(lr=0.01, **options)
        return {names[id(p)]: (g["lr"], g["weight_decay"], g["name"]) for g in found for p in g["params"]}

    plain = groups("lambdas", weight_decay=0.1)
    assert plain["lambda_r"] == (0.01, 0.0, "no-decay")
    assert plain["lambda_0"] == (1.0, 0.0, "no-decay lr×100")
    nano = groups("nanochat", weight_decay=0.1)
    assert nano["lambda_r"] == (0.01, 0.05, "decay 0.05")
    assert nano["lambda_0"] == (1.0, 0.0, "no-decay lr×100")
    assert groups("nanochat")["lambda_r"] == (0.01, 0.0, "no-decay")
    assert groups("lambdas(lr_r=5.0)", weight_decay=0.1)["lambda_r"][0] == pytest.approx(0.05)


def test_matrices_of_gates_decay_and_their_logits_do_not():
    scheme = normlab.scheme("highway(gate='dynamic')")
    stack = make_stack(scheme)
    rules = {role.name.rpartition("write.")[2]: role for role in stack.find_roles() if ".write." in role.name}
    assert scheme.decays(rules["gate.project.weight"])
    assert not scheme.decays(rules["gate.logit"])
    assert not bool(rules["gate.project.weight"].parameter.any())
    roles = {role.name.rpartition("read.")[2]: role for role in make_stack("gated(rank=3)").find_roles()}
    assert [roles[f"{name}.weight"].role for name in ("down", "up", "inject")] == ["mix", "spread", "mix"]
    assert all(roles[f"{name}.weight"].model_axis == axis for name, axis in (("down", -1), ("up", -2), ("inject", -1)))


# -- attention over depth ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 4, 8, 100])
def test_equal_shares_are_pre_norm(groups):
    """With w = 0, but for the epsilon under a root of V/S in place of V: up to S²·ε/2 of relative size."""
    same_as_pre("attnres", atol=20 * 2 * DEPTH * 2e-6 * min(groups + 1, 13) ** 2, groups=groups)
    same_as_pre("attnres", atol=2e-6 * 10, groups=groups, eps=1e-12)


def test_shares_are_a_convex_combination_of_what_is_there():
    net = scattered("attnres(groups=3)", DEPTH, D)
    state, f = net.entry(gaussian(5, D)), pairs(DEPTH, D)
    for k, block in enumerate(net.blocks):
        for i, step in enumerate(block.steps):
            here, begins = k // 2 + 1, k % 2 == 0 and i == 0
            if (k, i) != (0, 0):
                shares = step.read.shares(state)
                torch.testing.assert_close(shares.sum(-1), torch.ones(5, dtype=torch.float64), rtol=4 * EPS64, atol=0)
                assert bool((shares > 0).sum(-1).eq(here + (not begins)).all())
            after = step(state, f[k][i])
            others = [j for j in range(4) if j != here]
            assert torch.equal(after[..., others, :], state[..., others, :])
            state = after
    assert bool((net.exit.shares(state) > 0).all())
    # The size of a source does not matter to its share.
    sizes = torch.tensor([1.0, 30.0, 0.1, 1e3], dtype=torch.float64).view(4, 1)
    torch.testing.assert_close(net.exit.shares(sizes * state), net.exit.shares(state), rtol=0, atol=1e-3)


def test_sources_have_no_order():
    net = scattered("attnres(groups=3)", DEPTH, D)
    state, order = gaussian(5, 4, D), torch.tensor([2, 0, 3, 1])
    permuted = net.exit.shares(state[..., order, :])
    torch.testing.assert_close(permuted, net.exit.shares(state)[..., order], rtol=0, atol=50 * EPS64)


@pytest.mark.parametrize("depth", [1, 3, 5, 7, 8, 9, 24])
def test_slots_of_unequal_groups(depth):
    """Every block has a slot, none is out of range, and the exit reads all that were written."""
    for groups in (1, 3, 8):
        bound = normlab.scheme("attnres", groups=groups).bind(depth=depth, dim=2)
        slots = [int(step.write.slot.value) for k in range(depth) for step in bound.block(k).steps]
        assert slots == sorted(slots)
        assert set(slots) == set(range(1, max(slots) + 1))
        assert max(slots) <= groups
        assert int(bound.exit().visible.value) == max(slots) + 1


def test_a_gate_that_is_all_but_closed_has_a_law():
    law = normlab.scheme("highway(temperature=0.001)").law(4)
    assert law.rms is not None
    assert law.rms(8) == 1.0


def test_bad_options_get_one_line():
    for spec, message in (
        ("attnres(groups=0)", "groups must be at least 1"),
        ("gated(rank=0)", "rank must be at least 1"),
        ("gated(streams=1)", "streams must be at least 2"),
        ("highway(temperature=0.0)", "temperature must be positive"),
        ("lambdas(lr_0=0.0)", "must be positive"),
        ("lambdas(decay_r=-1.0)", "decay_r must not be negative"),
    ):
        with pytest.raises(normlab.NormLabError, match=message) as caught:
            normlab.scheme(spec)
        assert "\n" not in str(caught.value)
