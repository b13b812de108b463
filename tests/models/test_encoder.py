"""The encoder: the decoder's parts without the mask that hides what is to come."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

import normlab
from normlab import Decoder, DecoderConfig, Encoder, EncoderConfig, NormLabError
from tests.matrix import parametrize

SIZE = {"depth": 3, "dim": 32, "heads": 4, "kv_heads": 2, "vocab_size": 61, "max_length": 64, "hidden": 48}


@pytest.fixture(params=normlab.list_schemes())
def name(request) -> str:
    return request.param


def tokens(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(3))


@parametrize("place", [0, 5, 11], quick=[5])
def test_every_token_changes_what_is_said_of_all_others(name, place):
    model = Encoder(EncoderConfig(scheme=name, init_std=0.3, **SIZE)).double()
    one, two = tokens(), tokens()
    two[:, place] = (two[:, place] + 1) % 61
    first, second = model(one), model(two)
    changed = ((first - second).abs().amax(-1) > 0).all(0)
    assert changed.all(), changed


def test_packed_documents_are_apart(name):
    model = Encoder(EncoderConfig(scheme=name, init_std=0.3, **SIZE)).double()
    text = tokens(1, 12)
    packed = model(text, documents=torch.tensor([[0] * 5 + [1] * 4 + [2] * 3]))
    alone = torch.cat([model(text[:, a:b]) for a, b in ((0, 5), (5, 9), (9, 12))], dim=1)
    assert torch.allclose(packed, alone, rtol=0, atol=1e-12 * float(alone.detach().abs().max()))
    assert not torch.allclose(model(text), alone, atol=1e-6)


def test_the_last_token_of_a_decoder_of_one_block_is_the_encoders(name):
    # The last token sees all others in both, and in one block nothing else has been mixed before.
    sizes = SIZE | {"depth": 1, "scheme": name}
    encoder, decoder = Encoder(EncoderConfig(**sizes)).double(), Decoder(DecoderConfig(**sizes)).double()
    decoder.load_state_dict(encoder.state_dict())
    mine, theirs = encoder(tokens()), decoder(tokens())
    assert torch.allclose(mine[:, -1], theirs[:, -1], rtol=0, atol=1e-12 * float(theirs.detach().abs().max()))
    assert not torch.allclose(mine[:, 0], theirs[:, 0])


def test_meta_build_equals_direct_build(name):
    config = EncoderConfig(scheme=name, **SIZE)
    torch.manual_seed(11)
    direct = Encoder(config)
    late = config.build(device="meta")
    torch.manual_seed(11)
    late.to_empty(device="cpu").init_()
    assert torch.equal(direct(tokens()), late(tokens()))


def test_only_masked_places_are_scored():
    model = Encoder(EncoderConfig(**SIZE)).double()
    targets = torch.full((2, 12), -100)
    targets[0, 3], targets[1, 7] = 5, 9
    logits = model(tokens())
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert torch.allclose(model.loss(tokens(), targets), expected, rtol=1e-12)
    best = targets.clone()
    best[0, 3] = logits[0, 3].argmax()
    assert model.loss_and_accuracy(tokens(), best)[1] == 0.5


@parametrize("depth", [3, 36], quick=[3])
def test_any_depth_has_finite_gradients(name, depth):
    model = Encoder(EncoderConfig(**SIZE | {"scheme": name, "depth": depth}))
    model.loss(tokens(), tokens()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_it_has_what_the_decoder_has():
    config, like = EncoderConfig(scheme="peri", **SIZE), DecoderConfig(scheme="peri", **SIZE)
    assert config.num_params() == like.num_params()
    assert config.flops_per_token(32) == like.flops_per_token(32)
    assert config.memory(4, 32).total == like.memory(4, 32).total
    assert EncoderConfig(**json.loads(json.dumps(config.to_dict()))) == config
    model = Encoder(config)
    groups = model.param_groups(lr=1e-3, weight_decay=0.1)
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(id(p) for p in model.parameters())
    assert not hasattr(model, "generate")


def test_presets_are_the_decoders_at_berts_length():
    assert EncoderConfig.preset("125m").max_length == 512
    assert EncoderConfig.preset("125m").dim == 768
    with pytest.raises(NormLabError, match="unknown preset '120m'; did you mean '125m'"):
        EncoderConfig.preset("120m")


@pytest.mark.full
def test_compiled_it_is_the_same(no_default_device):
    model = Encoder(EncoderConfig(scheme="spannorm", **SIZE))
    compiled = torch.compile(model.loss, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(tokens(), tokens()), model.loss(tokens(), tokens()), rtol=1e-5)
