"""Published configurations, built offline: any depth, any width, shrunk; nothing is special-cased."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import normlab
import normlab.hf
from normlab import NormLabError
from normlab.probes.blocks import find_stacks
from normlab.targets import config_sizes, hub, resolve
from tests.matrix import parametrize

CONFIGS = {
    "GPT2": ("AutoModelForCausalLM", 12, 96),
    "Llama": ("AutoModelForCausalLM", 32, 512),
    "Qwen3": ("AutoModelForCausalLM", 32, 512),
    "Gemma2": ("AutoModelForCausalLM", 26, 288),
    "Olmo2": ("AutoModelForCausalLM", 32, 512),
    "Mistral": ("AutoModelForCausalLM", 32, 512),
    "GPTNeoX": ("AutoModelForCausalLM", 44, 768),
    "Bert": ("AutoModelForMaskedLM", 12, 96),
    "ViT": ("AutoModelForImageClassification", 12, 96),
    "T5": ("AutoModelForSeq2SeqLM", 6, 64),
    # Not in anybody's list: what was never looked at while this was written must go the same way.
    "Bart": ("AutoModelForSeq2SeqLM", 12, 128),
    "OPT": ("AutoModelForCausalLM", 12, 96),
    "Mixtral": ("AutoModelForCausalLM", 32, 512),
}
"""What is made of it, its own depth, and its width at an eighth."""

TINY = {"length": 6, "batch_size": 2}


def config_of(name: str, **options):
    return getattr(transformers, f"{name}Config")(**options)


def gradients(model) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]


@parametrize("name", CONFIGS, quick=["GPT2", "Bert", "T5", "ViT"])
def test_every_architecture_shrinks_builds_and_learns(name):
    makes, depth, width = CONFIGS[name]
    config = config_of(name)
    before = config.to_dict()
    target = resolve(config, shrink=8, **TINY)
    assert (target.kind, target.depth, target.width) == ("hugging face", depth, width)
    assert target._purpose.makes == makes
    assert target.resizable == {"depth", "width"}
    assert config.to_dict() == before, "the user's configuration is theirs"
    assert "(--shrink 8)" in target.notes[0]
    model = target.build(depth=2)
    assert type(model) is type(getattr(transformers, makes).from_config(model.config))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    loss = target.loss(model, next(target.batches()))
    loss.backward()
    assert loss.isfinite()
    assert gradients(model)
    assert all(grad.isfinite().all() for grad in gradients(model))
    guess = math.log(64) if target.unigram else math.log(2)
    # Logits of variance one, with which T5 starts, cost half a nat above a guess and a quarter nat either way; a head
    # that is also the embedding, as Gemma's, echoes the token it was given and so bets on the wrong one.
    tied = getattr(model.config, "tie_word_embeddings", False)
    assert loss.item() == pytest.approx(guess, abs=2.5 if tied else 1.25)


@pytest.mark.full
@pytest.mark.parametrize("factor", [4, 16])
def test_shrinking_keeps_what_the_blocks_do_to_a_state(factor):
    """The gain of every matrix, and so the size of the state, is that of the model at its own width."""

    def look(target) -> list[float]:
        model = target.build(depth=3)
        with torch.no_grad(), normlab.probe(model) as seen:
            target.loss(model, next(target.batches()))
        return seen.profile.rms[1:]

    config = config_of(
        "Llama", hidden_size=1024, intermediate_size=2752, num_attention_heads=16, num_key_value_heads=16
    )
    whole, small = look(resolve(config, **TINY)), look(resolve(config, shrink=factor, **TINY))
    # A gain is wrong by 1/√width of one matrix, 0.13 at 64, and a block multiplies two or three.
    assert small == pytest.approx(whole, rel=0.2)
    assert "initializer_range" not in " ".join(resolve(config, shrink=1, **TINY).notes)


@parametrize("name", CONFIGS, quick=["T5", "ViT"])
def test_every_depth_can_be_had(name):
    target = resolve(config_of(name), shrink=8, **TINY)
    for depth in (6, 12, 24, 48):
        built = [len(stack.blocks) for stack in find_stacks(target._laid_out(target._sized(depth, target.width)))]
        assert set(built) == {depth}


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
def test_every_depth_runs(name):
    target = resolve(config_of(name), shrink=16, **TINY)
    for depth in (6, 12, 24, 48):
        model = target.build(depth=depth)
        loss = target.loss(model, next(target.batches()))
        loss.backward()
        assert loss.isfinite()
        assert all(grad.isfinite().all() for grad in gradients(model))


@parametrize("name", ["Llama", "Gemma2", "GPTNeoX", "T5", "ViT"], quick=["Llama", "T5", "ViT"])
def test_widths_change_in_proportion(name):
    target = resolve(config_of(name), shrink=16 if name in ("Llama", "Gemma2", "GPTNeoX") else 8, **TINY)
    model = target.build(depth=2, width=2 * target.width)
    assert model.config.hidden_size == 2 * target.width
    assert target.loss(model, next(target.batches())).isfinite()


def test_a_llama_of_70b_keeps_its_shape():
    config = config_of(
        "Llama", hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8,
        num_hidden_layers=80,
    )  # fmt: skip
    target = resolve(config, shrink=16)
    assert (target.depth, target.width) == (80, 512)
    small = target.build(depth=1).config
    assert (small.num_attention_heads, small.num_key_value_heads, small.head_dim) == (4, 1, 128)
    assert small.intermediate_size == 1792
    assert target.notes == (
        "hidden_size 8192 -> 512, intermediate_size 28672 -> 1792, num_attention_heads 64 -> 4, "
        "num_key_value_heads 8 -> 1, initializer_range 0.02 -> 0.08 (--shrink 16)",
        "vocab_size 32000 -> 67, as many as the data has",
    )


def test_a_seed_means_the_same_model_and_the_same_batches():
    target = resolve(config_of("GPT2"), shrink=8, **TINY)
    state = torch.random.get_rng_state()
    one, same, other = (target.build(depth=1, seed=seed).transformer.wte.weight for seed in (1, 1, 2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(next(target.batches(1))["input_ids"], next(target.batches(1))["input_ids"])
    # Dropout is off in the configuration itself: training mode changes nothing.
    model, batch = target.build(depth=1).train(), next(target.batches())
    assert target.loss(model, batch).item() == target.loss(model.eval(), batch).item()
    assert "no dropout: resid_pdrop 0.1 -> 0" in target.notes[-1]


# -- batches -----------------------------------------------------------------------------------------------------------


@parametrize("name", ["GPT2", "Bert", "T5", "Llama", "Olmo2"], quick=["GPT2", "Bert", "T5"])
def test_special_tokens_never_occur_in_the_data(name):
    target = resolve(config_of(name), shrink=8, length=48, batch_size=8)
    special = config_sizes.special_tokens(target._config)
    batch = next(target.batches())
    mask = target._config.vocab_size - 1
    seen = {int(token) for token in batch["labels"].unique() if token != -100}
    assert special
    assert not special & seen
    assert mask not in seen
    assert max(special | seen | {mask}) < target._config.vocab_size


def test_a_masked_model_predicts_what_it_mostly_cannot_see():
    target = resolve(config_of("Bert"), shrink=8, length=48, batch_size=64)
    batch = next(target.batches())
    chosen, seen = batch["labels"] != -100, batch["input_ids"]
    assert 0.15 < chosen.float().mean() < 0.19
    hidden = seen[chosen] == target._config.vocab_size - 1
    kept = seen[chosen] == batch["labels"][chosen]
    # Of some 500 tokens 80 % and 10 %, and one in 64 of those replaced; 4 deviations are 0.07 and 0.055.
    assert hidden.float().mean() == pytest.approx(0.8, abs=0.07)
    assert kept.float().mean() == pytest.approx(0.1, abs=0.055)
    assert target.twin() is None


def test_a_causal_model_has_nats_per_token_and_a_twin():
    target = resolve(config_of("Llama"), shrink=32, length=12, batch_size=4)
    model, batch = target.build(depth=2), next(target.batches())
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    by_hand = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())
    assert target.loss(model, batch).item() == pytest.approx(by_hand.item(), rel=1e-5)
    twin = target.twin()
    assert twin is not None
    assert (twin.name, twin.depth, twin.width) == ("pre", 32, 128)


def test_an_encoder_and_a_decoder_scale_together():
    config = config_of("T5", num_layers=6, num_decoder_layers=3, tie_word_embeddings=False)
    target = resolve(config, shrink=8, **TINY)
    model = target.build(depth=12)
    assert sorted(len(stack.blocks) for stack in find_stacks(model)) == [6, 12]
    batch = next(target.batches())
    assert torch.equal(batch["decoder_input_ids"][:, 1:], batch["labels"][:, :-1])


def test_images_fit_the_configuration():
    target = resolve(config_of("ViT", num_labels=1000), shrink=8, vocabulary=10, batch_size=64)
    batch = next(target.batches())
    assert batch["pixel_values"].shape == (64, 3, 112, 112)
    assert set(batch["labels"].tolist()) <= set(range(10))
    assert batch["pixel_values"].std().item() == pytest.approx(1.0, abs=0.02)
    assert target.unigram is None


@pytest.mark.parametrize("name", ["CLIPVision", "CLIPText"])
def test_a_model_without_a_head_gets_one(name):
    target = resolve(config_of(name), shrink=8, **TINY)
    assert target._purpose.makes == "AutoModel"
    model = target.build(depth=2)
    loss = target.loss(model, next(target.batches()))
    loss.backward()
    assert gradients(model)
    assert loss.isfinite()


def test_lists_of_one_entry_a_block_are_cut_and_continued():
    config = config_of("Gemma2", num_hidden_layers=4)
    pattern = ["sliding_attention", "full_attention"]
    assert config.layer_types == 2 * pattern
    assert config_sizes.with_depth(config, 3, 4).layer_types == [*pattern, pattern[0]]
    assert config_sizes.with_depth(config, 6, 4).layer_types == 3 * pattern
    assert config.num_hidden_layers == 4


def test_the_class_that_a_configuration_names_is_built():
    config = config_of("Bert", architectures=["BertLMHeadModel"], is_decoder=True)
    assert resolve(config, shrink=8, **TINY)._purpose.makes == "AutoModelForCausalLM"
    assert resolve(config_of("Bert", is_decoder=True), shrink=8, **TINY)._purpose.makes == "AutoModelForCausalLM"
    assert (
        resolve(config_of("Bert", architectures=["Nobody"]), shrink=8, **TINY)._purpose.makes == "AutoModelForMaskedLM"
    )


def test_parts_of_a_configuration_keep_their_own_proportions():
    text = config_of("Gemma3Text", num_hidden_layers=6, hidden_size=256, num_attention_heads=4, num_key_value_heads=2,
                     head_dim=64, intermediate_size=512)  # fmt: skip
    config = transformers.Gemma3Config(text_config=text)
    small, changes = config_sizes.shrunk(config, 4, length=48)
    assert changes["text_config.hidden_size"] == (256, 64)
    assert changes["vision_config.hidden_size"] == (768, 192)
    assert config_sizes.width_of(small) == 64
    assert small.vision_config.hidden_size % small.vision_config.num_attention_heads == 0


# -- from files --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    config_of("Llama", dtype="bfloat16").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("spelling", ["folder", "file", "renamed"])
def test_a_7b_configuration_from_a_file(folder, spelling):
    renamed = folder.parent / "seven.json"
    renamed.write_text((folder / "config.json").read_text())
    path = {"folder": folder, "file": folder / "config.json", "renamed": renamed}[spelling]
    target = resolve(str(path), shrink=16, **TINY)
    assert (target.name, target.depth, target.width) == (str(path), 32, 256)
    assert {p.dtype for p in target.build(depth=1).parameters()} == {torch.float32}


def test_what_does_not_fit_is_refused(folder, monkeypatch):
    monkeypatch.setattr("normlab.utils.machine.free_memory", lambda device: 2**34)
    line = (
        r"with 6\.\dB parameters needs about 9\d\.\d GiB of memory, and this machine has 16\.0 GiB free; try a larger"
    )
    with pytest.raises(NormLabError, match=line):
        resolve(folder)
    target = resolve(folder, shrink=16, **TINY)
    with pytest.raises(NormLabError, match=r"needs about .* GiB of memory"):
        target.check_room(depth=10**6)


@pytest.fixture
def trained(tmp_path):
    model = transformers.LlamaForCausalLM(
        config_of(
            "Llama", hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, vocab_size=300
        )
    )
    model.save_pretrained(tmp_path / "trained")
    return tmp_path / "trained", model


def test_weights_on_request(trained):
    folder, model = trained
    fresh = resolve(folder, **TINY).build()
    assert fresh.config.vocab_size == 67
    target = resolve(folder, weights=True, **TINY)
    loaded = target.build()
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
    assert target.build() is not loaded
    assert target.resizable == frozenset()
    assert target.loss(loaded, next(target.batches())).isfinite()
    (note,) = target.notes
    assert note.startswith("trained weights on bigram tokens, which are no text")
    with pytest.raises(NormLabError, match="its depth is 3 and cannot be changed"):
        target.build(depth=6)
    with pytest.raises(NormLabError, match="trained weights have one size"):
        resolve(folder, weights=True, shrink=1)


def test_weights_that_the_files_lack_are_not_drawn_at_random(trained):
    folder, model = trained
    file = folder / "model.safetensors"
    weights = load_file(file)
    lost = {name for name in weights if name.startswith("model.layers.1.")}
    save_file({name: value for name, value in weights.items() if name not in lost}, file, metadata={"format": "pt"})
    with pytest.raises(NormLabError, match=rf"lacks {len(lost)} weights \(the first is {min(lost)}\)") as caught:
        resolve(folder, weights=True, **TINY)
    assert "\n" not in str(caught.value)
    # Weights beyond those of the model are none of its business: a head of another task, for one.
    save_file({**weights, "another_head.weight": torch.zeros(2)}, file, metadata={"format": "pt"})
    assert resolve(folder, weights=True, **TINY).build().state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("weights", [False, True])
def test_a_converted_model_is_not_taken_for_the_original(trained, tmp_path, weights):
    converted = normlab.hf.convert(trained[1], "geonorm", init=True)
    converted.save_pretrained(tmp_path / "converted")
    with pytest.raises(NormLabError, match=r"converted to geonorm, .*normlab\.hf\.load\(folder\)") as caught:
        resolve(tmp_path / "converted", weights=weights, **TINY)
    assert "\n" not in str(caught.value)
    # What the message says to do.
    assert type(resolve(normlab.hf.load(tmp_path / "converted"), **TINY).build()) is type(converted)


def test_only_safetensors_are_loaded(trained):
    folder, model = trained
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(NormLabError, match=r"its weights cannot be loaded .*expected \*\.safetensors files"):
        resolve(folder, weights=True, **TINY)


def test_an_id_that_cannot_be_had_offline(monkeypatch):
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    for name in ("nobody/nothing-7b", "some-model"):
        with pytest.raises(NormLabError, match=f"'{name}' is neither a scheme nor a model on this machine, and"):
            resolve(name)


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(NormLabError, match=re.escape('pip install "normlab[hf]"')):
        resolve("nobody/nothing-7b")


@pytest.mark.parametrize(
    ("values", "options", "match"),
    [
        ({"model_type": "abacus"}, {}, "not a configuration .*abacus"),
        ({"hidden_size": 4}, {}, "names no model_type"),
        ({"model_type": "llama", "hidden_size": "wide"}, {}, "not a configuration"),
        (
            {"model_type": "llama", "auto_map": {"AutoConfig": "evil.Config"}},
            {"shrink": 10**6},
            "cannot shrink a width",
        ),
        (
            {"model_type": "llama"},
            {"shrink": 1000},
            "cannot shrink a width of 4096 by 1000: 32 must remain; try at most 128",
        ),
        ({"model_type": "llama", "num_hidden_layers": 1}, {"shrink": 64}, "has no repeated blocks"),
        ({"model_type": "wav2vec2"}, {"shrink": 8}, "does not run|no image_size"),
        ({"model_type": "llama"}, {"shrink": 64, "depth": 0}, "depth must be at least 1"),
    ],
)
def test_one_line_for_a_configuration_that_is_no_target(tmp_path, values, options, match):
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(NormLabError, match=match) as error:
        resolve(tmp_path, **TINY, **options)
    assert "\n" not in str(error.value)


def test_stages_that_grow_wider_one_by_one_are_not_multiplied():
    """Twice Swin's stages are sixteen times as wide at the end, 24 of them fit into no memory."""
    config = transformers.SwinConfig(embed_dim=16, depths=[1, 1], num_heads=[2, 2], image_size=32, window_size=4)
    target = resolve(config, **TINY)
    assert (target.depth, target.resizable) == (2, {"width"})
    # As deep as it is, and said so, in place of a check that never ends.
    assert normlab.check(target, steps=1).ladder.depths == (2,)
    with pytest.raises(NormLabError, match=r"the depth of .* cannot be changed: it has 2 blocks"):
        normlab.check(target, depths=(2, 4))


