"""Generation: every cache of the library gives what no cache gives, for every scheme."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, QuantizedCache, StaticCache

import normlab
from normlab import NormLabError
from normlab.hf import NormLabForCausalLM
from tests.hf import small
from tests.hf.small import GREEDY, LENGTH, close, tokens
from tests.matrix import parametrize, quick_if

# The library compiles what runs on a static cache; here its arithmetic is the matter, not its speed.
STATIC = {"cache_implementation": "static", "disable_compile": True}


def make(scheme: str = "geonorm") -> NormLabForCausalLM:
    # Tied to the embedding, an untrained head repeats the last token for ever, which any cache can do. With this seed
    # no scheme's model does so by chance.
    return small.make(scheme, seed=2, tied=False)


def uncached(model: NormLabForCausalLM, **options) -> torch.Tensor:
    return model.generate(tokens(), **GREEDY, **options, use_cache=False)


@parametrize("scheme", normlab.list_schemes(), quick=["pre", "post", "geonorm", "ngpt", "dual"])
def test_every_cache_is_as_good_as_none(scheme):
    model = make(scheme)
    reference = uncached(model)
    assert reference.shape == (2, LENGTH + GREEDY["max_new_tokens"])
    assert len(reference[:, LENGTH:].unique()) > 3, "too dull a text to show anything"
    for options in ({}, {"cache_implementation": "dynamic"}, STATIC):
        assert torch.equal(model.generate(tokens(), **GREEDY, **options), reference), options
    ours = model.decoder.generate(tokens(), GREEDY["max_new_tokens"], temperature=0)
    assert torch.equal(ours, reference)


@pytest.mark.parametrize("scheme", ["geonorm", "ngpt", "dual"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_logits_step_by_step_are_those_of_the_whole(scheme, kind):
    model, x = make(scheme), tokens()
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=32)
    whole, found = model(x).logits, []
    for start, end in ((0, 4), (4, 5), (5, 8), (8, LENGTH)):
        found.append(model(x[:, start:end], past_key_values=cache).logits)
        assert int(cache.get_seq_length()) == end
    close(torch.cat(found, 1), whole)


@torch.no_grad()
def test_a_quantised_cache_is_close():
    try:
        cache = QuantizedCache("fp8", make().config)
    except (ValueError, TypeError):
        pytest.skip("this version of transformers has no fp8 cache, and others need packages for accelerators")
    model, x = make(), tokens()
    model(x[:, :-1], past_key_values=cache)
    found, whole = model(x[:, -1:], past_key_values=cache).logits, model(x).logits[:, -1:]
    # Keys and values are off by up to 2⁻⁴ of themselves: near, but not equal.
    alike = torch.corrcoef(torch.stack([found.flatten(), whole.flatten()]))[0, 1]
    assert 0.95 < alike < 1.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the library offloads caches from a GPU alone")
@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_an_offloaded_cache_is_as_good_as_none(kind):
    model, x = make().cuda(), tokens().cuda()
    reference = model.generate(x, **GREEDY, use_cache=False)
    assert torch.equal(model.generate(x, **GREEDY, cache_implementation=kind), reference)


@quick_if(lambda scheme, options: options == STATIC or scheme == "geonorm")
@pytest.mark.parametrize("options", [{}, STATIC], ids=["dynamic", "static"])
@pytest.mark.parametrize("scheme", ["geonorm", "ngpt", "dual"])
def test_beams(scheme, options):
    model = make(scheme)
    reference = uncached(model, num_beams=3)
    assert torch.equal(model.generate(tokens(), **GREEDY, num_beams=3, **options), reference)
    assert not torch.equal(reference, uncached(model)), "beams found nothing better: they show nothing"


@quick_if(lambda scheme, options: options == STATIC or scheme == "geonorm")
@pytest.mark.parametrize("options", [{}, STATIC, {"use_cache": False}], ids=["dynamic", "static", "none"])
@parametrize("scheme", ["geonorm", "ngpt", "dual"], quick=["geonorm", "dual"])
def test_left_padding_changes_nothing(scheme, options):
    model, x = make(scheme), tokens()
    padded = torch.stack([torch.cat([torch.zeros(3, dtype=torch.long), x[0]]), torch.cat([x[0, :3], x[1]])])
    mask = torch.ones_like(padded)
    mask[0, :3] = 0
    found = model.generate(padded, attention_mask=mask, **GREEDY, **options)
    assert torch.equal(found[0, 3:], model.generate(x[:1], **GREEDY)[0])
    assert torch.equal(found[1], model.generate(padded[1:], **GREEDY)[0])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_backends_generate_the_same(implementation):
    model = make()
    reference = uncached(model)
    model.set_attn_implementation(implementation)
    assert torch.equal(model.generate(tokens(), **GREEDY), reference)


def test_an_early_exit_is_refused_in_one_line():
    model = make()
    configured = copy.deepcopy(model.generation_config)
    configured.assistant_early_exit = 1
    for options in ({"assistant_early_exit": 1}, {"generation_config": configured}):
        with pytest.raises(NormLabError, match=r"has no early exit: .*; leave out assistant_early_exit") as refused:
            model.generate(tokens(1), **GREEDY, **options)
        assert "\n" not in str(refused.value)


def test_speculation_changes_nothing():
    model = make()
    reference = model.generate(tokens(1), **GREEDY, eos_token_id=0)
    for options in ({"assistant_model": make("peri")}, {"prompt_lookup_num_tokens": 3}):
        found = model.generate(tokens(1), **GREEDY, eos_token_id=0, **options)
        # Some versions of the library go one token too far.
        assert torch.equal(found[:, : reference.shape[1]], reference), list(options)


def test_embeddings_may_stand_for_the_prompt():
    model = make()
    embedded = model.get_input_embeddings()(tokens())
    assert torch.equal(model.generate(inputs_embeds=embedded, **GREEDY), uncached(model)[:, LENGTH:])


def test_sampling_repeats_with_its_seed():
    model = make()
    options = {"max_new_tokens": 10, "do_sample": True, "top_p": 0.9, "pad_token_id": 0}
    torch.manual_seed(5)
    first = model.generate(tokens(), **options)
    torch.manual_seed(5)
    assert torch.equal(model.generate(tokens(), **options, use_cache=False), first)


def test_it_stops_at_the_end():
    model = make()
    third = int(model.generate(tokens(1), **GREEDY)[0, LENGTH + 2])
    assert model.generate(tokens(1), **GREEDY, eos_token_id=third).shape[1] <= LENGTH + 3


def test_gradients_pass_through_a_cache():
    model, x = make(), tokens()
    first = model(x[:, :5])
    second = model(x[:, 5:], past_key_values=first.past_key_values)
    second.logits.square().sum().backward()
    found = model.get_input_embeddings().weight.grad.clone()
    model.zero_grad()
    model(x).logits[:, 5:].square().sum().backward()
    expected = model.get_input_embeddings().weight.grad
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.full
def test_a_static_cache_compiles():
    model = make()
    cache = StaticCache(model.config, max_cache_len=32)
    with torch.no_grad():
        model(tokens(), past_key_values=cache)
        step = torch.compile(model, fullgraph=True)
        new = uncached(model)[:, LENGTH:]
        whole = model(torch.cat([tokens(), new], 1)).logits[:, LENGTH:]
        found = [step(token, past_key_values=cache).logits for token in new.split(1, dim=1)]
    close(torch.cat(found, 1), whole)
