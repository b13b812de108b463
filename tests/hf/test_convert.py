"""Every scheme in every architecture: runs, learns, generates, is saved and loaded, compiled and checkpointed."""

import copy
import pickle
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import normlab
from normlab import NormLabError, hf
from normlab.hf.conversion.foreign_norm import ModelNorm
from normlab.norms import Norm
from normlab.roles import Part
from tests.matrix import parametrize

from .zoo import WIDTH, ZOO, answer, configuration, inputs

ARCHITECTURES = ("llama", "gemma2", "gpt2", "bert", "vit")
QUICK = {
    ("llama", "geonorm"), ("gpt2", "dual"), ("bert", "spannorm"), ("vit", "pre(form='sphere')"), ("gemma2", "ngpt"),
    ("llama", "mix"), ("gpt2", "hybrid"), ("bert", "geonorm"), ("vit", "post"), ("gemma2", "lns"),
}  # fmt: skip
SCHEMES = [*normlab.list_schemes(), "pre(form='sphere')"]
MATRIX = [(name, scheme) for name in ARCHITECTURES for scheme in SCHEMES]
# Every scheme in one architecture, every architecture under a few schemes.
COMPILED = [pair for pair in MATRIX if pair[0] == "llama" or pair in QUICK]


def converted(name: str, scheme: str, **options):
    """A fresh model under a scheme, of those that need more the residual part."""
    more = {"residual_only": bool(normlab.scheme(scheme).needs), "init": True, "roles": ZOO[name].roles}
    return hf.convert(ZOO[name].build(), scheme, **(more | options)).eval()


@parametrize(("name", "scheme"), MATRIX, quick=QUICK)
def test_every_scheme_runs_everywhere(name, scheme, tmp_path):
    model = converted(name, scheme)
    batch = inputs(model)
    logits = answer(model(**batch))
    assert logits.isfinite().all()
    logits.square().mean().backward()
    for where, parameter in model.named_parameters():
        assert parameter.grad is not None, where
        assert parameter.grad.isfinite().all(), where
    assert_generates(model, batch)
    assert_checkpoints(model, batch)
    model.save_pretrained(tmp_path)
    again = hf.load(tmp_path).eval()
    assert type(again) is type(model)
    assert str(hf.identify(again).scheme) == str(hf.identify(model).scheme)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert torch.equal(answer(again(**batch)), logits)


def assert_generates(model, batch) -> None:
    if model.can_generate():
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        texts = [model.generate(**batch, **options, use_cache=use_cache) for use_cache in (True, False)]
        assert torch.equal(*texts)


def assert_checkpoints(model, batch) -> None:
    model.train()
    found = []
    for switch in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        switch()
        model.zero_grad()
        torch.manual_seed(5)
        answer(model(**batch)).square().mean().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    model.gradient_checkpointing_disable()
    model.eval()
    assert all(map(torch.equal, *found))


@pytest.mark.full
@pytest.mark.parametrize(("name", "scheme"), COMPILED)
def test_compiled_in_one_graph(name, scheme, no_default_device):
    torch.compiler.reset()
    model = converted(name, scheme)
    batch = inputs(model)
    # The whole compiler once; for the rest what may break a graph in two.
    backend = "aot_eager" if (name, scheme) == ("llama", "geonorm") else "eager"
    expected, found = (
        gradients(run, model, batch) for run in (model, torch.compile(model, fullgraph=True, backend=backend))
    )
    # The compiler's decompositions sum in other orders: up to log2(width) roundings each in a dozen norms.
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def gradients(run, model, batch) -> list[torch.Tensor]:
    model.zero_grad()
    logits = answer(run(**batch))
    logits.square().mean().backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters())]


def test_layers_that_are_alike_share_what_was_read_from_them():
    layers = converted("llama", "pre").model.layers
    assert layers[0].normlab.structure is layers[1].normlab.structure


# -- norms -----------------------------------------------------------------------------------------------------------


def norms_of(model) -> dict[str, nn.Module]:
    return {path: part for path, part in model.named_modules() if isinstance(part, Norm | ModelNorm)}


