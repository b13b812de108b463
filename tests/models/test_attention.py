"""Attention against softmax written out head by head, with and without a cache, and with every slot filled."""

import pytest
import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.models.attention import Attention
from normlab.models.cache import KVCache
from normlab.models.rotary import Table, rotary_table, rotate
from normlab.roles import find_roles

B, T, D = 2, 6, 12
EPS64 = torch.finfo(torch.float64).eps

# Numbers here are of order 1 to 10 and no sum has more than 50 terms; gradients add B·T of those. Roundings of two
# orders of summation differ by less than terms · eps of the magnitude: 50 · 12 · 10 eps.
TOLERANCE = {"rtol": 0.0, "atol": 6000 * EPS64}


def attention(seed: int = 0, **changes) -> Attention:
    torch.manual_seed(seed)
    return Attention(**{"dim": D, "heads": 4, "kv_heads": 2, "head_dim": 6} | changes).double()


def inputs(tokens: int = T) -> torch.Tensor:
    return torch.randn(B, tokens, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def table(positions: torch.Tensor, head_dim: int = 6) -> Table:
    return rotary_table(positions, head_dim, 100.0, dtype=torch.float64)


def causal_mask(tokens: int) -> torch.Tensor:
    return torch.tensor([[s <= t for s in range(tokens)] for t in range(tokens)])


class Scale(nn.Module):
    """A slot's filling that remembers what it saw."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor, dtype=torch.float64))
        self.saw: list[torch.Size] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.saw.append(x.shape)
        return self.factor * x


def written_out(layer: Attention, x: torch.Tensor, mask: torch.Tensor, rotary: Table | None, scale=None):
    """One head at a time, with an explicit softmax; `mask` is (T, T) or (B, T, T)."""
    H, G, Dh = layer.heads, layer.kv_heads, layer.head_dim
    fused = x @ layer.qkv.weight.T + (0 if layer.qkv.bias is None else layer.qkv.bias)
    pieces = fused.split(Dh, dim=-1)
    turn = (lambda y: y) if rotary is None else (lambda y: rotate(y.unsqueeze(2), rotary).squeeze(2))
    heads = []
    for h in range(H):
        shared = h // (H // G)
        q, k, v = turn(pieces[h]), turn(pieces[H + shared]), pieces[H + G + shared]
        scores = q @ k.transpose(1, 2) * (Dh**-0.5 if scale is None else scale)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        heads.append(weights @ v)
    return torch.cat(heads, -1) @ layer.out.weight.T + (0 if layer.out.bias is None else layer.out.bias)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_value_and_gradients_match_softmax_written_out(causal: bool, kv_heads: int, bias: bool):
    layer, x, rotary = attention(kv_heads=kv_heads, bias=bias), inputs().requires_grad_(), table(torch.arange(T))
    mask = causal_mask(T) if causal else torch.ones(T, T, dtype=torch.bool)
    ours, theirs = layer(x, rotary=rotary, causal=causal), written_out(layer, x, mask, rotary)
    torch.testing.assert_close(ours, theirs, **TOLERANCE)
    leaves = [x, *layer.parameters()]
    weights = torch.randn(ours.shape, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(ours, leaves, weights), torch.autograd.grad(theirs, leaves, weights), strict=True
    ):
        torch.testing.assert_close(a, b, **TOLERANCE)


def test_grouped_queries_equal_repeated_heads():
    grouped, full = attention(kv_heads=2), attention(kv_heads=4)
    q, k, v = grouped.qkv.weight.detach().unflatten(0, (-1, 6)).split([4, 2, 2])
    repeated = torch.cat([q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)]).flatten(0, 1)
    full.load_state_dict({"qkv.weight": repeated, "out.weight": grouped.out.weight})
    torch.testing.assert_close(grouped(inputs()), full(inputs()), **TOLERANCE)


@pytest.mark.parametrize("chunks", [(8,), (1,) * 8, (3, 1, 4), (2, 6)])
@torch.no_grad()
def test_a_cache_changes_nothing(chunks: tuple[int, ...]):
    layer, x, cache = attention(), inputs(8), KVCache(1, B, 8, 2, 6, dtype=torch.float64)
    parts, start = [], 0
    for length in chunks:
        positions = torch.arange(start, start + length)
        parts.append(layer(x[:, positions], rotary=table(positions), cache=cache[0]))
        cache.advance(length)
        start += length
    torch.testing.assert_close(torch.cat(parts, 1), layer(x, rotary=table(torch.arange(8))), **TOLERANCE)


def test_packed_documents_do_not_see_each_other():
    layer, x, lengths = attention(), inputs(7), (3, 4)
    document = torch.tensor([0] * 3 + [1] * 4)
    mask = ((document[:, None] == document[None]) & causal_mask(7))[None, None].expand(B, 1, 7, 7)
    positions = torch.cat([torch.arange(n) for n in lengths])
    packed = layer(x, rotary=table(positions.expand(B, 7)), mask=mask)
    alone = [layer(part, rotary=table(torch.arange(part.shape[1]))) for part in x.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), **TOLERANCE)


def test_a_mask_per_sequence_replaces_causality():
    layer, x = attention(), inputs()
    mask = torch.rand(B, T, T, generator=torch.Generator().manual_seed(2)) < 0.5
    mask |= torch.eye(T, dtype=torch.bool)
    torch.testing.assert_close(layer(x, mask=mask[:, None]), written_out(layer, x, mask, None), **TOLERANCE)


def test_norm_slots_act_before_rotary_on_whole_heads():
    layer, x, rotary = attention(), inputs(), table(torch.arange(T))
    plain = attention()
    slots = {"q-norm": Scale(0.5), "k-norm": Scale(3.0), "v-norm": Scale(-2.0)}
    for need, module in slots.items():
        layer.accept(need, module)
    with torch.no_grad():
        for rows, factor in ((slice(0, 24), 0.5), (slice(24, 36), 3.0), (slice(36, 48), -2.0)):
            plain.qkv.weight[rows] *= factor
    torch.testing.assert_close(layer(x, rotary=rotary), plain(x, rotary=rotary), **TOLERANCE)
    assert [module.saw for module in slots.values()] == [[(B, T, heads, 6)] for heads in (4, 2, 2)]
    assert {"q_norm.factor", "k_norm.factor", "v_norm.factor"} < set(layer.state_dict())


def test_the_slot_after_rotary_sees_rotated_queries_and_keys():
    class Cube(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x**3

    layer, x, rotary = attention(kv_heads=4), inputs(), table(torch.arange(T))
    layer.accept("qk-after-rotary", Cube())
    q, k, v = (x @ layer.qkv.weight.T).unflatten(-1, (12, 6)).chunk(3, dim=2)
    scores = torch.einsum("bthd,bshd->bhts", rotate(q, rotary) ** 3, rotate(k, rotary) ** 3) * 6**-0.5
    weights = scores.masked_fill(~causal_mask(T), -torch.inf).softmax(-1)
    expected = torch.einsum("bhts,bshd->bthd", weights, v).flatten(2) @ layer.out.weight.T
    torch.testing.assert_close(layer(x, rotary=rotary), expected, **TOLERANCE)


def test_softmax_scale_replaces_the_default():
    layer, x = attention(), inputs()
    layer.accept("softmax-scale", 6**0.5)
    torch.testing.assert_close(layer(x), written_out(layer, x, causal_mask(T), None, scale=6**0.5), **TOLERANCE)


def test_slots_refuse_strangers_seconds_and_wrong_fillings():
    layer = attention()
    layer.accept("q-norm", nn.Identity())
    with pytest.raises(NormLabError, match="already filled"):
        layer.accept("q-norm", nn.Identity())
    with pytest.raises(NormLabError, match="did you mean 'k-norm'"):
        layer.accept("k_norm", nn.Identity())
    with pytest.raises(NormLabError, match="expected an nn"):
        layer.accept("k-norm", 1.0)
    for wrong in (nn.Identity(), 0.0, float("nan")):
        with pytest.raises(NormLabError, match="expected a positive number"):
            layer.accept("softmax-scale", wrong)


def test_roles_cover_the_fused_matrix_in_unequal_parts():
    layer = attention(bias=True)
    roles = find_roles(layer)
    assert [(role.role, *role.view().shape) for role in roles] == [
        ("q", 24, 12),
        ("k", 12, 12),
        ("v", 12, 12),
        ("bias", 48),
        ("o", 12, 24),
        ("bias", 12),
    ]
    assert torch.equal(torch.cat([role.view() for role in roles[:3]]), layer.qkv.weight)


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16, torch.float32])
def test_an_fp32_stream_may_feed_other_weights(weights: torch.dtype):
    layer = attention().to(weights)
    layer.accept("q-norm", nn.RMSNorm(6, dtype=weights))
    update = layer(inputs().float(), rotary=rotary_table(torch.arange(T), 6, 100.0))
    assert update.dtype == weights
    assert update.isfinite().all()


def test_autocast_and_a_norm_that_answers_in_fp32():
    layer = attention().float()
    layer.accept("k-norm", nn.LayerNorm(6))
    with torch.autocast("cpu", torch.bfloat16):
        update = layer(inputs().float(), rotary=rotary_table(torch.arange(T), 6, 100.0))
    assert update.dtype == torch.bfloat16
    update.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_shapes_on_the_meta_device():
    with torch.device("meta"):
        layer = Attention(D, 3, kv_heads=1)
        rotary = rotary_table(torch.arange(T), layer.head_dim, 1e4)
        assert layer(torch.empty(B, T, D), rotary=rotary).shape == (B, T, D)


def test_compiles_as_one_graph():
    layer, x, rotary = attention(), inputs(), table(torch.arange(T))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, rotary=rotary), layer(x, rotary=rotary), **TOLERANCE)


@pytest.mark.parametrize(
    ("sizes", "advice"),
    [
        ({"heads": 5, "head_dim": None}, "try 4 heads"),
        ({"heads": 8, "kv_heads": 3}, "try 2"),
        ({"heads": 0}, "positive"),
        ({"kv_heads": 0}, "positive"),
        ({"head_dim": -1}, "positive"),
    ],
)
def test_refuses_bad_sizes_with_advice(sizes: dict, advice: str):
    with pytest.raises(NormLabError, match=advice) as caught:
        attention(**sizes)
    assert "\n" not in str(caught.value)


def test_another_mixer_takes_the_place_of_torchs():
    layer, x, seen = attention(), inputs(), []

    def mixer(q, k, v, mask, scale):
        seen.append((q.shape, k.shape, mask, scale))
        return layer._attend(q, k, v, None, True)

    assert torch.equal(layer(x, mask="anything", mixer=mixer), layer(x))
    assert seen == [((B, T, 4, 6), (B, T, 2, 6), "anything", 6**-0.5)]
    layer.accept("softmax-scale", 2.0)
    layer(x, mixer=mixer)
    assert seen[-1][-1] == 2.0
