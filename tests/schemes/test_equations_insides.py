"""What a scheme asks for inside attention and MLP, against its equations: logits and all gradients, in float64."""

import math
from functools import partial

import pytest
import torch

import normlab

from . import transcription as written
from .agreement import tolerances, with_gradients
from .small import gaussian


def decoder(spec, **changes):
    sizes = {"depth": 2, "dim": 16, "heads": 4, "hidden": 10, "vocab_size": 11, "tied": False} | changes
    model = normlab.Decoder(normlab.DecoderConfig(scheme=spec, **sizes)).double()
    roles = {id(role.parameter): role.role for role in model.find_roles()}
    for seed, parameter in enumerate(model.parameters()):
        noise = gaussian(*parameter.shape, seed=7000 + seed)
        if roles[id(parameter)] == "vector":
            parameter.data += 0.3 * noise
        else:
            parameter.data = noise / math.sqrt(parameter.shape[-1])
    return model


def attention_weights(layer):
    q, kv = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    return (*layer.qkv.weight.split([q, kv, kv]), layer.out.weight, layer.head_dim)


def mlp_weights(layer):
    gate, up = layer.gate_up.weight.chunk(2)
    return gate, up, layer.down.weight


def compare_logits(model, transcribe):
    tokens = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    rest = [parameter for parameter in model.parameters() if parameter is not model.embedding.weight]

    def transcribed(embedding):
        return with_gradients(transcribe(embedding[tokens]), [embedding, *rest])

    embedding = model.embedding.weight
    ours = with_gradients(model(tokens), [embedding, *rest])
    allowed = tolerances(transcribed, embedding, 2 * model.config.depth)
    for mine, its, atol in zip(ours, transcribed(embedding), allowed, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=atol)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_ngpt_insides(kv_heads, eps):
    model = decoder("ngpt(alpha=0.3)", kv_heads=kv_heads)
    model = model if eps else decoder("ngpt(alpha=0.3, eps=0.0)", kv_heads=kv_heads)
    root = math.sqrt(16)

    def attention(layer, x):
        # Held at 1/√d, acts as one.
        s_qk = root * layer.qk_after_rotary.scale.weight.flatten()
        return written.ngpt_attention(x, *attention_weights(layer), s_qk, eps)

    def mlp(layer, x):
        return written.ngpt_mlp(x, *mlp_weights(layer), layer.up_scale.weight, layer.gate_scale[0].weight)

    def network(x):
        layers = model.stack.layers
        f = [(partial(attention, layer.branches[0]), partial(mlp, layer.branches[1])) for layer in layers]
        alphas = [[0.3 * root * step.write.alpha.weight for step in layer.block.steps] for layer in layers]
        hidden = written.ngpt(x, f, alphas, eps=eps)
        return root * model.head.logit_scale.weight * (hidden @ model.head.weight.T)

    compare_logits(model, network)


def test_ngpt_scales_start_as_published():
    """3.9: α 0.05 held at 1/√d; s_qk 1 at 1/√d; s_u, s_v 1 at 1; s_z 1 at 1/√d; softmax scale √d_h."""
    model = normlab.Decoder(normlab.DecoderConfig(scheme="ngpt", depth=2, dim=16, heads=4, hidden=64, vocab_size=11))
    for layer in model.stack.layers:
        attention, mlp = layer.branches
        held = [step.write.alpha for step in layer.block.steps]
        held += [attention.qk_after_rotary.scale, mlp.up_scale, mlp.gate_scale[0], model.head.logit_scale]
        expected = [(16, 0.05, 0.25), (16, 0.05, 0.25), (16, 1, 0.25), (64, 1, 1), (64, 1, 1), (11, 1, 0.25)]
        for scale, (count, acts, raw) in zip(held, expected, strict=True):
            assert scale.weight.numel() == count
            torch.testing.assert_close(scale.weight.detach(), torch.full_like(scale.weight, raw))
            torch.testing.assert_close(scale.value().detach(), torch.full_like(scale.weight, acts))
        assert attention.softmax_scale == pytest.approx(2.0)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("spec", ["hybrid", "hybrid(star=True)"])
def test_hybrid_insides(spec, kv_heads):
    model = decoder(spec, kv_heads=kv_heads)
    star = model.config.scheme.star

    def attention(layer, x):
        gains = layer.q_norm.weight, layer.k_norm.weight, layer.v_norm.weight
        assert all(gain.shape == (layer.head_dim,) for gain in gains)
        return written.hybrid_attention(x, *attention_weights(layer), *gains, eps=1e-6)

    def mlp(layer, x):
        return written.swiglu(x, *mlp_weights(layer))

    def network(x):
        layers = model.stack.layers
        f = [(partial(attention, layer.branches[0]), partial(mlp, layer.branches[1])) for layer in layers]
        steps = [layer.block.steps for layer in layers]
        norms = [pair[1].read if star and k == 0 else pair[0].write.norm for k, pair in enumerate(steps)]
        gains = [norm.weight for norm in norms]
        first = layers[0].block.steps[0].read.weight if star else None
        norm = partial(written.rms_norm, eps=1e-6)
        final = model.stack.exit.weight
        return written.hybrid(x, f, gains, final, star=star, first=first, norm=norm) @ model.head.weight.T

    compare_logits(model, network)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("kind", ["flat", "head"])
def test_queries_and_keys_normed_over_all_heads_or_each(kind, kv_heads):
    """3.3: OLMo 2 norms the flattened heads with a gain of H · d_h, others each head."""
    model = decoder(f"output(qk_norm='{kind}')", kv_heads=kv_heads)
    head_dim = 4

    def attention(layer, x):
        weights = attention_weights(layer)
        if kind == "head":
            gains = layer.q_norm.weight, layer.k_norm.weight
            return written.hybrid_attention(x, *weights, *gains, eps=1e-6)
        gains = layer.q_norm.norm.weight, layer.k_norm.norm.weight
        assert [len(gain) for gain in gains] == [4 * head_dim, kv_heads * head_dim]
        return written.flat_norm_attention(x, *weights, *gains, eps=1e-6)

    def mlp(layer, x):
        return written.swiglu(x, *mlp_weights(layer))

    def network(x):
        layers = model.stack.layers
        f = [(partial(attention, layer.branches[0]), partial(mlp, layer.branches[1])) for layer in layers]
        gains = [[step.shape.weight for step in layer.block.steps] for layer in layers]
        norm = partial(written.rms_norm, eps=1e-6)
        return written.output(x, f, gains, model.stack.exit.weight, norm=norm) @ model.head.weight.T

    compare_logits(model, network)