def test_the_models_own_norms_stay_where_the_scheme_wants_them():
    model = ZOO["llama"].build()
    gain = model.model.layers[0].input_layernorm.weight.clone()
    with pytest.warns(hf.FunctionChanges):
        peri = hf.convert(model, "peri")
    step = peri.model.layers[0].normlab.block.steps[0]
    assert torch.equal(step.read.norm.weight, gain)
    assert isinstance(step.shape, normlab.norms.RMSNorm)
    assert isinstance(peri.model.norm, ModelNorm)


def test_norms_without_a_place_are_removed():
    model = converted("llama", "none")
    assert norms_of(model) == {}
    assert not any("norm.weight" in name for name in model.state_dict())


def test_new_norms_are_of_the_models_kind():
    made = [part for part in norms_of(converted("gpt2", "post")).values() if isinstance(part, Norm)]
    assert made
    assert all(type(part) is normlab.norms.LayerNorm and part.bias is not None and part.eps == 1e-5 for part in made)
    offsets = [part for part in norms_of(converted("gemma2", "post")).values() if isinstance(part, Norm)]
    assert offsets
    assert all(part.offset for part in offsets)


def test_a_kind_that_the_user_names_is_made_new():
    model = converted("llama", "pre(norm='layer')")
    assert all(type(part) is normlab.norms.LayerNorm for part in norms_of(model).values())


def test_without_a_final_norm_the_last_layer_applies_the_exit():
    model = converted("bert", "geonorm")
    last, first = model.bert.encoder.layer[-1].normlab, model.bert.encoder.layer[0].normlab
    assert isinstance(last.exit, Norm)
    assert isinstance(first.exit, nn.Identity)
    assert not isinstance(first.entry, nn.Identity)


def test_parallel_branches_behind_one_norm_keep_one():
    block = converted("phi", "peri").model.layers[0].normlab.block
    assert block.shares_read
    assert isinstance(block.steps[0].read, ModelNorm)
    assert isinstance(block.steps[1].read, nn.Identity)


def test_the_topology_can_be_changed():
    model = converted("neox", "spannorm", topology="serial")
    assert answer(model(**inputs(model))).isfinite().all()
    assert hf.identify(model).topology == "serial"
    parallel = converted("llama", "pre", topology="parallel")
    assert hf.identify(parallel).topology == "parallel"


def test_experts_work(tmp_path):
    model = converted("mixtral", "geonorm")
    batch = inputs(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(answer(hf.load(tmp_path).eval()(**batch)), answer(model(**batch)))


# -- what is refused, and what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "scheme", "reason"),
    [
        ("llama", "ngpt", "qk-after-rotary .* which LlamaDecoderLayer and LlamaForCausalLM cannot give;"),
        ("gpt2", "ngpt", "untied-head .* GPT2LMHeadModel cannot give: its head is tied to its embeddings;"),
        ("bert", "ngpt", "untied-head .* BertForMaskedLM cannot give: its head is tied"),
        ("vit", "ngpt", "untied-head .* ViTForImageClassification cannot give;"),
        ("clip", "ngpt", "logit-scale .* CLIPVisionModel cannot give;"),
        ("llama", "hybrid", r"v-norm .* which LlamaDecoderLayer cannot give; pass residual_only=True"),
        ("llama", "peri(qk_norm='head')", "q-norm"),
        ("neox", "spannorm", "spannorm has no parallel form"),
        ("neox", "hybrid", "hybrid"),
        ("llama", "geonrom", "did you mean 'geonorm'"),
    ],
)
def test_a_refusal_names_the_reason(name, scheme, reason):
    model = ZOO[name].build()
    with pytest.raises(NormLabError, match=reason) as caught:
        hf.convert(model, scheme, copy=False)
    assert "\n" not in str(caught.value)
    assert hf.identify(model)


def test_a_failing_role_is_found_before_anything_is_changed():
    model = ZOO["neox"].build()
    with pytest.raises(NormLabError, match=r"no role for .*query_key_value"):
        hf.convert(model, "geonorm", copy=False, init=True)
    assert not any(isinstance(part, hf.ConvertedLayer) for part in model.modules())


def test_a_converted_model_is_not_converted_again():
    with pytest.raises(NormLabError, match="converted already"):
        hf.convert(converted("llama", "pre"), "geonorm")


def test_a_module_of_your_own_is_sent_elsewhere():
    with pytest.raises(NormLabError, match=r"Sequential is not a transformers model; for your own see normlab\.Stack"):
        hf.convert(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "geonorm")


