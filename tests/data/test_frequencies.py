"""The unigram entropy against closed forms; counts against numpy on whole documents."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from normlab.data import Tokens
from normlab.data import frequencies as module
from normlab.data.frequencies import token_counts, unigram_cross_entropy


@pytest.fixture(autouse=True)
def nothing_counted(monkeypatch):
    """The tokens of all these tests have one fingerprint."""
    monkeypatch.setattr(module, "_counted", {})


def side(ids: np.ndarray, starts: list[int], lengths: list[int]) -> Tokens:
    return Tokens(ids, np.array(starts), np.array(lengths), n_bytes=1, fingerprint="test")


def documents(count: int, seed: int = 0) -> Tokens:
    """Documents of random lengths and tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, count)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return Tokens(rng.integers(0, 50, starts[-1]).astype(np.uint16), starts[:-1], lengths, 1, "test")


@pytest.mark.parametrize(("answers", "each"), [(2, 1), (10, 7), (32768, 3)])
def test_answers_that_are_equally_likely_cost_their_logarithm(answers, each):
    counts = np.full(answers, each)
    assert unigram_cross_entropy(counts, counts) == pytest.approx(math.log(answers), rel=1e-12)


def test_the_add_one_rule_by_hand():
    # (3 + 1) / (4 + 3), (1 + 1) / 7 and, never seen in training, 1 / 7.
    expected = -(2 * math.log(4 / 7) + math.log(2 / 7) + math.log(1 / 7)) / 4
    assert unigram_cross_entropy(np.array([3, 1, 0]), np.array([2, 1, 1])) == pytest.approx(expected, rel=1e-12)


def test_many_counts_are_the_entropy():
    chances = np.array([0.5, 0.25, 0.125, 0.125])
    counts = (chances * 2**40).astype(np.int64)
    # Smoothing moves a frequency by 1 / 2^40.
    assert unigram_cross_entropy(counts, counts) == pytest.approx(1.75 * math.log(2), rel=1e-9)


def test_only_the_documents_of_a_side_are_counted():
    ids = np.array([0, 0, 1, 2, 2, 2, 3, 4], np.uint16)
    # The first, the third and the fourth of four documents: the last two stand together.
    counts = token_counts(side(ids, [0, 3, 6], [2, 3, 2]), 6)
    assert counts.tolist() == [2, 0, 3, 1, 1, 0]


def test_counting_in_pieces_changes_nothing(monkeypatch):
    tokens = documents(200)
    whole = token_counts(tokens, 60)
    assert whole.tolist() == np.bincount(tokens.ids, minlength=60).tolist()
    monkeypatch.setattr(module, "_AT_A_TIME", 7)
    module._counted.clear()
    assert token_counts(tokens, 60).tolist() == whole.tolist()


def test_the_same_tokens_are_counted_once_and_the_counts_are_the_callers(monkeypatch):
    tokens, counted, stretches = documents(50), [], module._stretches
    monkeypatch.setattr(module, "_stretches", lambda *of: counted.append(of) or stretches(*of))
    first = token_counts(tokens, 60)
    first[3] = 0
    again = token_counts(tokens, 60)
    assert len(counted) == 1
    assert again.tolist() == np.bincount(tokens.ids, minlength=60).tolist()
    token_counts(tokens, 61)
    token_counts(replace(tokens, fingerprint="other"), 60)
    assert len(counted) == 3


def test_a_large_corpus_is_sampled_from_all_of_it():
    tokens = documents(20_000)
    # What stands in the second half of the corpus is another token.
    ids = tokens.ids % 25 + 25 * (np.arange(len(tokens.ids)) >= len(tokens.ids) // 2).astype(np.uint16)
    halves = Tokens(ids, tokens.starts, tokens.lengths, 1, "test")
    limit = len(ids) // 8
    counts = token_counts(halves, 50, limit=limit)
    # A piece ends with a whole document: up to 39 tokens more or less in each of 64.
    assert counts.sum() == pytest.approx(limit, abs=64 * 40)
    # Binomial counts of 25 tokens in each half: five deviations.
    expected = limit / 50
    assert np.abs(counts - expected).max() < 5 * math.sqrt(expected) + 64 * 40 / 50


def test_one_document_larger_than_the_limit_is_counted():
    ids = np.arange(100, dtype=np.uint16)
    assert token_counts(side(ids, [0], [100]), 100, limit=10).sum() == 100
