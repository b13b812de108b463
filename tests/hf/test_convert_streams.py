"""Models of several streams: published weights in our modules, other schemes, and what is refused."""

import math
from types import SimpleNamespace

import pytest
import torch

from normlab import NormLabError, hf
from normlab.hf.conversion.foreign_streams import recognise_read
from normlab.hf.conversion.model_structure import _with_streams, analyse_model
from tests.matrix import parametrize

from .zoo import ZOO, answer, inputs

pytestmark = pytest.mark.filterwarnings("ignore:.* has trained weights")

MODELS = ("deepseek-v4", "hy-v4", "glm-5-next", "qwen4")
COEFFICIENTS = ("fn", "base", "scale", "mix_weight_down.weight", "mix_weight_up.weight", "inject_weight.weight")


def published(name: str, **changes):
    """A model whose coefficients are far from their start, so that nothing is equal by symmetry."""
    model = ZOO[name].build(**changes)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(COEFFICIENTS):
                size = 2.0 / parameter.shape[-1] ** 0.5 if parameter.ndim == 2 else 1.0
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return model


def first_layer(model):
    return next(part for path, part in model.named_modules() if path.endswith("layers.0"))


# -- published weights in our modules --------------------------------------------------------------------------------


@parametrize("name", MODELS, quick=("deepseek-v4", "qwen4"))
def test_published_weights_in_our_modules_give_the_same_states_and_logits(name):
    model = published(name)
    ours = hf.convert(model, hf.identify(model).scheme, native=True)
    kinds = {type(part).__name__ for part in ours.modules()}
    assert not any("HyperConnection" in kind or "GatedResidual" in kind for kind in kinds), kinds
    batch = inputs(model, "left")
    with torch.no_grad():
        theirs, found = (one(**batch, output_hidden_states=True) for one in (model, ours))
    # Some sums run in another order: a few roundings a sublayer, through four sublayers and norms of gain about one.
    small = 64 * torch.finfo(torch.float32).eps
    logits = answer(theirs)
    torch.testing.assert_close(answer(found), logits, rtol=0, atol=small * float(logits.abs().max()))
    for one, other in zip(found.hidden_states[1:-1], theirs.hidden_states[1:-1], strict=True):
        torch.testing.assert_close(one.flatten(2), other.flatten(2), rtol=0, atol=small * float(other.abs().max()))


def test_that_comparison_sees_a_round_of_sinkhorn():
    model = published("deepseek-v4")
    batch = inputs(model)
    with torch.no_grad():
        expected = answer(model(**batch))
        other = answer(hf.convert(published("deepseek-v4", hc_sinkhorn_iters=2), "mhc", native=True)(**batch))
    assert not torch.allclose(other, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"hc_sinkhorn_iters": 7}, "mhc(rounds=7)"),
        ({"hc_eps": 1e-4}, "mhc(mix_eps=0.0001)"),
        ({"hc_mult": 3}, "mhc(streams=3)"),
    ],
)
def test_options_are_read_from_what_the_module_computes(changes, options):
    assert str(hf.identify(ZOO["deepseek-v4"].build(**changes)).scheme) == options


def test_a_module_that_reads_in_another_way_is_not_recognised():
    connection = first_layer(ZOO["deepseek-v4"].build()).attn_hc
    read = recognise_read(connection)
    assert read is not None
    # A name of its own, because what is known of a class is remembered.
    kind = type("Squared", (type(connection),), {"forward": lambda self, x: connection_squared(type(self), self, x)})
    connection.__class__ = kind
    assert recognise_read(connection) is None


def connection_squared(kind, module, x):
    post, comb, collapsed = kind.__mro__[1].forward(module, x)
    return post.square(), comb, collapsed


# -- other schemes ---------------------------------------------------------------------------------------------------


def test_streams_that_are_pre_norm_stay_so_under_pre():
    """Weights 1/n to read, 1 to write, the identity to mix: Pre-Norm but for the epsilons, 1e-6 each."""
    model = ZOO["deepseek-v4"].build()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(("fn", "scale")):
                parameter.zero_()
            elif path.endswith(("hc.base", "hc_base")):
                start = torch.tensor([-math.log(3.0)] * 4 + [0.0] * 4 + (40.0 * torch.eye(4)).flatten().tolist())
                parameter.copy_(start[: len(parameter)])
    converted = hf.convert(model, "pre")
    assert not [path for path, _ in converted.named_parameters() if "_hc" in path or "hc_head" in path]
    batch = inputs(model)
    with torch.no_grad():
        expected, found = answer(model(**batch)), answer(converted(**batch))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scheme", ["geonorm", "hc", "siamese", "post", "peri"])
def test_other_schemes_run_and_learn(name, scheme):
    model = published(name)
    converted = hf.convert(model, scheme)
    answer(converted(**inputs(model))).square().mean().backward()
    layers = [part for part in converted.modules() if isinstance(part, hf.ConvertedLayer)]
    missing = [path for layer in layers for path, one in layer.normlab.named_parameters() if one.grad is None]
    assert not missing


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("native", [False, True])
def test_files(name, native, tmp_path):
    model = published(name)
    converted = hf.convert(model, hf.identify(model).scheme, native=native)
    converted.save_pretrained(tmp_path)
    loaded = hf.load(tmp_path)
    batch = inputs(model)
    with torch.no_grad():
        assert torch.equal(answer(loaded(**batch)), answer(converted(**batch)))


def test_native_is_for_streams_that_the_scheme_reads():
    for name, scheme in (("llama", "mhc"), ("deepseek-v4", "pre")):
        with pytest.raises(NormLabError, match="native copies weights of streams"):
            hf.convert(ZOO[name].build(), scheme, native=True)


# -- what is refused -------------------------------------------------------------------------------------------------


def untransposed(self, hidden_states, input_ids=None, **kwargs):
    """DeepSeek-V4's layer with the fault of several public implementations: comb in place of its transpose."""
    post, comb, collapsed = self.attn_hc(hidden_states)
    attention, _ = self.self_attn(self.input_layernorm(collapsed), **kwargs)
    hidden_states = post.unsqueeze(-1) * attention.unsqueeze(-2) + torch.matmul(comb, hidden_states)
    post, comb, collapsed = self.ffn_hc(hidden_states)
    update = self.mlp(self.post_attention_layernorm(collapsed), input_ids=input_ids)
    return post.unsqueeze(-1) * update.unsqueeze(-2) + torch.matmul(comb, hidden_states)


def test_the_wrong_side_of_the_mixing_matrix_is_told():
    model = ZOO["deepseek-v4"].build()
    wrong = type("Wrong", (type(model.model.layers[0]),), {"forward": untransposed})
    for layer in model.model.layers:
        layer.__class__ = wrong
    with pytest.raises(NormLabError, match=r"'ffn_hc' reads its streams as mhc does, but what 'add_1' writes"):
        hf.identify(model)


def test_streams_that_differ_at_the_start_are_refused():
    model = ZOO["deepseek-v4"].build()
    found = analyse_model(model)
    call = SimpleNamespace(args=(torch.arange(4.0)[:, None] * torch.ones(1, 2, 4, 32),), kwargs={})
    with pytest.raises(NormLabError, match="its streams differ before the first layer"):
        _with_streams(model, found, found.head, call)


def test_additions_to_the_streams_beside_the_branches_are_refused():
    ngrams = {"ple_layer_ids": [1], "ngram_vocab_size_base": 64, "heads_per_ngram": 1, "split_ngram_parts": 1}
    with pytest.raises(NormLabError, match=r"mixes blocks of|ple"):
        hf.convert(ZOO["qwen4"].build(**ngrams), "pre")
