"""Compiled schemes: one graph, the same numbers, and one graph for all depths."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

import normlab
from normlab.testing.small import DIM, make_input, make_stack, weighted_sum
from normlab.testing.steps import check_compile
from tests.matrix import parametrize

# Dynamo itself looks at .grad of the states between compiled layers, which are not leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_same(eager: torch.nn.Module, compiled, x: torch.Tensor, tolerance: float) -> None:
    """Output and every gradient, relative to the largest entry."""
    found = []
    for run in (eager, compiled):
        eager.zero_grad()
        x.grad = None
        y = run(x)
        weighted_sum(y).backward()
        found.append([y.detach(), x.grad, *(p.grad.clone() for p in eager.parameters())])
    for one, two in zip(*found, strict=True):
        assert (one - two).abs().max() <= tolerance * one.abs().max().clamp_min(1e-3)


@pytest.mark.quick_schemes("pre")
def test_fullgraph_compile_gives_the_same_numbers(scheme):
    stack = make_stack(scheme, 2).double()
    x = make_input(dtype=torch.float64)
    # The same operations in another order: a few dozen roundings of 2^-53 through two blocks.
    assert_same(stack, torch.compile(stack, fullgraph=True, backend="aot_eager"), x, tolerance=1e-12)


@pytest.mark.quick_schemes("pre", "hybrid")
def test_one_graph_serves_every_depth(scheme):
    check_compile(scheme, blocks=48)


def graphs_of_parts(scheme: normlab.Scheme, depth: int, kind=normlab.DecoderConfig, **options) -> int:
    """Compile a model by `compile_parts` and hold its loss and gradients against the eager ones; returns graphs."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    sees = kind is normlab.VisionConfig
    sizes = {"depth": depth, "dim": DIM, "heads": 2, "hidden": 32, **({} if sees else {"vocab_size": 32})}
    model = kind(scheme=scheme, **sizes, **options).build().double()
    model.init_(generator=torch.Generator().manual_seed(0))
    inputs = torch.randn(2, 1, 8, 8, dtype=torch.float64) if sees else torch.randint(0, 32, (2, 8))
    targets = torch.randint(0, 10, (2,)) if sees else torch.randint(0, 32, (2, 8))
    found = []
    for compiles in (False, True):
        if compiles:
            model.compile_parts(dynamic=False, backend=backend, fullgraph=True)
        model.zero_grad()
        loss = model.loss(inputs, targets)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for one, two in zip(*found, strict=True):
        # The same operations, some in another order.
        assert (one - two).abs().max() <= 1e-12 * one.abs().max().clamp_min(1e-3)
    return len(graphs)


@pytest.mark.quick_schemes("pre")
def test_one_layer_is_compiled_for_all(scheme):
    assert graphs_of_parts(scheme, depth=12) <= 5


@parametrize(
    "options",
    [{"value_residual": "learned"}, {"experts": 4}, {"checkpointing": True}, {"topology": "parallel"}],
    quick=[{"checkpointing": True}],
)
def test_one_layer_is_compiled_for_all_of_a_decoder_with(options):
    # Entry, first, inner and last layer, head; a first layer whose values the others take has code of its own.
    assert graphs_of_parts(normlab.scheme("geonorm"), depth=3, **options) <= 5 + ("value_residual" in options)


@parametrize("kind", [normlab.EncoderConfig, normlab.VisionConfig], quick=[normlab.VisionConfig])
def test_one_layer_is_compiled_for_all_of_an_encoder_and_a_vision_transformer(kind):
    assert graphs_of_parts(normlab.scheme("geonorm"), 3, kind) <= 5


@pytest.mark.full
@pytest.mark.parametrize("name", ["pre", "geonorm", "spannorm", "ngpt", "dual"])
def test_inductor_gives_the_same_numbers(name):
    stack = make_stack(normlab.scheme(name), 2)
    # Inductor fuses and reorders in fp32: sums of 16 to 24 terms, two blocks deep, forward and backward.
    assert_same(
        stack, torch.compile(stack, fullgraph=True), make_input(), tolerance=200 * torch.finfo(torch.float32).eps
    )


def assert_compiles_whole(scheme: normlab.Scheme, **options) -> None:
    """A decoder in one graph, in fp32 and under autocast: the same logits."""
    sizes = {"depth": 2, "dim": DIM, "heads": 2, "hidden": 32, "vocab_size": 32}
    model = normlab.Decoder(normlab.DecoderConfig(scheme=scheme, **sizes, **options))
    tokens = torch.randint(0, 32, (2, 8))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for context in (torch.autocast("cpu", torch.bfloat16, enabled=False), torch.autocast("cpu", torch.bfloat16)):
        with context:
            expected, found = model(tokens), compiled(tokens)
        # The same kernels run in both; only where a cast is placed may differ, by a rounding of bf16.
        assert torch.allclose(expected.float(), found.float(), atol=2**-6 * float(expected.detach().abs().max()))


@pytest.mark.full
# Serial decoders with a stream in fp32 are compiled in tests/hf, with their gradients.
@pytest.mark.parametrize("topology", ["serial", "parallel"])
def test_decoders_compile_whole(scheme, topology):
    if topology not in scheme.topologies:
        pytest.skip("refused by the scheme, see test_parallel_blocks_work_or_are_refused")
    assert_compiles_whole(scheme, topology=topology, stream="bf16")


@pytest.mark.full
# Experts are a branch like another: one scheme that adds, one on the sphere, one of several streams.
@pytest.mark.parametrize("name", ["pre", "geonorm", "mhc"])
def test_decoders_with_experts_compile_whole(name):
    assert_compiles_whole(normlab.scheme(name), stream="fp32", experts=4)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_compiled_by_parts_has_a_loss_of_its_own(copied):
    tokens = torch.randint(32, (2, 8))
    config = normlab.DecoderConfig(scheme="geonorm", depth=2, dim=DIM, heads=2, hidden=32, vocab_size=32)
    model = config.build().init_().compile_parts(backend="eager")
    before = model.loss(tokens, tokens)
    twin = copied(model)
    assert torch.equal(twin.loss(tokens, tokens), before)
    with torch.no_grad():
        twin.head.weight.mul_(3.0)
    expected = torch.nn.functional.cross_entropy(twin(tokens).flatten(0, 1), tokens.flatten())
    assert (twin.loss(tokens, tokens) - expected).abs() < 1e-5
    assert torch.equal(model.loss(tokens, tokens), before)
    twin.loss(tokens, tokens).backward()
    assert model.head.weight.grad is None
    assert twin.head.weight.grad is not None
