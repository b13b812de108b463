"""Value residual: the equation, caches, packed documents, checkpointing, compilation, sharing of schemes, export."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import normlab
from normlab.errors import NormLabError
from normlab.models import Attention
from normlab.models.value_residual import FirstValues, ValueMix
from tests.matrix import parametrize

SIZES = {"depth": 3, "dim": 16, "heads": 4, "kv_heads": 2, "vocab_size": 32, "max_length": 32}
KINDS = ("mean", "learned")


def decoder(kind="learned", scatter=True, **options):
    torch.manual_seed(0)
    model = normlab.Decoder(normlab.DecoderConfig(value_residual=kind, **{**SIZES, **options}))
    if scatter:
        for name, parameter in model.named_parameters():
            if "value_mix" in name:
                parameter.data += 0.3 * torch.randn(2)
    return model


def tokens(rows=2, length=9):
    return torch.randint(0, 32, (rows, length), generator=torch.Generator().manual_seed(1))


def values_of(attention, x):
    rows = attention.kv_heads * attention.head_dim
    return (x @ attention.qkv.weight[-rows:].T).unflatten(-1, (attention.kv_heads, attention.head_dim))


def plain_attention(attention, x, v):
    """Without rotary: softmax attention of grouped queries with the values that are given."""
    heads, shared, width = attention.heads, attention.kv_heads, attention.head_dim
    q, k, _ = (x @ attention.qkv.weight.T).split([heads * width, shared * width, shared * width], -1)
    q, k = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part in (q, k))
    k, v = (part.repeat_interleave(heads // shared, dim=1) for part in (k, v.transpose(1, 2)))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).flatten(-2) @ attention.out.weight.T


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_attend_with_the_mixed_values(kind):
    """Block by block on random inputs: raw values of the first block, never mixed ones, and their gradients."""
    torch.manual_seed(0)
    first, second, third = (Attention(16, 4, kv_heads=2).double() for _ in range(3))
    for attention in (second, third):
        attention.value_mix = ValueMix(learned=kind == "learned").double()
    weights = [(0.5, 0.5), (0.5, 0.5)]
    if kind == "learned":
        weights = [(0.3, 0.9), (-0.4, 1.2)]
        for attention, pair in zip((second, third), weights, strict=True):
            attention.value_mix.weight.data.copy_(torch.tensor(pair))
    inputs = [torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    kept = FirstValues()
    ours = [a(x, first_values=kept) for a, x in zip((first, second, third), inputs, strict=True)]
    v1 = values_of(first, inputs[0])
    expected = [plain_attention(first, inputs[0], v1)]
    for attention, x, (one, two) in zip((second, third), inputs[1:], weights, strict=True):
        expected.append(plain_attention(attention, x, one * v1 + two * values_of(attention, x)))
    for mine, its in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-7)  # λ is stored in fp32 before it is widened
    leaves = [*inputs, first.qkv.weight, third.qkv.weight]
    grads = (torch.autograd.grad(sum(y.square().sum() for y in found), leaves) for found in (ours, expected))
    for mine, its in zip(*grads, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def test_nothing_changes_where_it_is_off_or_neutral():
    plain, neutral = decoder("none"), decoder("learned", scatter=False)
    for name, parameter in neutral.named_parameters():
        if "value_mix" in name:
            parameter.data.copy_(torch.tensor([0.0, 1.0]))
    neutral.load_state_dict(plain.state_dict(), strict=False)
    assert torch.equal(neutral(tokens()), plain(tokens()))
    assert not torch.allclose(decoder("mean")(tokens()), plain(tokens()), atol=1e-4)
    assert not any("value_mix" in name for name, _ in plain.named_parameters())


def test_parameters_are_two_numbers_a_later_block_without_decay():
    model = decoder(scatter=False)
    found = {name: p for name, p in model.named_parameters() if "value_mix" in name}
    assert [name.split(".")[2] for name in found] == ["1", "2"]
    assert all(p.tolist() == [0.5, 0.5] for p in found.values())
    decaying = [g for g in model.param_groups(lr=1.0, weight_decay=0.1) if g["weight_decay"]]
    assert not {id(p) for p in found.values()} & {id(p) for g in decaying for p in g["params"]}
    model.loss(tokens(), tokens()).backward()
    assert all(bool(p.grad.abs().min() > 0) for p in found.values())


@pytest.mark.parametrize("kind", KINDS)
def test_generation_with_a_cache_equals_that_without(kind):
    model = decoder(kind)
    cached, plain = (model.generate(tokens(), 8, temperature=0.0, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain)
    cache = model.new_cache(2, 9)
    with torch.no_grad():
        parts = torch.cat([model(part, cache=cache) for part in tokens().split([4, 1, 4], dim=1)], dim=1)
    torch.testing.assert_close(parts, model(tokens()).detach(), rtol=0, atol=1e-5)


def test_packed_documents_are_as_if_alone():
    model, documents = decoder(), torch.tensor([[0] * 4 + [1] * 5] * 2)
    packed = model(tokens(), documents=documents)
    alone = torch.cat([model(tokens()[:, :4]), model(tokens()[:, 4:])], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)


def test_checkpointing_changes_no_gradient():
    plain, saving = decoder(), decoder(checkpointing=True)
    for model in (plain, saving):
        model.loss(tokens(), tokens()).backward()
    for (name, one), (_, two) in zip(plain.named_parameters(), saving.named_parameters(), strict=True):
        assert torch.equal(one.grad, two.grad), name


@pytest.mark.full
@pytest.mark.parametrize("spec", ["post", "geonorm", "ngpt", "hybrid", "dual", "mhc", "attnres", "spannorm"])
def test_it_goes_with_every_kind_of_scheme(spec):
    model = decoder(scheme=spec)
    model.loss(tokens(), tokens()).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


# The compiler itself reads .grad of the states between layers, which are not leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@parametrize("whole", [True, False], quick=[False])
def test_compiled_models_agree_in_few_graphs(whole):
    model, graphs = decoder(depth=6), []
    expected = model(tokens()).detach()

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    if whole:
        found = torch.compile(model, fullgraph=True, backend=backend)(tokens())
    else:
        for layer in model.stack.layers:
            layer.compile(fullgraph=True, backend=backend)
        found = model(tokens())
    torch._dynamo.reset()
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=1e-5)
    assert len(graphs) <= (1 if whole else 3)


def test_other_models_and_hooks():
    encoder = normlab.Encoder(normlab.EncoderConfig(value_residual="mean", **SIZES))
    seen = []
    encoder.stack.layers[1].register_forward_hook(lambda *_: seen.append(1))
    assert encoder(tokens()).isfinite().all()
    assert seen == [1]


def test_copies_share_the_values():
    kept = FirstValues(torch.ones(2, requires_grad=True) * 2.0)
    assert copy.deepcopy(kept).values is kept.values


def test_wrong_use_gets_one_line():
    with pytest.raises(NormLabError, match="unknown value_residual 'half'"):
        normlab.DecoderConfig(value_residual="half", **SIZES)
    model = decoder()
    attention = model.stack.layers[1].branches[0]
    with pytest.raises(NormLabError, match="needs first_values"):
        attention(torch.randn(1, 3, 16))
    with pytest.raises(NormLabError, match="before the first one"):
        attention(torch.randn(1, 3, 16), first_values=FirstValues())
