"""The first loss of every scheme at real widths: what random logits cost, and no word about the token just read.

A tied head multiplies the embedding of the token read with itself where the exit state still is that embedding: a logit
of about width · std, 15 at width 768 and 1 at width 64. So no test at width 64 can see it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

import normlab
from normlab.models.config import PRESETS, DecoderConfig
from tests.matrix import parametrize

WIDE = {"depth": 2, "dim": 768, "heads": 12, "vocab_size": 8192}
BOOKS = {"depth": 12, "dim": 768, "heads": 12, "vocab_size": 32768}
# 125m is whole. Of the larger ones depth and width matter: of the vocabulary the loss has ln V and chance. 350m is as
# deep as 1.3b, and nothing but depth takes the token read away from the exit.
SIZES = {
    **PRESETS,
    "350m": {**PRESETS["350m"], "vocab_size": 8192},
    "1.3b": {**PRESETS["1.3b"], "vocab_size": 8192, "depth": 2},
    "books": BOOKS,
}
ECHOING = ("deepnorm", "dual", "geonorm", "lambdas", "mix", "post", "siamese", "spannorm")
# `none` has no norm at the exit: its logits are as large as its state.
SCHEMES = [name for name in normlab.list_schemes() if name != "none"]


@dataclass(frozen=True)
class Start:
    """How a model starts, on tokens and targets that have nothing to do with each other."""

    excess: float
    """Expected loss above ln V."""
    read: float
    """Mean probability of the token just read."""
    spread: float
    """½ · width · std²: half the variance of the logits of features of unit RMS."""
    features: float
    """Mean square of the features that the head reads."""


@cache
def start(scheme: str, tied: bool, size: str = "") -> Start:
    torch.manual_seed(0)
    fields: dict[str, Any] = SIZES[size] if size else WIDE
    model = DecoderConfig(scheme=scheme, tied=tied, **fields).build()
    tokens = torch.randint(0, fields["vocab_size"], (2, 32))
    with torch.no_grad():
        features = model.features(tokens)
        logits = model.logits(features).float()
    normaliser = logits.logsumexp(-1)
    matrix = model.embedding.weight if model.head.weight is None else model.head.weight
    return Start(
        # Over all targets instead of some: nothing is left to chance but the weights.
        excess=(normaliser - logits.mean(-1)).mean().item() - math.log(fields["vocab_size"]),
        read=(logits.gather(-1, tokens[..., None]).squeeze(-1) - normaliser).exp().mean().item(),
        spread=0.5 * fields["dim"] * matrix.detach().square().mean().item(),
        features=features.float().square().mean().item(),
    )


def check_own_head(scheme: str, size: str = "") -> None:
    found = start(scheme, False, size)
    assert found.read < 0.05
    # A sum of two streams of unit RMS: up to 4 times the variance (its card says so).
    streams = normlab.scheme(scheme).streams
    assert found.excess < streams**2 * found.spread + (0.1 if streams == 1 else 0.0)


@parametrize("scheme", ["pre", "post", "geonorm", "dual"], quick=["post", "dual"])
def test_a_head_of_its_own_starts_as_random_logits_do(scheme):
    check_own_head(scheme)
    found = start(scheme, False)
    # ln E exp of logits of variance v is v/2, but for what 8,192 answers leave to chance: (exp v − 1) / 2V.
    assert found.excess == pytest.approx(found.features * found.spread, rel=0.02)


@pytest.mark.parametrize("scheme", ["post", "geonorm"])
def test_a_tied_head_repeats_the_token_read(scheme):
    """The negative control, far from the rule: most of the probability, and a nat or more."""
    found = start(scheme, True)
    assert found.read > 0.5
    assert found.excess > found.spread + 1.0


@pytest.mark.full
@pytest.mark.parametrize("size", PRESETS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_at_every_size(scheme, size):
    check_own_head(scheme, size)
    start.cache_clear()


@pytest.mark.full
@pytest.mark.parametrize("scheme", SCHEMES)
def test_which_schemes_echo_with_a_tied_head(scheme):
    if any(need.name == "untied-head" for need in normlab.scheme(scheme).needs):
        with pytest.raises(normlab.NormLabError, match="needs a head of its own"):
            start(scheme, True, "books")
        return
    found = start(scheme, True, "books")
    start.cache_clear()
    if scheme in ECHOING:
        # Far from the rule: most of the probability, and a nat or more.
        assert found.read > 0.5
        assert found.excess > found.spread + 1.0
    else:
        assert found.read < 0.05
        assert found.excess < found.spread + 0.1
