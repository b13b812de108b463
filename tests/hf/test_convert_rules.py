"""A scheme's initialisation, parameter groups and constraint on a converted model."""

import math

import pytest
import torch

import normlab
from normlab import NormLabError, hf
from normlab.roles import find_roles
from tests.matrix import parametrize
from tests.utils.test_uninitialized import Careful, Careless, Gated

from .zoo import DEPTH, ZOO, answer, inputs

ARCHITECTURES = ("llama", "gpt2", "gemma2", "bert", "vit", "clip", "phi", "neox", "mixtral", "gptj", "opt")


def converted(name: str, scheme: str, **options):
    return hf.convert(ZOO[name].build(), scheme, init=True, roles=ZOO[name].roles, **options)


@parametrize("name", ARCHITECTURES, quick=("llama", "gpt2", "bert", "vit", "mixtral"))
def test_every_parameter_is_in_exactly_one_group(name):
    model = converted(name, "geonorm")
    groups = hf.rules(model).param_groups(lr=1e-3, weight_decay=0.1)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
    for group in groups:
        assert group["weight_decay"] == (0.1 if group["name"] == "decay" else 0.0)
        assert all((parameter.ndim >= 2) or group["name"] != "decay" for parameter in group["params"])


def test_a_parameter_of_the_scheme_that_nobody_initialises_is_refused():
    hf.convert(ZOO["llama"].build(), Gated(write=Careful), init=True)
    with pytest.raises(
        NormLabError, match=r"gated: .*write\.gate is not initialised: .*give Careless a reset_parameters"
    ):
        hf.convert(ZOO["llama"].build(), Gated(write=Careless), init=True)


def flat(weights) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in weights])


def test_output_projections_start_smaller_where_the_scheme_says_so():
    model = converted("llama", "spannorm")
    layers = model.model.layers
    outputs = flat(w for layer in layers for w in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight))
    inner = flat(w for layer in layers for w in (layer.self_attn.q_proj.weight, layer.mlp.up_proj.weight))
    expected = math.sqrt(DEPTH)
    # Each standard deviation is known to 1/√(2n); four of these on either side.
    spread = 4 * (1 / math.sqrt(2 * outputs.numel()) + 1 / math.sqrt(2 * inner.numel()))
    assert float(inner.std() / outputs.std()) == pytest.approx(expected, rel=spread)


def test_initialisation_resets_the_models_own_norms_too():
    model = ZOO["gemma2"].build()
    assert not any(bool((gain == 0).all()) for name, gain in model.named_parameters() if "layernorm" in name)
    fresh = hf.convert(model, "peri", init=True)
    gains = [role.parameter for role in find_roles(fresh) if role.role == "vector"]
    assert gains
    assert all(bool((gain == 0).all()) for gain in gains)


def test_the_constraint_holds_after_a_step_and_keeps_to_the_layers():
    model = converted("llama", "ngpt", residual_only=True)
    rules = hf.rules(model)
    optimiser = torch.optim.AdamW(rules.param_groups(lr=1e-2, weight_decay=0.1))
    embedding = model.model.embed_tokens.weight.clone()
    answer(model(**inputs(model))).square().mean().backward()
    optimiser.step()
    q = model.model.layers[0].self_attn.q_proj.weight
    assert not torch.allclose(q.norm(dim=1), torch.ones(len(q)), atol=1e-4)
    moved = model.model.embed_tokens.weight.clone()
    rules.after_step()
    torch.testing.assert_close(q.norm(dim=1), torch.ones(len(q)))
    assert torch.equal(model.model.embed_tokens.weight, moved)
    assert not torch.equal(moved, embedding)


def test_a_matrix_that_nobody_can_name_raises():
    model = hf.convert(ZOO["neox"].build(), "pre")
    with pytest.raises(NormLabError, match=r"no role for .*query_key_value"):
        hf.rules(model).param_groups(lr=1e-3)


def test_a_model_without_a_scheme_is_told_what_to_do():
    with pytest.raises(NormLabError, match=r"LlamaForCausalLM follows no scheme; convert it first"):
        hf.rules(ZOO["llama"].build())


def test_models_of_ours_offer_their_rules_themselves():
    decoder = normlab.Decoder(normlab.DecoderConfig(depth=2, dim=32, heads=2))
    assert hf.rules(decoder) is decoder


# -- the same weights in our decoder -------------------------------------------------------------------------------


def twins(scheme: str):
    """A converted Llama and our decoder with the same weights."""
    architecture = ZOO["llama"]
    model = hf.convert(architecture.build(tie_word_embeddings=True), scheme, init=True)
    config = normlab.DecoderConfig(
        scheme=hf.identify(model).scheme, depth=DEPTH, dim=32, heads=4, kv_heads=2, hidden=48, vocab_size=61, tied=True
    )
    decoder = normlab.Decoder(config)
    decoder.load_state_dict(translated(model.state_dict(), decoder.state_dict().keys()))
    return model, decoder


def translated(theirs, names):
    """Llama's weights under our names: q, k, v are one matrix, gate and up another; the steps have the same names."""
    ours = {}
    for name in names:
        place = name.replace("stack.layers.", "model.layers.").replace(".block.", ".normlab.block.")
        place = place.replace(".branches.0.", ".self_attn.").replace(".branches.1.", ".mlp.")
        if name.endswith("qkv.weight"):
            ours[name] = torch.cat([theirs[place.replace("qkv", f"{part}_proj")] for part in "qkv"])
        elif name.endswith("gate_up.weight"):
            ours[name] = torch.cat([theirs[place.replace("gate_up", f"{part}_proj")] for part in ("gate", "up")])
        else:
            place = place.replace("out.weight", "o_proj.weight").replace("down.weight", "down_proj.weight")
            place = place.replace("stack.exit.", "model.norm.").replace("stack.entry.", "model.layers.0.normlab.entry.")
            ours[name] = theirs[place] if place in theirs else theirs[with_own_norm(name, place, theirs)]
    return ours


def with_own_norm(name, place, theirs):
    """A norm that was the model's own lies one level deeper; embeddings have another name."""
    wrapped = place.replace(".weight", ".norm.weight")
    return wrapped if wrapped in theirs else "model.embed_tokens.weight"


@pytest.mark.parametrize("scheme", ["geonorm", "pre", "peri", "dual", "spannorm"])
def test_the_same_weights_give_the_same_logits(scheme):
    model, decoder = twins(scheme)
    tokens = inputs(model)["input_ids"]
    with torch.no_grad():
        ours, theirs = decoder(tokens), answer(model(input_ids=tokens))
    assert float(theirs.std()) > 1e-3
    # Rotary angles and softmax are computed in other orders: a few roundings a block, which norms pass on as they are.
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def test_they_learn_alike():
    model, decoder = twins("geonorm")
    tokens = torch.randint(0, 12, (4, 17), generator=torch.Generator().manual_seed(3))
    curves = []
    for one, rules in ((model, hf.rules(model)), (decoder, decoder)):
        optimiser = torch.optim.AdamW(rules.param_groups(lr=3e-3, weight_decay=0.1))
        losses = []
        for _ in range(15):
            logits = answer(one(tokens[:, :-1])) if one is model else one(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            rules.after_step()
            losses.append(float(loss.detach()))
        curves.append(losses)
    assert curves[0][-1] < curves[0][0] - 0.5
    # AdamW divides by the size of a gradient: where that is mere rounding the two walk apart, by less than a step.
    assert curves[0] == pytest.approx(curves[1], rel=2e-3)
