"""Tokens to check on: the language has the entropies it claims, and a seed means the same sequences everywhere."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from normlab import NormLabError
from normlab.targets.data import Bigrams, RandomTokens, token_data


def first(data, count: int, seed: int = 0, batch: int = 8, length: int = 48) -> torch.Tensor:
    return torch.cat(list(itertools.islice(data.sequences(batch, length, seed), count)))


@pytest.mark.parametrize("vocabulary", [2, 3, 64])
def test_the_language_is_stationary_and_follows_its_rules(vocabulary):
    data = Bigrams(vocabulary)
    torch.testing.assert_close(data.frequencies @ data.rules, data.frequencies)
    tokens = first(data, 40)
    assert tokens.min() >= 0
    assert tokens.max() < vocabulary
    after_zero = tokens[:, 1:][tokens[:, :-1] == 0]
    # Sequences begin as they go on, and each token follows the rule of the one before.
    for drawn, expected in [(tokens[:, 0], data.frequencies), (after_zero, data.rules[0])]:
        seen = torch.bincount(drawn, minlength=vocabulary) / len(drawn)
        # A share p of n draws has a standard deviation of √(p(1−p)/n); five of them, and one draw for rare tokens.
        spread = (expected * (1 - expected) / len(drawn)).sqrt()
        assert (seen - expected).abs().le(5 * spread + 1 / len(drawn)).all()


def test_entropies_are_those_of_the_chain():
    data = Bigrams(64)
    by_hand = -(data.frequencies[:, None] * data.rules * data.rules.log()).sum()
    assert data.conditional == pytest.approx(float(by_hand))
    assert data.unigram == pytest.approx(float(-(data.frequencies * data.frequencies.log()).sum()))
    # Knowing the token before must help a good deal, or a burst could not tell a model that learns from a dead one.
    assert data.conditional + 1.5 < data.unigram < math.log(64)
    assert RandomTokens(64).unigram == math.log(64)


@pytest.mark.parametrize("spec", ["random", "bigram"])
def test_a_seed_means_the_same_sequences(spec):
    data = token_data(spec)
    assert torch.equal(first(data, 3), first(token_data(spec), 3))
    assert not torch.equal(first(data, 3), first(data, 3, seed=1))
    assert not torch.equal(first(data, 2)[:8], first(data, 2)[8:])
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first(data, 1)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_text_is_read_in_bytes(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("abababababababab" * 50)
    data = token_data(str(path), vocabulary=7)
    tokens = first(data, 2, batch=3, length=9)
    assert tokens.shape == (6, 9)
    assert {chr(t) for t in tokens.unique() if t < 256} == {"a", "b"}
    assert data.vocabulary == 257
    # Two letters, equally often, and one end of the text among 801 tokens.
    end = 1 / 801
    assert data.unigram == pytest.approx(-end * math.log(end) - (1 - end) * math.log((1 - end) / 2), abs=0.02)


@pytest.mark.parametrize(
    ("spec", "options", "match"),
    [
        ("nowhere.txt", {}, "neither 'random' nor 'bigram' nor a file that exists"),
        ("bigram", {"vocabulary": 1}, "at least 2 tokens, got 1"),
        ("bigram", {"vocabulary": 5000}, "at most 4096, got 5000"),
    ],
)
def test_bad_data_is_named(spec, options, match):
    with pytest.raises(NormLabError, match=match):
        token_data(spec, **options)
