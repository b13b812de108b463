"""Stack: anyone's modules, clear refusals, needs met or declined."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normlab
from normlab import NormLabError, Stack
from normlab.models import MLP, Attention


class Foreign(nn.Module):
    """A sublayer that knows nothing of NormLab."""

    def __init__(self, dim: int = 8):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(dim, 12, bias=False), nn.Linear(12, dim, bias=False)

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return self.down_proj(self.up_proj(x).tanh()) * factor


PRE = normlab.scheme("pre").bind(depth=1, dim=8)


def blocks(depth: int = 2, count: int = 2) -> list[tuple[nn.Module, ...]]:
    return [tuple(Foreign() for _ in range(count)) for _ in range(depth)]


def test_arguments_go_to_the_first_branch_and_to_single_blocks():
    stack = Stack("pre", blocks(), 8)
    x = torch.randn(3, 8)
    assert not torch.allclose(stack(x, factor=0.0), stack(x))
    both = stack(x, per_block=[{"factor": 0.0}, {"factor": 0.0}])
    assert torch.equal(both, stack(x, factor=0.0))
    assert not torch.allclose(stack(x, per_block=[{"factor": 0.0}, {}]), both)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", normlab.list_schemes())
def test_any_number_of_branches(name, count):
    stack = Stack(name, blocks(count=count), 8, residual_only=True).init_()
    assert stack(torch.randn(2, 3, 8)).shape == (2, 3, 8)


UNEQUAL = [(Attention, MLP), (MLP,), (Attention, Attention, MLP), (Attention,)]


def unequal(scheme, **options):
    sizes = {Attention: 2, MLP: 12}
    modules = [tuple(kind(8, sizes[kind]) for kind in block) for block in UNEQUAL]
    return Stack(scheme, modules, 8, **options).init_(generator=torch.Generator().manual_seed(0), std=0.3)


@pytest.mark.parametrize("name", normlab.list_schemes())
def test_blocks_may_differ_in_their_branches(name):
    """Masks go to attention alone, and so do a scheme's norms on queries: a block may have none."""
    stack, x = unequal(name), torch.randn(2, 3, 8)
    assert [layer.block.branches for layer in stack.layers] == [2, 1, 3, 1]
    masked, plain = stack(x, causal=True), stack(x, causal=False)
    assert masked.shape == x.shape
    assert not torch.allclose(masked, plain)
    single = stack(x, causal=True, states=(states := []))
    assert torch.equal(single, masked)
    assert len(states) == 5


def test_constants_count_the_steps_of_unequal_blocks():
    bound = unequal("deepnorm").bound
    assert (bound.sublayers, bound.updates, bound.branches) == (7, 7, 3)
    assert [bound.branches_before(k) for k in range(5)] == [0, 2, 3, 6, 7]
    sites = [site for k in range(4) for site in bound._sites(k)]
    assert [site.step for site in sites] == list(range(7))
    assert [site.kind for site in sites] == ["attention", "mlp", "mlp", "attention", "attention", "mlp", "attention"]
    assert all(site.sublayers == 7 for site in sites)
    half = bound.scheme.refine(2).bind(depth=8, dim=8, branches=[kinds for kinds in bound.kinds for _ in range(2)])
    assert (half.sublayers, half.updates) == (7, 7)


@pytest.mark.parametrize("name", ["pre", "spannorm", "dual", "mhc"])
def test_hooks_on_steps_fire_and_change_nothing(name):
    stack, x = unequal(name).double(), torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    leaves = [x, *stack.parameters()]
    plain = torch.autograd.grad(stack(x).square().sum(), leaves)
    steps = [step for layer in stack.layers for step in layer.block.steps]
    heard = []
    for step in steps:
        step.register_forward_hook(lambda step, _args, output: heard.append((step, output.shape)))
    hooked = torch.autograd.grad(stack(x).square().sum(), leaves)
    assert [step for step, _ in heard] == steps
    assert len({shape for _, shape in heard}) == 1
    assert all(torch.equal(one, two) for one, two in zip(plain, hooked, strict=True))


def test_a_hook_on_a_step_may_replace_the_state():
    stack, x = Stack("pre", blocks(), 8), torch.randn(3, 8)
    whole = stack(x)
    steps = [step for layer in stack.layers for step in layer.block.steps]
    handles = [step.register_forward_hook(lambda _step, args, _output: args[0]) for step in steps]
    assert torch.equal(stack(x), stack.exit(x))
    for handle in handles:
        handle.remove()
    assert torch.equal(stack(x), whole)