def test_arguments_that_a_layer_does_not_take_are_refused():
    layer = converted("falcon-40b", "pre", init=False).transformer.h[0]
    layer.normlab.structure.signature.bind((torch.zeros(1, 2, WIDTH), None, None), {"anything": 1})
    strict = hf.LayerStructure.of(Strict()).signature
    for args, kwargs in (((1, 2, 3), {}), ((1,), {"anything": 1})):
        with pytest.raises(TypeError, match="expected the arguments hidden, mask"):
            strict.bind(args, kwargs)


class Strict(nn.Module):
    def forward(self, hidden, mask=None):
        return hidden


def test_a_model_without_values_is_converted_before_it_has_some():
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(transformers.LlamaConfig(**ZOO["llama"].options))
    laid_out = hf.convert(empty, "geonorm")
    ready = converted("llama", "geonorm")
    shapes = [{name: value.shape for name, value in one.state_dict().items()} for one in (laid_out, ready)]
    assert shapes[0] == shapes[1]
    assert all(parameter.is_meta for parameter in laid_out.parameters())


def test_a_model_that_takes_more_than_tokens_needs_a_batch():
    config = transformers.BartConfig(
        vocab_size=61, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
    )  # fmt: skip
    model = transformers.BartModel(config)
    with pytest.raises(NormLabError, match="BartModel has 2 stacks"):
        hf.convert(model, "geonorm")
    with pytest.raises(NormLabError, match="BartEncoderLayer: its forward pass cannot be followed"):
        hf.convert(model, "geonorm", blocks="encoder.layers.*")
    with pytest.raises(NormLabError, match="takes more than tokens or images; pass batch="):
        hf.convert(model, "geonorm", blocks="encoder.layers.*", adapter=bart_encoder)
    batch = {"input_ids": torch.ones(1, 4, dtype=torch.long)}
    encoder = {"blocks": "encoder.layers.*", "adapter": bart_encoder, "batch": batch}
    assert hf.identify(model, **encoder).scheme.name == "post"
    found = hf.convert(model, "geonorm", init=True, **encoder)
    assert answer(found(**batch)).isfinite().all()
    assert isinstance(found.encoder.layers[0], hf.ConvertedLayer)
    assert not isinstance(found.decoder.layers[0], hf.ConvertedLayer)


def bart_encoder(layer) -> hf.LayerStructure:
    def attention(layer, call, x):
        return layer.self_attn(x, attention_mask=call["attention_mask"], **call["**"])[0]

    def mlp(layer, call, x):
        return layer.fc2(layer.activation_fn(layer.fc1(x)))

    return hf.LayerStructure.of(
        layer,
        hf.ResidualBranch(attention, write="self_attn_layer_norm"),
        hf.ResidualBranch(mlp, write="final_layer_norm"),
    )


def test_cross_attention_is_refused_when_it_is_called():
    model = converted("bert", "pre", roles=None)
    states = torch.zeros(2, 7, WIDTH)
    with pytest.raises(NormLabError, match="no cross-attention"):
        model.bert.encoder(states, encoder_hidden_states=states)


def test_trained_weights_under_another_scheme_warn():
    model = ZOO["llama"].build()
    with pytest.warns(hf.FunctionChanges, match="LlamaForCausalLM has trained weights: under geonorm"):
        hf.convert(model, "geonorm")
    fresh = transformers.LlamaForCausalLM(transformers.LlamaConfig(**ZOO["llama"].options))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf.convert(model, "pre")
        hf.convert(fresh, "geonorm")
        hf.convert(model, "geonorm", init=True)


def test_weights_without_gains_are_trained_if_they_come_from_a_file(tmp_path):
    fresh = transformers.OlmoForCausalLM(configuration("OlmoConfig", **ZOO["llama"].options))
    hf.convert(fresh, "post")
    fresh.save_pretrained(tmp_path)
    with pytest.warns(hf.FunctionChanges):
        hf.convert(transformers.OlmoForCausalLM.from_pretrained(tmp_path), "post")


# -- files and copies --------------------------------------------------------------------------------------------------