def test_a_decoder_is_not_taken_for_the_whole_of_an_encoder_and_a_decoder():
    """Whisper reads sound, for which no batch is made; its decoder alone has attention that is idle by design."""
    config = transformers.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=80, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    with pytest.raises(NormLabError, match=r"whisper: does not run .* pass a live module with a batch"):
        resolve(config, **TINY)


ENCODER_DECODER = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}


def test_a_decoder_that_says_its_vocabulary_once_more_gets_the_same():
    config = transformers.MarianConfig(vocab_size=600, d_model=32, decoder_ffn_dim=32, encoder_ffn_dim=32,
                                       pad_token_id=599, decoder_start_token_id=599, **ENCODER_DECODER)  # fmt: skip
    target = resolve(config, **TINY)
    model = target.build()
    assert model.config.decoder_vocab_size == model.config.vocab_size < 600
    assert target.loss(model, next(target.batches())).isfinite()


def test_parameters_for_segments_get_a_batch_of_two():
    config = transformers.XLNetConfig(vocab_size=600, d_model=32, n_layer=2, n_head=2, d_inner=32)
    target = resolve(config, **TINY)
    batch = next(target.batches())
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 1]] * 2
    found = normlab.check(target, steps=1, depths=(2,), start_size="none").verdict("untrained")
    # What stands for a token that is to be predicted, which no batch of plain text has.
    assert (found.level, found.value) == ("warn", 1.0)
    assert "mask_emb" in found.words
    # These ids are tokens to GPT-2, and BERT has none that segments alone use.
    for name in ("GPT2", "Bert"):
        assert "token_type_ids" not in next(resolve(config_of(name), shrink=8, **TINY).batches())


def test_a_block_that_all_layers_share_is_as_many_as_it_runs():
    config = transformers.AlbertConfig(vocab_size=600, embedding_size=16, hidden_size=32, num_attention_heads=2,
                                       intermediate_size=32, num_hidden_layers=3)  # fmt: skip
    target = resolve(config, **TINY)
    assert (target.depth, target.resizable) == (3, {"depth", "width"})
    found = normlab.check(target, steps=1, depths=(3, 6), start_size="none")
    assert found.ladder.depths == (3, 6)
    assert found.verdict("structure").finding == "fine"