def test_the_hidden_state_may_have_parameters():
    """An exit that weighs streams by learned numbers shows probes the same weighted sum."""
    stack, state = Stack("mhc", blocks(), 8), torch.randn(3, 4, 8)
    assert torch.allclose(stack.hidden(state), state.mean(-2))
    weights = nn.Parameter(torch.tensor([1.0, 0.0, 0.0, 2.0]))
    stack.exit.hidden = lambda state: (weights[:, None] * state).sum(-2)
    assert torch.allclose(stack.hidden(state), state[:, 0] + 2 * state[:, 3])


@pytest.mark.parametrize("name", ["mhc", "dual"])
def test_streams_are_not_split_over_their_width(name, tmp_path):
    """Tensor parallelism is refused in one line; a split over tokens passes."""
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        stack, x = Stack(name, blocks(), 8), torch.randn(2, 3, 8)
        for place in (Shard(2), Shard(-1)):
            with pytest.raises(NormLabError, match=r"tensor parallelism.*FSDP2") as caught:
                stack(distribute_tensor(x, mesh, [place]))
            assert "\n" not in str(caught.value)
        stack._check_input(distribute_tensor(x, mesh, [Shard(1)]))
        stack._check_input(distribute_tensor(x, mesh, [Replicate()]))
    finally:
        dist.destroy_process_group()


def test_a_later_pipeline_stage_takes_a_state_of_streams():
    stage = Stack("mhc", blocks(), 8, first=2, depth=4)
    assert stage(torch.randn(3, 4, 8)).shape == (3, 8)
    with pytest.raises(NormLabError, match=r"state of the part before it, \(\.\.\., 4, 8\)"):
        stage(torch.randn(3, 8))


def test_any_batch_shape():
    stack = Stack("dual", blocks(), 8)
    x = torch.randn(2, 3, 5, 8)
    assert torch.allclose(stack(x), stack(x.reshape(-1, 8)).reshape(x.shape), atol=1e-6)
    assert stack(torch.empty(0, 8)).shape == (0, 8)
    assert torch.allclose(stack(x.transpose(0, 2)), stack(x).transpose(0, 2), atol=1e-6)


@pytest.mark.parametrize("name", ["ngpt", "hybrid", "pre(qk_norm='head')"])
def test_needs_are_refused_by_modules_that_cannot_meet_them(name):
    with pytest.raises(NormLabError, match=r"needs .*, which Foreign, Foreign does not offer") as caught:
        Stack(name, blocks(), 8)
    assert "residual_only=True" in str(caught.value)
    assert Stack(name, blocks(), 8, residual_only=True)(torch.randn(2, 8)).isfinite().all()


def test_needs_are_met_once_by_modules_that_offer_them():
    modules = [(Attention(8, 2), MLP(8, 12))]
    stack = Stack("ngpt", modules, 8)
    assert stack.layers[0].branches[0].softmax_scale == 2.0
    with pytest.raises(NormLabError, match="already filled"):
        Stack("ngpt", modules, 8)


