"""Published architectures are named by what their layers do, and it is said how that is known."""

import pytest
import torch
import transformers
from torch import nn

import normlab
from normlab import NormLabError, hf
from normlab.hf.conversion.foreign_norm import NormOptions, recognise_norm
from tests.matrix import parametrize

from .zoo import DEPTH, TEXT, WIDTH, ZOO

# One of each kind; those that `test_it_says_how_it_knows` asks about are named there.
KINDS = {(ZOO[name].scheme, ZOO[name].topology): name for name in reversed(ZOO)}.values()


@parametrize("name", ZOO, quick=KINDS)
def test_a_published_architecture_is_named(name):
    found = hf.identify(ZOO[name].build())
    assert (str(found.scheme), found.topology) == (ZOO[name].scheme, ZOO[name].topology)
    assert (found.depth, found.dim) == (DEPTH, WIDTH)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama", ["LlamaDecoderLayer", "x ← x + self_attn(input_layernorm(x))", "'model.norm' reads the last block"]),
        ("gemma2", ["x ← x + post_attention_layernorm(self_attn(input_layernorm(x)))", "gain offset"]),
        ("olmo2", ["x ← x + post_feedforward_layernorm(mlp(x))", "inside its branches: self_attn.q_norm"]),
        ("bert", ["x ← attention.output.LayerNorm(x + attention.self(x))", "no norm reads the last block"]),
        ("neox", ["side by side:"]),
        ("phi", ["side by side, behind one norm"]),
        ("qwen3", ["inside its branches: self_attn.q_norm, self_attn.k_norm"]),
        ("granite", ["its branches also hold: × 0.3"]),
    ],
)
def test_it_says_how_it_knows(name, words):
    told = "\n".join(hf.identify(ZOO[name].build()).how)
    assert all(word in told for word in words), told


def test_scales_of_the_branches_are_told():
    config = transformers.Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=16)
    told = hf.identify(transformers.Dinov2Model(config)).how
    assert "its branches also hold: layer_scale1, layer_scale2" in told


def test_a_state_of_another_type_than_the_parts_is_refused_with_a_way_out():
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))
    assert str(hf.identify(model).scheme) == "pre(eps=1e-05)"
    with pytest.raises(NormLabError, match=r"turns its state into torch\.float32 .* try model\.to\(torch\.float32\)"):
        hf.identify(model.to(torch.bfloat16))


def test_joined_tuples_of_outputs_are_what_was_not_followed():
    config = transformers.OpenAIGPTConfig(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    with pytest.raises(NormLabError, match=r"Block: its state was not found: a tuple of outputs is joined .* adapter"):
        hf.identify(transformers.OpenAIGPTLMHeadModel(config))


def test_looking_leaves_no_trace():
    model = ZOO["llama"].build().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seed = torch.random.get_rng_state()
    hf.identify(model)
    assert torch.equal(torch.random.get_rng_state(), seed)
    assert all(part.training for part in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_models_of_ours_say_it_themselves():
    decoder = normlab.Decoder(normlab.DecoderConfig(scheme="peri(step=0.1)", depth=2, dim=32, heads=2))
    assert str(hf.identify(decoder).scheme) == "peri(step=0.1)"
    converted = hf.convert(ZOO["llama"].build(), "geonorm", init=True)
    assert str(hf.identify(converted).scheme) == "geonorm"


def test_a_placement_that_no_scheme_has_is_described():
    tokens = dict.fromkeys(("cls_token_id", "sep_token_id"), 0)
    model = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**TEXT, **tokens))
    with pytest.raises(NormLabError, match=r"no scheme here places norms .* x ← x \+ attn\(x\)"):
        hf.identify(model)


def test_of_several_stacks_one_must_be_named():
    config = transformers.T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    with pytest.raises(NormLabError, match=r"has 2 stacks; name one: .*'decoder\.block\.\*'"):
        hf.identify(transformers.T5ForConditionalGeneration(config))


class Halves(nn.Module):
    """Takes the same way for no one to follow: which one depends on the values."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states):
        update = self.mlp(self.norm(hidden_states))
        return hidden_states + update if update.sum() > 0 else hidden_states - update


class Difference(Halves):
    def forward(self, hidden_states):
        return hidden_states - self.mlp(self.norm(hidden_states))


class Twice(Halves):
    def forward(self, hidden_states):
        return hidden_states + self.mlp(self.norm(hidden_states)) + self.mlp(hidden_states)


class Nothing(Halves):
    def forward(self, hidden_states):
        return hidden_states


def of_layers(layer: type[nn.Module]):
    model = ZOO["llama"].build()
    model.model.layers = nn.ModuleList(Called(layer()) for _ in range(2))
    return model


class Called(nn.Module):
    """A layer that is called as Llama's are."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.norm, self.mlp = inner.norm, inner.mlp
        self._forward = type(inner).forward

    def forward(self, hidden_states, **kwargs):
        return self._forward(self, hidden_states)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Halves, "its forward pass cannot be followed"),
        (Difference, "no addition of an update to the state was found behind 'sub'"),
        (Nothing, "adds nothing to its input"),
    ],
)
def test_what_was_not_found_is_said(layer, reason):
    with pytest.raises(NormLabError, match=reason) as caught:
        hf.identify(of_layers(layer))
    assert "adapter" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_branches_that_read_in_two_ways_are_told_apart():
    with pytest.raises(NormLabError, match="no scheme here places norms"):
        hf.identify(of_layers(Twice))


NORMS = {
    "rms": (nn.RMSNorm(WIDTH, eps=1e-5), NormOptions("rms", 1e-5, "plain", False)),
    "layer": (nn.LayerNorm(WIDTH), NormOptions("layer", 1e-5, "plain", True)),
    "tiny eps": (nn.LayerNorm(WIDTH, eps=1e-12), NormOptions("layer", 1e-12, "plain", True)),
    "no gain": (nn.LayerNorm(WIDTH, elementwise_affine=False), NormOptions("layer", 1e-5, "none", False)),
    "no bias": (nn.LayerNorm(33, bias=False), NormOptions("layer", 1e-5, "plain", False)),
    "half": (nn.LayerNorm(WIDTH).bfloat16(), NormOptions("layer", 1e-5, "plain", True)),
    "no values": (nn.LayerNorm(WIDTH, device="meta"), NormOptions("layer", 1e-5, "plain", True)),
    "dropout": (nn.Dropout(), None),
    "linear": (nn.Linear(4, 4), None),
    "batch norm": (nn.BatchNorm1d(WIDTH), None),
    "activation": (nn.PReLU(WIDTH), None),
    "width one": (nn.LayerNorm(1), None),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_known_by_what_they_compute(name):
    module, expected = NORMS[name]
    assert recognise_norm(module) == expected


def test_a_gain_that_is_an_offset_is_seen():
    norm = ZOO["gemma2"].build().model.norm
    assert recognise_norm(norm) == NormOptions("rms", 1e-6, "offset", False)
