"""The start of a fresh model against closed forms, at the width where a tied head echoes, and the verdict on it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import transformers
from torch import Tensor, nn

from normlab import Decoder, DecoderConfig, Encoder, EncoderConfig
from normlab.checks.judge.structure import start_verdict
from normlab.checks.judge.thresholds import Thresholds
from normlab.checks.structure import inspect
from normlab.checks.structure.inspect import inspect_start
from normlab.probes.start import Fresh, Start, measure_start
from normlab.targets import resolve
from tests.matrix import parametrize

WIDTH, VOCABULARY, STD = 768, 4096, 0.02
LIMITS = Thresholds()


class Echo(nn.Module):
    """An embedding, a norm and a head: the state that the head reads still is the embedding."""

    def __init__(self, tied: bool):
        super().__init__()
        self.tokens, self.own = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=STD)
        nn.init.normal_(self.own.weight, std=STD)
        if tied:
            self.own.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return self.own(x / x.square().mean(-1, keepdim=True).sqrt())


class ByHand(Echo):
    """The same with the embedding's matrix used by hand."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return x / x.square().mean(-1, keepdim=True).sqrt() @ self.tokens.weight.T


def start(model: nn.Module, **options) -> Start:
    return measure_start(Fresh("model", lambda: model, lambda model, ids: model(ids), 1, **options))[0]


def verdict(target, size: str = "tiny"):
    starts, missing, fresh = inspect_start(resolve(target), size)
    return start_verdict(starts, missing, LIMITS, fresh=fresh)


@pytest.mark.parametrize("kind", [Echo, ByHand], ids=["shared", "by-hand"])
def test_a_tied_head_gives_the_token_read_a_logit_of_width_times_std(kind):
    torch.manual_seed(0)
    found = start(kind(tied=True))
    # e·(e/RMS(e)) = √D·‖e‖ = D·σ, against V logits of variance D·σ²; ‖e‖ varies by 1/√(2D) = 2.6 % of 15.4.
    own, others = WIDTH * STD, VOCABULARY * math.exp(0.5 * WIDTH * STD**2)
    assert found.read == pytest.approx(math.exp(own) / (math.exp(own) + others), abs=0.01)
    assert found.loss == pytest.approx(math.log(math.exp(own) + others) - own / VOCABULARY, abs=0.2)
    assert found.tied


def test_random_logits_cost_half_their_variance():
    found = start(Echo(tied=False))
    assert not found.tied
    assert found.guess == math.log(VOCABULARY)
    # σ² is estimated from 3 million entries.
    assert found.random == pytest.approx(0.5 * WIDTH * STD**2, rel=0.01)
    # logsumexp of V Gaussians has a deviation of √((e^s² - 1) / V) = 0.01, over 24 tokens.
    assert found.loss == pytest.approx(found.guess + found.random, abs=0.02)
    assert found.read == pytest.approx(1.0 / VOCABULARY, rel=0.5)


def test_what_a_tied_head_would_do_is_told_beside_ones_own():
    options = {"with_tied": True}
    own, tied = measure_start(Fresh("m", lambda: Echo(tied=False), lambda m, ids: m(ids), 1, **options))
    assert (own.judged, own.tied, tied.judged, tied.tied) == (True, False, False, True)
    assert tied.loss == pytest.approx(start(Echo(tied=True)).loss, abs=0.2)
    found = start_verdict([own, tied], "", LIMITS, fresh=True)
    assert (found.finding, found.level) == ("needs its own head", "ok")


def decoder(scheme: str, tied: bool):
    def build(depth: int = 2, width: int = WIDTH) -> nn.Module:
        return Decoder(
            DecoderConfig(scheme=scheme, depth=depth, dim=width, heads=12, vocab_size=VOCABULARY, tied=tied, hidden=768)
        )

    return build


@parametrize("scheme", ["post", "geonorm", "deepnorm"], quick=["post", "geonorm"])
def test_schemes_that_echo_fail_with_a_tied_head_and_start_right_with_their_own(scheme):
    tied, own = (verdict(decoder(scheme, tied)) for tied in (True, False))
    assert (tied.finding, tied.level, tied.module) == ("echo", "fail", "head")
    assert tied.value > LIMITS.start_read == tied.threshold
    assert (own.finding, own.level) == ("fine", "ok")
    assert own.value <= own.threshold


def test_a_masked_model_that_echoes_is_found_too():
    config = EncoderConfig(
        scheme="post", depth=2, dim=WIDTH, heads=12, vocab_size=VOCABULARY, tied=True, hidden=768, max_length=64
    )
    assert verdict(lambda depth=2, width=WIDTH: Encoder(config)).finding == "echo"


def test_a_published_configuration_starts_at_its_own_width_and_vocabulary():
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=3000)
    target = resolve(config, shrink=2)
    starts, missing, fresh = inspect_start(target, "tiny")
    assert (missing, fresh) == ("", True)
    assert [(one.width, one.vocabulary, one.tied) for one in starts] == [(64, 3000, True)]
    assert start_verdict(starts, missing, LIMITS, fresh=fresh).level == "ok"


def test_a_model_that_is_too_large_is_left_out_with_a_reason(monkeypatch):
    monkeypatch.setattr(inspect, "MOST_PARAMETERS", 1000)
    found = verdict(decoder("post", True))
    assert (found.finding, found.level) == ("not measured", "ok")
    assert "parameters" in found.words


def test_models_without_a_vocabulary_have_no_start():
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4
    )
    assert verdict(config) is None


def test_a_live_module_is_left_as_it_was_and_may_be_trained_already():
    model = decoder("post", True)()
    model.train()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    found = verdict(model)
    assert (found.finding, found.level) == ("echo", "warn")
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_limit_excuses_no_more_than_two_streams():
    one = start(Echo(tied=False))
    assert one.limit(0.1) == one.guess + one.random + 0.1
    large = dataclasses.replace(one, loss=one.limit(0.1) + 1e-6)
    assert start_verdict([large], "", LIMITS, fresh=True).finding == "high first loss"


def test_a_head_whose_logits_are_large_for_any_state_starts_too_high():
    """½·D·σ² = 384 nats is what random logits of this size cost; a few answers take all of the probability."""
    torch.manual_seed(0)
    model = Echo(tied=False)
    nn.init.normal_(model.own.weight)
    found = start(model)
    assert found.random > found.guess
    assert found.limit(LIMITS.start_margin) == 2.0 * math.log(VOCABULARY) + LIMITS.start_margin
    judged = start_verdict([found], "", LIMITS, fresh=True)
    assert (judged.finding, judged.level) == ("high first loss", "fail")


@pytest.mark.parametrize("place", [0, 1])
def test_a_first_loss_that_is_not_finite_is_no_echo(place):
    torch.manual_seed(0)
    broken = Echo(tied=False)
    nn.init.constant_(broken.own.weight, math.nan)
    starts = [start(Echo(tied=False)), start(Echo(tied=False))]
    starts[place] = start(broken)
    found = start_verdict(starts, "", LIMITS, fresh=True)
    assert (found.name, found.finding, found.level) == ("start", "not finite", "fail")
    assert (found.value, found.threshold) == (None, None)
    assert found.words == "first loss is not finite with a head of its own, model"
    assert start_verdict(starts, "", LIMITS, fresh=False).level == "warn"