def test_a_module_of_a_users_own_can_meet_a_need():
    class Own(Foreign):
        offers = frozenset({"q-norm", "k-norm", "v-norm"})
        head_dim = 4

        def accept(self, need, module):
            setattr(self, need.replace("-", "_"), module)

    stack = Stack("hybrid", [(Own(), Foreign())], 8)
    assert stack.layers[0].branches[0].q_norm.dim == 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Stack("pre", [], 8), "expected one tuple of modules per block"),
        (lambda: Stack("pre", [(Foreign(),), ()], 8), "none of them empty"),
        (lambda: Stack("pre", [Foreign()], 8), "block 0 is Foreign; put its modules in a tuple"),
        # Not a block of three branches.
        (
            lambda: Stack("pre", [nn.Sequential(Foreign(), nn.GELU(), Foreign())], 8),
            "block 0 is Sequential; put its modules in a tuple",
        ),
        (lambda: Stack("pre", [(Foreign(), torch.tanh)], 8), "block 0 holds builtin_function_or_method; make it an nn"),
        (lambda: Stack("pre", iter(blocks()), 8), "got list_iterator; make it a list"),  # type: ignore[arg-type]
        (lambda: Stack("pre", blocks(), 8, kernels="tritn"), "unknown kernels 'tritn'; did you mean 'triton'"),
        (
            lambda: Stack("pre", blocks(), 8)(torch.ones(2, 8), per_block=[{}] * 3),
            "per_block: expected arguments for 2 blocks, got 3",
        ),
        (lambda: Stack("pre", [(Foreign(),), (Foreign(), Foreign())], 8, depth=3), "all of them alike"),
        (
            lambda: normlab.scheme("pre").bind(depth=2, dim=8, branches=[["mlp"]]),
            "branches of 2 blocks, got those of 1",
        ),
        (lambda: Stack("pre", [(Odd(),)], 8), "unknown branch_kind 'conv'"),
        (lambda: Stack("pre", blocks(), 8, depth=1), "2 blocks from block 0 on do not fit into a depth of 1"),
        (lambda: Stack("pre", blocks(), 8)(torch.randn(2, 7)), "the stack has width 8"),
        (lambda: Stack("spannorm", blocks(), 8, topology="parallel"), "spannorm has no parallel form"),
        (
            lambda: normlab.scheme("pre").bind(depth=1, dim=8).block(0)(torch.ones(8), [lambda x: x]),
            "2 branches, got 1",
        ),
        (lambda: Stack("pre", [(Foreign(), Tuple())], 8)(torch.ones(2, 8)), "must return one tensor, got tuple"),
        (lambda: Stack("pre", [(Foreign(), Narrow())], 8)(torch.ones(2, 8)), "must keep the shape"),
    ],
)
def test_bad_input_gets_one_clear_line(call, message):
    with pytest.raises(NormLabError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


class Odd(Foreign):
    branch_kind = "conv"


class Tuple(Foreign):
    def forward(self, x):
        return super().forward(x), None


class Narrow(Foreign):
    def forward(self, x):
        return x[..., :4]


def test_hooks_see_settled_states():
    stack = Stack("geonorm", blocks(), 8)
    seen: list[torch.Tensor] = []
    for layer in stack.layers:
        layer.register_forward_hook(lambda _module, _args, state: seen.append(stack.hidden(state)))
    x = torch.randn(4, 8)
    stack(x)
    assert [tuple(s.shape) for s in seen] == [(4, 8), (4, 8)]
    lengths = torch.stack([s.norm(dim=-1) for s in seen])
    assert torch.allclose(lengths, torch.full_like(lengths, 8**0.5), rtol=1e-6)


@pytest.mark.parametrize("name", ["geonorm", "dual"])
def test_states_are_collected_on_request(name):
    stack, x = Stack(name, blocks(3), 8).init_(), torch.randn(2, 3, 8)
    states: list[torch.Tensor] = []
    found = stack(x, states=states)
    assert len(states) == 4
    assert torch.equal(states[0], stack.entry(x))
    assert torch.equal(stack.exit(states[-1]), found)
    for before, layer, after in zip(states, stack.layers, states[1:], strict=False):
        assert torch.equal(layer(before), after)
    torch.testing.assert_close(found, stack(x))


def test_another_way_to_recompute_can_be_given():
    stack, calls = Stack("pre", blocks(), 8, checkpointing=True), []

    def recompute(function, *arguments):
        calls.append(len(arguments))
        return function(*arguments)

    stack.checkpoint_with = recompute
    stack(torch.randn(3, 8))
    assert calls == [1, 1]


def test_a_method_put_in_place_of_a_layers_own_is_called():
    stack, x, calls = Stack("peri", blocks(), 8).init_(), torch.randn(3, 8), []
    expected = stack(x)
    for layer in stack.layers:
        own = layer.forward
        layer.forward = lambda *a, own=own, **k: calls.append(1) or own(*a, **k)
    torch.testing.assert_close(stack(x), expected)
    assert calls == [1, 1]


def test_parallel_branches_may_share_one_read():
    """GPT-J's block: the same as two norms with the same gain, and one of them."""
    torch.manual_seed(3)
    block, shared = (normlab.scheme("pre").bind(depth=1, dim=8, topology="parallel").block(0) for _ in range(2))
    gain = torch.rand(8) + 0.5
    for one in (block, shared):
        for step in one.steps:
            step.read.weight.data = gain.clone()
    shared.share_read()
    x, branches = torch.randn(3, 8), [torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)]
    assert torch.equal(shared(x, branches), block(x, branches))
    assert len(list(shared.parameters())) == 1
    bounds = [lambda rms: 2 * rms, lambda rms: 3 * rms]
    assert shared.rms_bound(1.0, bounds) == block.rms_bound(1.0, bounds) < float("inf")
