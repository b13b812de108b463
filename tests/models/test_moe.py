"""Mixture of experts against a loop over tokens; routing measures; the grouped product and its derivatives."""

import copy
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normlab.errors import NormLabError
from normlab.models.moe import MoE, expert_linear, expert_outer
from normlab.roles import find_roles
from tests.matrix import parametrize

DIM, HIDDEN, EXPERTS = 16, 24, 5
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN, so that an element nobody wrote cannot pass by luck."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def moe(dtype: torch.dtype = torch.float64, **changes) -> MoE:
    torch.manual_seed(0)
    layer = MoE(**{"dim": DIM, "hidden": HIDDEN, "experts": EXPERTS, "shared_hidden": 10} | changes)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer.to(dtype)


def inputs(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*(shape or (3, 7, DIM)), generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
        dtype
    )


def in_double(layer: MoE) -> MoE:
    return copy.deepcopy(layer).double()


def expert_by_hand(layer: MoE, e: int, token: torch.Tensor) -> torch.Tensor:
    if layer.kind == "gelu":
        return layer.down[e] @ F.gelu(layer.up[e] @ token)
    raw = layer.gate_up[e] @ token
    return layer.down[e] @ (F.silu(raw[: layer.hidden]) * raw[layer.hidden :])


def token_by_token(layer: MoE, x: torch.Tensor) -> torch.Tensor:
    """Each token on its own, each of its experts on its own."""
    results = []
    for token in x.reshape(-1, layer.dim):
        p = (layer.router.weight @ token).softmax(-1)
        chosen = p.argsort(descending=True)[: layer.top_k].tolist()
        mass = sum(p[e] for e in chosen) if layer.renormalise else 1.0
        result = sum(p[e] / mass * expert_by_hand(layer, e, token) for e in chosen)
        results.append(result if layer.shared is None else result + layer.shared(token))
    return torch.stack(results).view_as(x)


def relative_error(measured: torch.Tensor, exact: torch.Tensor) -> float:
    return ((measured.double() - exact.double()).square().mean() / exact.double().square().mean()).sqrt().item()


