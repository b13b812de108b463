"""Matrices by name, given and read from networks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from normlab import Decoder, DecoderConfig
from normlab.dynamics.system.attention import LowRank, ParticleAttention
from normlab.dynamics.system.drift import RandomMLP
from normlab.dynamics.system.read_weights import read_attention
from normlab.dynamics.system.weights import FixedWeights, LayerWeights, RandomWeights, fixed_weights, make_attention
from normlab.errors import NormLabError
from tests.dynamics.particles import uniform

ONE = torch.tensor([1.0])


def _value(name: str, dim: int, **options) -> torch.Tensor:
    return RandomWeights(matrices=name, dim=dim, dtype=torch.float64, **options).layer(0).value[..., 0, :, :]


@pytest.mark.parametrize(("name", "variance"), [("gaussian", 1.0), ("kaiming", 2.0), ("symmetric", 1.0)])
def test_entries_have_the_size_that_the_name_says(name, variance):
    dim = 300
    value = _value(name, dim)
    # The variance of n normal numbers is off by √(2/n); a symmetric matrix has half as many, and a larger diagonal.
    assert float(value.square().mean()) * dim == pytest.approx(variance, rel=5 * math.sqrt(4) / dim + 2 / dim)
    assert abs(float(value.mean())) < 5 * math.sqrt(2 * variance / dim) / dim


def test_orthogonal_matrices_are_orthogonal():
    pair = RandomWeights(matrices="orthogonal", dim=20, dtype=torch.float64).layer(0)
    for matrix in (pair.score[0], pair.value[0]):
        torch.testing.assert_close(matrix @ matrix.mT, torch.eye(20, dtype=torch.float64))


def test_symmetric_scores_are_their_values():
    pair = RandomWeights(matrices="symmetric", dim=6, dtype=torch.float64).layer(0)
    assert torch.equal(pair.score, pair.value)
    assert torch.equal(pair.score, pair.score.mT)


def test_the_identity_is_no_matrix_at_all():
    assert RandomWeights(matrices="identity", dim=5).layer(3) == (None, None)
    assert not RandomWeights(matrices="identity", dim=5, redraw=True).per_layer


def test_heads_are_those_of_a_network_without_an_output_matrix():
    dim, heads = 8, 2
    weights = RandomWeights(matrices="gaussian", dim=dim, heads=heads, seeds=4, dtype=torch.float64)
    x = uniform(5, dim).theta
    found = make_attention(weights, beta=2 * ONE.double())(x)
    pair = weights.layer(0)
    q, k, v = (part.flatten(0, 1) for part in (pair.score.left, pair.score.right, pair.value.right))
    split = [(x @ matrix.mT).unflatten(-1, (heads, -1)).transpose(1, 2) for matrix in (q, k, v)]
    expected = nn.functional.scaled_dot_product_attention(*split, scale=2.0).transpose(1, 2).flatten(-2)
    torch.testing.assert_close(found, expected)


def test_identity_heads_mix_their_own_coordinates():
    x = uniform(5, 6).theta
    found = make_attention(RandomWeights(matrices="identity", dim=6, heads=3, dtype=torch.float64), beta=ONE.double())(
        x
    )
    for h in range(3):
        part = x[..., 2 * h : 2 * h + 2]
        torch.testing.assert_close(found[..., 2 * h : 2 * h + 2], ParticleAttention(beta=ONE.double())(part))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", ["gaussian", "orthogonal", "symmetric"])
def test_a_systems_weights_depend_on_its_own_seed_alone(name, heads):
    x = uniform(4, 6, systems=3).theta
    options = {"matrices": name, "dim": 6, "heads": heads, "dtype": torch.float64}
    together = make_attention(RandomWeights(**options, seeds=(5, 6, 7)), beta=ONE)(x)
    alone = make_attention(RandomWeights(**options, seeds=6), beta=ONE)(x[1:2])
    torch.testing.assert_close(together[1:2], alone)
    assert not torch.allclose(make_attention(RandomWeights(**options, seeds=7), beta=ONE)(x[1:2]), alone)


def test_layers_are_drawn_anew_and_the_same_again():
    weights = RandomWeights(matrices="gaussian", dim=4, redraw=True)
    assert torch.equal(weights.layer(3).score, weights.layer(3).score)
    assert not torch.equal(weights.layer(3).score, weights.layer(4).score)
    shared = RandomWeights(matrices="gaussian", dim=4)
    assert torch.equal(shared.layer(3).score, shared.layer(4).score)


def test_given_matrices_are_used_as_they_are():
    x = uniform(5, 3).theta
    q, k, v = torch.randn(3, 3, 3, dtype=torch.float64)
    beta = 2 * ONE.double()
    found = make_attention(fixed_weights(query=q, key=k, value=v), beta=beta)(x)
    weights = torch.softmax(2 * (x @ q.mT) @ (x @ k.mT).mT, -1)
    torch.testing.assert_close(found, weights @ x @ v.mT)
    for half in ({"query": q, "key": torch.eye(3).double()}, {"query": q}):
        torch.testing.assert_close(
            make_attention(fixed_weights(**half), beta=beta)(x), torch.softmax(2 * x @ q.mT @ x.mT, -1) @ x
        )
    torch.testing.assert_close(
        make_attention(fixed_weights(key=k), beta=beta)(x), torch.softmax(2 * x @ (x @ k.mT).mT, -1) @ x
    )
    torch.testing.assert_close(
        make_attention(fixed_weights(value=v), beta=beta)(x), torch.softmax(2 * x @ x.mT, -1) @ x @ v.mT
    )


def test_given_layers_end_with_the_last():
    pairs = [LayerWeights(value=k * torch.eye(2).unsqueeze(0)) for k in range(3)]
    weights = FixedWeights(pairs)
    assert weights.layer(3) is pairs[2]
    with pytest.raises(NormLabError, match="layer 4 has no weights: 3 layers were given"):
        weights.layer(4)
    assert FixedWeights(pairs[:1]).layer(100) is pairs[0]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RandomWeights(matrices="gausian", dim=4), "did you mean 'gaussian'"),  # type: ignore[arg-type]
        (lambda: RandomWeights(matrices="gaussian", dim=4, heads=3), "3 heads do not divide dimension 4"),
        (lambda: RandomWeights(matrices="gaussian", dim=4, heads=0), "0 heads"),
        (lambda: FixedWeights([]), "no matrices were given"),
        (lambda: fixed_weights(query=torch.ones(3, 4)), r"expected finite matrices .* got \(3, 4\)"),
        (lambda: fixed_weights(value=torch.full((2, 2), math.nan)), "expected finite matrices"),
        (
            lambda: fixed_weights(query=torch.ones(2, 3, 3), value=torch.ones(3, 3, 3)),
            "2 heads of queries and 3 of values",
        ),
        (lambda: RandomMLP(dim=3, hidden=0), "positive widths, got 3 and 0"),
        (lambda: read_attention(nn.Sequential(nn.Linear(3, 3))), "no role for"),
        (lambda: read_attention(nn.LayerNorm(3)), "no block with query"),
    ],
)
def test_bad_input_is_told_in_one_line(make, said):
    with pytest.raises(NormLabError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_an_mlp_returns_about_what_it_is_given_and_is_not_linear():
    x = uniform(64, 32, systems=2).theta
    drift = RandomMLP(dim=32, hidden=256, seeds=(1, 2))
    assert float(drift(x).norm(dim=-1).mean()) == pytest.approx(1.0, abs=0.2)
    assert float((drift(x) + drift(-x)).norm(dim=-1).mean()) > 0.3
    torch.testing.assert_close(drift(x)[1:], RandomMLP(dim=32, hidden=256, seeds=2)(x[1:]))
    torch.testing.assert_close(RandomMLP(dim=32, hidden=256, scale=0.5)(x), RandomMLP(dim=32, hidden=256)(x) / 2)


# -- networks -------------------------------------------------------------------------------------------------------


def _shaken(model: nn.Module) -> nn.Module:
    """Gains and all that initialisation would leave at one or zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" not in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize(
    "options", [{"scheme": "pre"}, {"scheme": "peri(gain='offset')"}, {"scheme": "pre(norm='layer')"}]
)
@torch.no_grad()
def test_a_decoder_is_read_as_it_computes(options):
    model = _shaken(Decoder(DecoderConfig(depth=3, dim=15, heads=3, kv_heads=1, head_dim=4, vocab_size=11, **options)))
    found = read_attention(model)
    assert (found.depth, found.dim, found.heads) == (3, 15, 3)
    x = uniform(6, 15).theta.float()
    # A LayerNorm's sphere lies across the constant direction.
    x = torch.nn.functional.normalize(x - x.mean(-1, keepdim=True), dim=-1)
    for k, layer in enumerate(model.stack.layers):
        size = model.stack.scheme.sphere(15)
        expected = layer.branches[0](layer.block.steps[0].read(5 * size * x)) / size
        ours = make_attention(found.weights, beta=found.beta * ONE, causal=True)(k)(x)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_gpt2_is_read_as_it_computes():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=12, n_head=3, n_layer=2, vocab_size=9, n_positions=8, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0,
        attn_pdrop=0.0, scale_attn_by_inverse_layer_idx=True, attn_implementation="eager",
    )  # fmt: skip
    model = _shaken(transformers.GPT2Model(config))
    found = read_attention(model)
    x = uniform(6, 12).theta.float()
    x = torch.nn.functional.normalize(x - x.mean(-1, keepdim=True), dim=-1)
    mask = torch.full((1, 1, 6, 6), -1e9).triu(1)
    for k, block in enumerate(model.h):
        expected = block.attn(block.ln_1(math.sqrt(12) * x), attention_mask=mask)[0] / math.sqrt(12)
        ours = make_attention(found.weights, beta=found.beta * ONE, causal=True)(k)(x)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_llama_shares_keys_among_heads():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, vocab_size=9,
        intermediate_size=8, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = _shaken(transformers.LlamaModel(config))
    found = read_attention(model)
    assert (found.depth, found.heads, found.beta) == (2, 4, pytest.approx(16 / math.sqrt(4)))
    assert any("rotary" in note for note in found.left_out)
    layer = model.layers[1]
    gain, attention = layer.input_layernorm.weight, layer.self_attn
    pair = found.weights.layer(1)
    assert isinstance(pair.score, LowRank)
    for h in range(4):
        q = attention.q_proj.weight.unflatten(0, (4, 4))[h] * gain
        k = attention.k_proj.weight.unflatten(0, (2, 4))[h // 2] * gain
        torch.testing.assert_close(pair.score.left[h].mT @ pair.score.right[h], q.mT @ k)
        v = attention.v_proj.weight.unflatten(0, (2, 4))[h // 2] * gain
        o = attention.o_proj.weight.unflatten(1, (4, 4))[:, h]
        torch.testing.assert_close(pair.value.left[h].mT @ pair.value.right[h], o @ v)


def test_what_is_left_out_is_said():
    model = Decoder(DecoderConfig(depth=1, dim=8, heads=2, vocab_size=5, scheme="ngpt"))
    assert any("norms of queries" in note for note in read_attention(model).left_out)
    assert read_attention(model).beta == pytest.approx(math.sqrt(4))


def test_a_run_is_read_from_its_folder(tmp_path, monkeypatch):
    from normlab.dynamics.system import read_weights as module

    model = Decoder(DecoderConfig(depth=2, dim=8, heads=2, vocab_size=5, scheme="pre"))
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr("normlab.train.run.load_run", lambda folder: type("Run", (), {"model": model})())
    assert module.read_attention(tmp_path).depth == 2