def test_the_library_alone_loses_the_scheme_and_that_is_noticed(tmp_path):
    converted("llama", "geonorm").save_pretrained(tmp_path)
    lost = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for asked in (hf.identify, hf.rules, lambda model: hf.convert(model, "pre")):
        with pytest.raises(NormLabError, match=r"under geonorm and is none; use normlab\.hf\.load"):
            asked(lost)


def test_an_ordinary_folder_is_refused(tmp_path):
    ZOO["llama"].build().save_pretrained(tmp_path)
    with pytest.raises(NormLabError, match="holds no converted model"):
        hf.load(tmp_path)


def test_a_folder_without_some_weights_is_refused(tmp_path):
    # transformers warns, and would leave `a` and `b` of the steps as uninitialised memory.
    converted("llama", "geonorm").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    lost = {name for name in whole if name.endswith(("write.a", "write.b"))}
    changed = {
        f"lacks {len(lost)} weights .the first is {min(lost)}": {k: v for k, v in whole.items() if k not in lost},
        "has one weight .the first is stray., which the model has not": whole | {"stray": torch.zeros(2)},
    }
    for message, weights in changed.items():
        save_file(weights, file, metadata={"format": "pt"})
        with pytest.raises(NormLabError, match=message) as caught:
            hf.load(tmp_path)
        assert "\n" not in str(caught.value)


def test_a_compiled_model_is_converted_as_what_it_wraps(tmp_path):
    model = ZOO["llama"].build()
    compiled = torch.compile(model, backend="eager")
    assert str(hf.identify(compiled)) == str(hf.identify(model))
    found = hf.convert(compiled, "geonorm", init=True)
    found.save_pretrained(tmp_path)
    assert hf.load(tmp_path).state_dict().keys() == hf.convert(model, "geonorm", init=True).state_dict().keys()
    # In place the wrapper stays what the user holds.
    assert hf.convert(compiled, "geonorm", init=True, copy=False) is compiled
    assert hf.identify(model).scheme.name == "geonorm"


def test_a_name_is_no_model():
    with pytest.raises(NormLabError, match="expected a model, got 'gpt2'; load it first"):
        hf.identify("gpt2")


def test_half_precision_and_its_fp32_gains_survive(tmp_path):
    model = hf.convert(ZOO["gpt2"].build().bfloat16(), "peri", init=True)
    gains = {name for name, value in model.named_parameters() if value.dtype == torch.float32}
    assert gains
    model.save_pretrained(tmp_path)
    again = hf.load(tmp_path)
    assert {name for name, value in again.named_parameters() if value.dtype == torch.float32} == gains
    batch = inputs(model)
    assert torch.equal(answer(again.eval()(**batch)), answer(model.eval()(**batch)))


@parametrize(
    "scheme", ["dual", "pre(form='sphere')", "geonorm", "post", "lns", "spannorm"], quick=["dual", "geonorm", "post"]
)
@parametrize("name", ["llama", "gpt2", "bert"], quick=["llama"])
def test_half_precision_runs(name, scheme):
    model = hf.convert(ZOO[name].build().bfloat16(), scheme, init=True)
    logits = answer(model(**inputs(model)))
    assert logits.dtype == torch.bfloat16
    logits.float().square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_roles_and_the_rest_of_the_conversion_survive(tmp_path):
    roles = {"*query_key_value.weight": [Part("q", 0, 32), Part("k", 32, 32), Part("v", 64, 32)]}
    model = converted("neox", "deepnorm", topology="serial", roles=roles)
    model.save_pretrained(tmp_path)
    again = hf.load(tmp_path)
    conversion = again.gpt_neox.layers[0].normlab.conversion
    assert conversion.roles == roles
    assert conversion.bound == model.gpt_neox.layers[0].normlab.conversion.bound


def test_copies_and_pickles_compute_the_same():
    model = converted("bert", "dual")
    batch = inputs(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(answer(again(**batch)), answer(model(**batch)))
        assert again.bert.encoder.layer[0].normlab is not model.bert.encoder.layer[0].normlab


def test_whoever_keeps_layers_whole_finds_them():
    model = converted("llama", "geonorm")
    assert type(model.model.layers[0]).__name__ in model._no_split_modules
    assert isinstance(model.model.layers[0], transformers.models.llama.modeling_llama.LlamaDecoderLayer)
