"""Converting a model to the scheme that it has changes no bit, and it is our block that computes."""

import copy

import pytest
import torch

from normlab import NormLabError, hf
from normlab.schemes.contract.blocks import Block
from tests.matrix import parametrize, quick_if

from .zoo import DEPTH, NAMED, ZOO, answer, inputs

EXACT = [name for name in ZOO if ZOO[name].exact]
WRITERS = ("llama", "gpt2", "gemma3", "falcon")
RECENT = ("nanochat", "gemma4", "deepseek-v4", "hy-v4", "qwen4")
TEXT = [*(name for name in NAMED if name not in ("bert", "vit")), *RECENT]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def pair(name: str, dtype: torch.dtype = torch.float32, **changes):
    """A model, its twin under the scheme that it has, and the parameters of both by the names of the first."""
    model = ZOO[name].build(**changes).to(dtype)
    twin = copy.deepcopy(model)
    names = dict(twin.named_parameters())
    converted = hf.convert(twin, ZOO[name].scheme, copy=False)
    layers = [part for part in converted.modules() if isinstance(part, hf.ConvertedLayer)]
    assert len(layers) == DEPTH
    assert all(isinstance(layer.normlab.block, Block) for layer in layers)
    return model, converted, names


def gradients(model, parameters, batch, seed: int = 3):
    torch.manual_seed(seed)
    model.zero_grad()
    logits = answer(model(**batch))
    logits.float().square().mean().backward()
    return logits.detach(), {name: parameter.grad for name, parameter in parameters.items()}


def same(ours, theirs) -> None:
    logits, found = ours
    expected_logits, expected = theirs
    assert torch.equal(logits, expected_logits)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradient is None) == (found[name] is None), name
        assert gradient is None or torch.equal(gradient, found[name]), name


@quick_if(lambda name, dtype: (dtype == torch.bfloat16) == (name in ("llama", "bert", "gemma4")))
@DTYPES
@parametrize("name", EXACT, quick=("llama", "gpt2", "falcon", "bert", "gemma4", "deepseek-v4"))
def test_logits_and_gradients_are_equal_to_the_last_bit(name, dtype):
    model, converted, names = pair(name, dtype)
    for padding in ("none", "left", "right"):
        batch = inputs(model, padding)
        same(gradients(converted, names, batch), gradients(model, dict(model.named_parameters()), batch))


@parametrize("dtype", [torch.float32, torch.bfloat16], quick=[torch.float32], ids=str)
@parametrize("name", TEXT, quick=WRITERS)
def test_with_a_cache(name, dtype):
    model, converted, _ = pair(name, dtype)
    batch = inputs(model, "left")
    runs = []
    with torch.no_grad():
        for one in (model, converted):
            first = one(**batch, use_cache=True)
            mask = torch.cat([batch["attention_mask"], batch["attention_mask"].new_ones(2, 1)], dim=1)
            second = one(
                input_ids=batch["input_ids"][:, :1], attention_mask=mask, past_key_values=first.past_key_values
            )
            runs.append((first.logits, second.logits))
    assert all(map(torch.equal, *runs))


@parametrize("name", TEXT, quick=WRITERS)
def test_the_same_text_is_generated(name):
    model, converted, _ = pair(name)
    batch = inputs(model, "left")
    written = [
        one.generate(**batch, max_new_tokens=5, do_sample=False, use_cache=use_cache)
        for one in (model, converted)
        for use_cache in (True, False)
    ]
    assert all(torch.equal(text, written[0]) for text in written)


DROPOUT = {
    "gpt2": "resid_pdrop",
    "bert": "hidden_dropout_prob",
    "opt": "dropout",
    "neox": "hidden_dropout",
    "phi": "resid_pdrop",
}


@parametrize("name", DROPOUT, quick=["gpt2", "bert"])
def test_dropout_draws_the_same_numbers(name):
    model, converted, names = pair(name, **{DROPOUT[name]: 0.2})
    batch = inputs(model)
    model.train()
    converted.train()
    resting = answer(copy.deepcopy(model).eval()(**batch))
    ours, theirs = gradients(converted, names, batch), gradients(model, dict(model.named_parameters()), batch)
    assert not torch.equal(ours[0], resting)
    same(ours, theirs)


def test_one_dropout_over_both_branches_is_refused():
    with pytest.raises(NormLabError, match="FalconDecoderLayer is wired differently in training"):
        hf.identify(ZOO["falcon"].build(hidden_dropout=0.1))


def test_a_sum_in_another_order_agrees_to_rounding():
    model, converted, _ = pair("cohere")
    batch = inputs(model)
    with torch.no_grad():
        theirs, ours = answer(model(**batch)), answer(converted(**batch))
    # Two additions a block, each off by half a unit in the last place, through two blocks and a norm of gain about one.
    torch.testing.assert_close(
        ours, theirs, rtol=0, atol=16 * torch.finfo(torch.float32).eps * float(theirs.abs().max())
    )


@pytest.mark.parametrize("name", ["llama", "falcon", "bert", "vit"])
def test_hidden_states_and_attention_are_recorded_as_before(name):
    model, converted, _ = pair(name)
    for one in (model, converted):
        one.set_attn_implementation("eager")
    asked = {"output_hidden_states": True, "output_attentions": True}
    batch = inputs(model)
    with torch.no_grad():
        theirs, ours = model(**batch, **asked), converted(**batch, **asked)
    for kind in ("hidden_states", "attentions"):
        assert len(ours[kind]) == len(theirs[kind]) > 0
        assert all(map(torch.equal, ours[kind], theirs[kind]))


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_the_attention_backend_can_be_changed_afterwards(backend):
    model, converted, _ = pair("llama")
    for one in (model, converted):
        one.set_attn_implementation(backend)
    batch = inputs(model, "left")
    assert torch.equal(answer(model(**batch)), answer(converted(**batch)))


def test_a_copy_leaves_the_original_alone():
    model = ZOO["gpt2"].build()
    batch, before = inputs(model), list(model.state_dict())
    logits = answer(model(**batch))
    converted = hf.convert(model, "pre")
    assert converted is not model
    assert list(model.state_dict()) == before
    assert not hasattr(model.config, "normlab")
    assert torch.equal(answer(model(**batch)), logits)
    with torch.no_grad():
        next(converted.parameters()).zero_()
    assert torch.equal(answer(model(**batch)), logits)


def test_everything_but_the_norms_keeps_its_name():
    model = ZOO["bert"].build()
    kept = {name for name in model.state_dict() if "encoder" not in name or "LayerNorm" not in name}
    converted = hf.convert(model, "post")
    assert kept < set(converted.state_dict())
    moved = set(converted.state_dict()) - kept
    assert all(".normlab.block.steps." in name for name in moved)
