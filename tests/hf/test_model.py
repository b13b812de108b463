"""The model class: the decoder's own numbers, in the library's outputs, files and formats."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import normlab
from normlab import DecoderConfig, NormLabError
from normlab.hf import NormLabConfig, NormLabForCausalLM
from tests.hf.small import LENGTH, SIZES, VOCABULARY, close, make, tokens
from tests.matrix import parametrize, quick_if

VARIANTS = {
    "geonorm": {}, "ngpt": {"scheme": "ngpt"}, "dual": {"scheme": "dual"}, "sphere": {"scheme": "pre(form='sphere')"},
    "parallel": {"scheme": "peri", "topology": "parallel"}, "tied": {"tied": True},
    "gelu": {"mlp": "gelu", "bias": True},
    "experts": {"scheme": "peri", "experts": 4}, "fp32-stream": {"stream": "fp32"},
    "values": {"value_residual": "learned"},
}  # fmt: skip


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def variant(request) -> NormLabForCausalLM:
    return make(**{"scheme": "geonorm", **request.param})


@pytest.mark.parametrize("scheme", normlab.list_schemes())
def test_it_is_the_decoder(scheme):
    model = make(scheme)
    torch.manual_seed(0)
    decoder = normlab.Decoder(model.config.decoder_config)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, model.decoder.get_parameter(name)), name
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, decoder(tokens()))


def test_saved_and_loaded_it_is_the_same(variant, tmp_path):
    variant.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    found, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(found, NormLabForCausalLM)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert found.config.decoder_config == variant.config.decoder_config
    assert torch.equal(found(tokens()).logits, variant(tokens()).logits)


def test_every_field_is_written_so_that_later_defaults_change_nothing(tmp_path):
    NormLabConfig().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "normlab"
    assert written["model"] == DecoderConfig().to_dict()
    assert AutoConfig.from_pretrained(tmp_path).decoder_config == DecoderConfig()


def test_sizes_answer_to_the_librarys_names():
    config = NormLabConfig(model=SIZES)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (32, 3, 4)
    assert (config.num_key_value_heads, config.head_dim, config.intermediate_size) == (2, 8, 128)
    assert (config.vocab_size, config.max_position_embeddings) == (VOCABULARY, 64)
    assert not config.tie_word_embeddings
    assert NormLabConfig(model={**SIZES, "tied": True}).tie_word_embeddings
    # What version 0.1 exported: tied, unless the scheme needs a head of its own.
    assert NormLabConfig(model={**SIZES, "tied": None}).tie_word_embeddings
    assert not NormLabConfig(model={**SIZES, "tied": None, "scheme": "ngpt"}).tie_word_embeddings
    assert config.get_text_config(decoder=True) is config


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"shceme": "pre"}, "did you mean 'scheme'"),
        ({"scheme": "perri"}, "did you mean 'peri'"),
        ({"depth": "3"}, "model.depth must be of type int"),
        ({"scheme": "ngpt", "tied": True}, "needs a head of its own"),
    ],
    ids=["field", "scheme", "type", "tied"],
)
def test_bad_configurations_are_refused_in_one_line(model, message):
    with pytest.raises(NormLabError, match=message) as caught:
        NormLabConfig(model=model)
    assert "\n" not in str(caught.value)


def test_labels_are_shifted_and_averaged_over_what_is_not_ignored(variant):
    labels = tokens().clone()
    labels[0, :5] = -100
    out = variant(tokens(), labels=labels)
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    if variant.decoder.config.experts:
        expected = expected + variant.decoder.router_loss()
    torch.testing.assert_close(out.loss, expected)
    out.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in variant.parameters())


def test_parts_of_a_step_add_up_where_the_trainer_counts_the_tokens():
    model, x = make(), tokens()
    whole = model(x, labels=x, num_items_in_batch=torch.tensor(2 * (LENGTH - 1))).loss
    parts = [model(row, labels=row, num_items_in_batch=torch.tensor(2 * (LENGTH - 1))).loss for row in x.split(1)]
    torch.testing.assert_close(whole, parts[0] + parts[1])
    torch.testing.assert_close(whole, model(x, labels=x).loss)


def test_hidden_states_are_the_stacks(variant):
    seen = []
    hooks = [layer.register_forward_hook(lambda *a: seen.append(a[-1])) for layer in variant.decoder.stack.layers]
    reference = variant(tokens()).logits
    for hook in hooks:
        hook.remove()
    out = variant(tokens(), output_hidden_states=True)
    entry = variant.decoder.stack.entry(variant.decoder.embedding(tokens()))
    assert torch.equal(out.logits, reference)
    assert [state.shape for state in out.hidden_states] == [(2, LENGTH, 32)] * 4
    expected = [variant.decoder.stack.hidden(state) for state in (entry, *seen[:-1])]
    assert all(torch.equal(a, b) for a, b in zip(out.hidden_states, expected, strict=False))
    assert torch.equal(variant.decoder.head(out.hidden_states[-1], variant.decoder.embedding.weight), out.logits)


def test_only_the_logits_that_are_kept_are_computed():
    model = make()
    full = model(tokens()).logits
    close(model(tokens(), logits_to_keep=1).logits, full[:, -1:])
    close(model(tokens(), logits_to_keep=torch.tensor([0, 3])).logits, full[:, [0, 3]])


def test_embeddings_may_stand_for_tokens():
    model = make()
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(tokens())).logits, model(tokens()).logits)
    for wrong in ({}, {"input_ids": tokens(), "inputs_embeds": model.get_input_embeddings()(tokens())}):
        with pytest.raises(NormLabError, match="input_ids or inputs_embeds"):
            model(**wrong)


def test_a_tuple_where_a_tuple_is_asked_for():
    logits, cache = make()(tokens(), return_dict=False)
    assert torch.equal(logits, make()(tokens()).logits)
    assert cache.get_seq_length() == LENGTH


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_for_the_rest(variant, side):
    pad, text = torch.zeros(2, 4, dtype=torch.long), slice(4, None) if side == "left" else slice(0, LENGTH)
    padded = torch.cat([pad, tokens()] if side == "left" else [tokens(), pad], 1)
    mask = (padded != 0).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = variant(padded, attention_mask=mask, position_ids=positions).logits
    assert found.isfinite().all()
    close(found[:, text], variant(tokens()).logits)


def test_packed_documents_do_not_see_each_other():
    model = make()
    first, second = tokens(1, 5), tokens(1, 7)[:, 2:]
    positions = torch.arange(5).repeat(2).unsqueeze(0)
    found = model(torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
    close(found[:, 5:], model(second).logits)


def test_eager_attention_gives_its_weights_and_the_same_logits(variant):
    reference = variant(tokens()).logits
    with pytest.raises(NormLabError, match="attn_implementation='eager'"):
        variant(tokens(), output_attentions=True)
    variant.set_attn_implementation("eager")
    out = variant(tokens(), output_attentions=True)
    close(out.logits, reference)
    assert [weights.shape for weights in out.attentions] == [(2, 4, LENGTH, LENGTH)] * 3
    for weights in out.attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, LENGTH))
        assert not weights.triu(1).any()


def test_a_backend_that_it_cannot_have_is_refused():
    with pytest.raises(ValueError, match="does not support Flash Attention"):
        make().set_attn_implementation("flash_attention_2")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
def test_flex_attention_is_the_same():
    model = make()
    with torch.no_grad():
        reference = model(tokens()).logits
        model.set_attn_implementation("flex_attention")
        close(model(tokens()).logits, reference)


CHECKPOINTED = [(name, reentrant) for name in VARIANTS for reentrant in (False, True)]
CHECKPOINTED.remove(("experts", True))  # refused: see below
CHECKPOINTED.remove(("values", True))


@quick_if(lambda name, reentrant: not reentrant or name in ("geonorm", "tied"))
@pytest.mark.parametrize(("name", "reentrant"), CHECKPOINTED)
def test_gradient_checkpointing_changes_memory_alone(name, reentrant):
    variant, plain = make(**{"scheme": "geonorm", **VARIANTS[name]}), {}
    for checkpointing in (False, True):
        if checkpointing:
            variant.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert variant.is_gradient_checkpointing == checkpointing
        variant.zero_grad()
        out = variant.train()(tokens(), labels=tokens(), use_cache=True)
        assert (out.past_key_values is None) == checkpointing
        out.loss.backward()
        found = {name: p.grad.clone() for name, p in variant.named_parameters()}
        plain = plain or found
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    variant.gradient_checkpointing_disable()
    assert not variant.decoder.stack.checkpointing


@pytest.mark.parametrize("options", [{"experts": 4}, {"value_residual": "learned"}], ids=["router", "first values"])
def test_checkpointing_that_would_lose_a_gradient_is_refused(options):
    model = make("peri", **options)
    with pytest.raises(NormLabError, match="use_reentrant=False"):
        model.gradient_checkpointing_enable({"use_reentrant": True})
    assert not model.is_gradient_checkpointing


def test_checkpointing_recomputes():
    model = make().train()
    model.gradient_checkpointing_enable()
    calls = []
    model.decoder.stack.layers[1].branches[0].register_forward_hook(lambda *_: calls.append(1))
    model(tokens(), labels=tokens()).loss.backward()
    assert len(calls) == 2


def test_a_cache_under_checkpointing_is_refused():
    model = make()
    cache = model(tokens()).past_key_values
    model.gradient_checkpointing_enable()
    with pytest.raises(NormLabError, match="exclude each other"):
        model(tokens(), past_key_values=cache)
    with torch.no_grad():
        assert model(tokens(), past_key_values=cache).past_key_values is cache


@pytest.mark.parametrize("scheme", ["geonorm", "ngpt", "peri"])
@pytest.mark.parametrize("mean", [True, False])
def test_a_vocabulary_grows_and_shrinks(scheme, mean, tmp_path):
    model = make(scheme)
    before = model(tokens()).logits
    assert model.resize_token_embeddings(VOCABULARY + 9, mean_resizing=mean).weight.shape == (VOCABULARY + 9, 32)
    grown = model(tokens()).logits
    assert grown.shape[-1] == model.config.vocab_size == VOCABULARY + 9
    assert grown.isfinite().all()
    close(grown[..., :VOCABULARY], before)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens()).logits, grown)
    model.resize_token_embeddings(VOCABULARY)
    close(model(tokens()).logits, before)
    assert model.resize_token_embeddings(pad_to_multiple_of=64).weight.shape[0] == 64
    with pytest.raises(NormLabError, match="at least 1 entry"):
        model.resize_token_embeddings(0)


def test_new_entries_are_the_mean_of_the_old_and_keep_the_constraint():
    plain, unit = make("peri"), make("ngpt")
    mean = plain.get_input_embeddings().weight.mean(0)
    plain.resize_token_embeddings(VOCABULARY + 2)
    torch.testing.assert_close(plain.get_input_embeddings().weight[-1], mean)
    unit.resize_token_embeddings(VOCABULARY + 2)
    torch.testing.assert_close(unit.get_input_embeddings().weight.norm(dim=-1), torch.ones(VOCABULARY + 2))
    torch.testing.assert_close(unit.get_output_embeddings().weight.norm(dim=-1), torch.ones(VOCABULARY + 2))


def test_weights_that_a_checkpoint_lacks_are_drawn_by_the_scheme(tmp_path):
    model = make("ngpt", init_std=None)
    state = model.state_dict()
    lacking = ["decoder.stack.layers.1.branches.0.qkv.weight", "decoder.head.logit_scale.weight"]
    kept = {name: tensor for name, tensor in state.items() if name not in lacking}
    model.save_pretrained(tmp_path, state_dict=kept)
    found, report = NormLabForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert sorted(report["missing_keys"]) == sorted(lacking)
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in kept.items())
    torch.testing.assert_close(found.get_parameter(lacking[0]).norm(dim=-1), torch.ones(64))
    assert not torch.equal(found.get_parameter(lacking[0]), state[lacking[0]])
    assert torch.equal(found.get_parameter(lacking[1]), state[lacking[1]])


def test_built_on_the_meta_device_it_can_be_filled_later():
    with torch.device("meta"):
        model = NormLabForCausalLM(NormLabConfig(model=SIZES))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    assert torch.equal(model.init_()(tokens()).logits, make("pre")(tokens()).logits)


def test_a_decoder_is_dressed_not_copied():
    torch.manual_seed(0)
    decoder = normlab.Decoder(DecoderConfig(**SIZES)).eval()
    model = NormLabForCausalLM.from_decoder(decoder, eos_token_id=3)
    assert model.decoder is decoder
    assert not model.training
    assert model.generation_config.eos_token_id == 3
    assert torch.equal(model(tokens()).logits, decoder(tokens()))


def test_a_width_that_rates_were_carried_to_keeps_its_logits(tmp_path):
    config = NormLabConfig(model={**SIZES, "scheme": "peri", "init_std": None, "tied": True}, base_dim=16)
    model = NormLabForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(found(tokens()).logits, model(tokens()).logits)
    hidden = found.decoder.features(tokens())
    close(found(tokens()).logits, F.linear(hidden, found.get_input_embeddings().weight) / 2)
    rates = {group["lr"] for group in found.param_groups(lr=1.0)}
    assert rates == {0.5, 1.0}


@parametrize("scheme", normlab.list_schemes(), quick=["pre", "post", "geonorm", "ngpt", "dual", "mhc"])
def test_bf16(scheme, tmp_path):
    model = make(scheme)
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    out = half(tokens(), labels=tokens())
    assert out.logits.dtype == torch.bfloat16
    assert out.logits.isfinite().all()
    # Random logits of two models correlate like 1/√(2 · 9 · 61); rounding to eight bits leaves them alike.
    alike = torch.corrcoef(torch.stack([out.logits.float().flatten(), model(tokens()).logits.flatten()]))[0, 1]
    assert alike > 0.95
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in half.parameters())


@pytest.mark.full
def test_it_is_one_graph():
    model = make(depth=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        close(compiled(tokens(), use_cache=False).logits, model(tokens()).logits)


@pytest.mark.full
@pytest.mark.parametrize("scheme", normlab.list_schemes())
def test_it_trains_compiled(scheme):
    torch.compiler.reset()
    model = make(scheme, depth=2)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out = compiled(tokens(), labels=tokens(), use_cache=False)
    close(out.logits, model(tokens()).logits, depth=2)
    out.loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_offloaded_weights_are_refused_not_guessed(tmp_path):
    from accelerate import disk_offload

    model = make()
    disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    with pytest.raises(NormLabError, match="offloaded or not loaded"):
        model(tokens())


def test_rules_are_the_schemes():
    model = make("ngpt")
    groups = model.param_groups(lr=0.1, weight_decay=0.5)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert all(group["weight_decay"] == 0.0 for group in groups)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(3.0)
    model.after_step()
    torch.testing.assert_close(model.get_input_embeddings().weight.norm(dim=-1), torch.ones(VOCABULARY))


def test_weights_that_the_files_lack_are_an_error(tmp_path):
    """transformers draws them at random and warns."""
    NormLabForCausalLM(NormLabConfig(model={"scheme": "pre", "depth": 1, "dim": 16, "heads": 2})).save_pretrained(
        tmp_path
    )
    weights = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in weights if name.endswith("down.weight"))
    save_file(
        {name: one for name, one in weights.items() if name != lost}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    for load in (NormLabForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(NormLabError, match=f"lacks one weight .the first is {lost}"):
            load(tmp_path)
    _, report = NormLabForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert list(report["missing_keys"]) == [lost]