def rounding_limit(layer: MoE, dtype: torch.dtype) -> float:
    """RMS error relative to RMS value, for weights of random sign."""
    # Rounded once each: gate, up, silu, their product, the result, the weighted sum, the sum with the shared expert.
    # 16-bit products are summed in fp32; others round each of their terms.
    roundings = 7 if dtype.itemsize == 2 else 7 + layer.dim + layer.hidden
    # Roundings of random sign add as squares, eps/√12 each; twice that for the luck of few tokens.
    return 2 * (roundings / 12) ** 0.5 * torch.finfo(dtype).eps


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("shared_hidden", [0, 10])
def test_value_and_gradients_match_a_loop_over_tokens(kind: str, renormalise: bool, shared_hidden: int):
    layer = moe(kind=kind, renormalise=renormalise, shared_hidden=shared_hidden)
    x = inputs().requires_grad_()
    ours, theirs = layer(x), token_by_token(layer, x)
    # Values of order 10, sums of 24 terms, and gradients that add the 21 tokens: 10 · 24 · 21 roundings, at most.
    limit = {"rtol": 0.0, "atol": 5000 * torch.finfo(torch.float64).eps}
    torch.testing.assert_close(ours, theirs, **limit)
    leaves = [x, *layer.parameters()]
    weights = inputs(*ours.shape)
    for a, b in zip(
        torch.autograd.grad(ours, leaves, weights), torch.autograd.grad(theirs, leaves, weights), strict=True
    ):
        torch.testing.assert_close(a, b, **limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [24, 13], ids=["grouped", "unaligned"])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_lower_precision_stays_within_its_roundings(dtype: torch.dtype, hidden: int, top_k: int):
    layer, x = moe(dtype, hidden=hidden, top_k=top_k), inputs(dtype=dtype)
    exact = token_by_token(in_double(layer), x.double())
    update = layer(x)
    assert update.dtype == dtype
    assert relative_error(update, exact) <= rounding_limit(layer, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_its_companions(dtype: torch.dtype):
    layer, x = moe(dtype), inputs(12, DIM, dtype=dtype)
    # Both sides may err.
    together, limit = layer(x), 2 * rounding_limit(layer, dtype)
    alone = torch.cat([layer(token[None]) for token in x])
    backwards = layer(x.flip(0)).flip(0)
    assert relative_error(alone, together) <= limit
    assert relative_error(backwards, together) <= limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
def test_experts_without_tokens_get_zero_gradients(dtype: torch.dtype, kind: str, poisoned_memory: None):
    layer = moe(dtype, kind=kind)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[[1, 3], 0] = 1.0
    x = inputs(dtype=dtype)
    x[..., 0] = x[..., 0].abs() + 1
    layer(x).sum().backward()
    assert layer.routing is not None
    assert layer.routing.load.tolist() == [0, 0.5, 0, 0.5, 0]
    for parameter in (layer.down, layer.gate_up if kind == "swiglu" else layer.up):
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        used = parameter.grad.flatten(1).abs().amax(1) > 0
        assert used.tolist() == [False, True, False, True, False]


def test_an_even_router_has_balance_one_and_z_log_squared():
    layer = moe()
    nn.init.zeros_(layer.router.weight)
    layer(inputs())
    assert layer.routing is not None
    # Products and sums of at most 21 numbers below 3.
    limit = 21 * 3 * torch.finfo(torch.float64).eps
    assert abs(layer.routing.balance_loss.item() - 1) <= limit
    assert abs(layer.routing.z_loss.item() - math.log(EXPERTS) ** 2) <= limit
    assert (layer.routing.importance - 1 / EXPERTS).abs().max() <= limit


def test_routing_measures_match_their_definitions():
    layer, x = moe(), inputs()
    layer(x)
    logits = x.reshape(-1, DIM) @ layer.router.weight.T
    p = logits.softmax(-1)
    counts = torch.zeros(EXPERTS, dtype=torch.float64)
    for row in p:
        for e in row.argsort(descending=True)[:2].tolist():
            counts[e] += 1
    load, importance = counts / counts.sum(), p.mean(0)
    routing = layer.routing
    assert routing is not None
    torch.testing.assert_close(routing.load, load)
    torch.testing.assert_close(routing.importance, importance)
    torch.testing.assert_close(routing.balance_loss, EXPERTS * (load * importance).sum())
    torch.testing.assert_close(routing.z_loss, torch.stack([row.exp().sum().log() ** 2 for row in logits]).mean())
    assert not routing.load.requires_grad
    assert not routing.importance.requires_grad


def test_collapse_has_balance_of_the_number_of_experts():
    layer, x = moe(top_k=1), inputs()
    with torch.no_grad():
        layer.router.weight.zero_()
        # Logits of at least 50 against 0: the others keep less than 5 e^-50 of the probability.
        layer.router.weight[2, 0] = 50.0
        x[..., 0] = x[..., 0].abs() + 1
    layer(x)
    assert layer.routing is not None
    assert layer.routing.balance_loss.item() == pytest.approx(EXPERTS, rel=1e-12)


def test_losses_reach_the_router_alone():
    layer = moe()
    layer(inputs())
    assert layer.routing is not None
    (layer.routing.balance_loss + layer.routing.z_loss).backward()
    assert {name for name, p in layer.named_parameters() if p.grad is not None} == {"router.weight"}


@parametrize("dtype", DTYPES, quick=[torch.bfloat16])
def test_compiles_as_one_graph(dtype: torch.dtype):
    layer, x = moe(dtype), inputs(dtype=dtype)
    update = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    compiled_routing = layer.routing
    assert compiled_routing is not None
    (update.sum() + compiled_routing.balance_loss + compiled_routing.z_loss).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    # The same operators run in the same order.
    assert torch.equal(update, layer(x))
    assert torch.equal(compiled_routing.load, layer.routing.load)


def test_autocast_multiplies_in_bf16_and_routes_in_fp32():
    layer, x = moe(torch.float32), inputs(dtype=torch.float32)
    layer(x)
    exact = layer.routing
    with torch.autocast("cpu", torch.bfloat16):
        update = layer(x)
    assert update.dtype == torch.bfloat16
    assert layer.routing is not None
    assert exact is not None
    assert torch.equal(layer.routing.importance, exact.importance)
    update.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_an_fp32_stream_may_feed_bf16_weights():
    assert moe(torch.bfloat16)(inputs(dtype=torch.float32)).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_on_the_meta_device(dtype: torch.dtype):
    with torch.device("meta"):
        layer = MoE(DIM, HIDDEN, EXPERTS, shared_hidden=10).to(dtype)
        assert layer(torch.empty(2, 3, DIM, dtype=dtype)).shape == (2, 3, DIM)


def test_an_empty_batch_is_no_accident():
    layer = moe(torch.float32)
    update = layer(inputs(0, DIM, dtype=torch.float32))
    assert update.shape == (0, DIM)
    assert layer.routing is not None
    assert layer.routing.balance_loss == 0
    assert layer.routing.z_loss == 0


class Times(nn.Module):
    def __init__(self, factor: float, width: int = HIDDEN) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((width,), factor, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


def test_slots_serve_the_experts_and_the_shared_one_has_its_own():
    layer, plain, x = moe(shared_hidden=HIDDEN), moe(shared_hidden=HIDDEN), inputs()
    layer.accept("gate-scale", Times(2.0))
    layer.accept("up-scale", Times(-3.0))
    with torch.no_grad():
        for rows, factor in ((slice(0, HIDDEN), 2.0), (slice(HIDDEN, None), -3.0)):
            plain.gate_up[:, rows] *= factor
            plain.shared.gate_up.weight[rows] *= factor
    # Values of order 100, sums of 24 terms.
    torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=2400 * torch.finfo(torch.float64).eps)
    scales = {name for name, _ in layer.named_parameters() if name.endswith("factor")}
    assert scales == {f"{at}{slot}_scale.factor" for at in ("", "shared.") for slot in ("gate", "up")}


def test_slots_refuse():
    layer = moe(shared_hidden=10)
    with pytest.raises(NormLabError, match="try shared_hidden=24"):
        layer.accept("up-scale", Times(1.0))
    assert layer.up_scale is None
    layer.accept("up-scale", nn.Tanh())
    assert layer.shared is not None
    assert isinstance(layer.shared.up_scale, nn.Tanh)
    with pytest.raises(NormLabError, match="already filled"):
        layer.accept("up-scale", nn.Tanh())
    with pytest.raises(NormLabError, match="unknown slot of MoE"):
        moe(kind="gelu").accept("gate-scale", nn.Tanh())


def test_roles_of_stacked_experts():
    roles = {(role.name, role.role): role for role in find_roles(moe())}
    shapes = {key: tuple(role.view().shape) for key, role in roles.items()}
    assert shapes == {
        ("gate_up", "gate"): (EXPERTS, HIDDEN, DIM),
        ("gate_up", "up"): (EXPERTS, HIDDEN, DIM),
        ("down", "down"): (EXPERTS, DIM, HIDDEN),
        ("router.weight", "router"): (EXPERTS, DIM),
        ("shared.gate_up.weight", "gate"): (10, DIM),
        ("shared.gate_up.weight", "up"): (10, DIM),
        ("shared.down.weight", "down"): (DIM, 10),
    }
    assert roles["gate_up", "up"].fans == (DIM, HIDDEN)
    assert roles["down", "down"].fans == (HIDDEN, DIM)
    assert [role.role for role in find_roles(moe(kind="gelu", shared_hidden=0))] == ["up", "down", "router"]


def test_a_used_layer_can_be_copied_and_saved():
    layer, x = moe(), inputs()
    update = layer(x)
    twin = copy.deepcopy(layer)
    assert twin.routing is None
    assert layer.routing is not None
    assert torch.equal(twin(x), update)


@pytest.mark.parametrize(
    ("sizes", "advice"),
    [
        ({"top_k": 6}, "expected at most 5; try 5"),
        ({"top_k": 0}, "positive"),
        ({"experts": 0}, "positive"),
        ({"kind": "glu"}, "did you mean"),
    ],
)
def test_refuses_bad_sizes(sizes: dict, advice: str):
    with pytest.raises(NormLabError, match=advice):
        moe(**sizes)


def product_arguments(dtype: torch.dtype, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x, y = (inputs(6, width, dtype=dtype).requires_grad_() for _ in range(2))
    weight = inputs(4, width, width, dtype=dtype).requires_grad_()
    return x, weight, torch.tensor([2, 2, 5, 6], dtype=torch.int32), y


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 8), (torch.float64, 3)])
def test_products_are_proper_operators(dtype: torch.dtype, width: int):
    x, weight, ends, y = product_arguments(dtype, width)
    torch.library.opcheck(expert_linear, (x, weight, ends))
    torch.library.opcheck(expert_outer, (y, x, ends))


def test_products_have_right_first_and_second_derivatives():
    x, weight, ends, y = product_arguments(torch.float64, 3)
    for function, arguments in (
        (lambda a, b: expert_linear(a, b, ends), (x, weight)),
        (lambda a, b: expert_outer(a, b, ends), (y, x)),
    ):
        assert torch.autograd.gradcheck(function, arguments)
        assert torch.autograd.gradgradcheck(function, arguments)


def test_weights_at_odd_addresses_are_multiplied_too():
    # Weights mapped from a file may start anywhere; torch's grouped product wants multiples of 16 bytes.
    x, ends = inputs(6, 8, dtype=torch.float32), torch.tensor([4, 6], dtype=torch.int32)
    odd = inputs(2 * 8 * 8 + 1, dtype=torch.float32)[1:].view(2, 8, 8)
    expected = torch.cat([x[:4] @ odd[0].T, x[4:] @ odd[1].T])
    # Two orders of adding 8 products of numbers below 4.
    assert (expert_linear(x, odd, ends) - expected).abs().max() <= 8 * 16 * torch.finfo(torch.float32).eps
