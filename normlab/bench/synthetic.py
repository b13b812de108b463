"""Synthetic text for benchmarks: random tokens of a vocabulary, as frequent as in a language."""

from __future__ import annotations

import numpy as np

from normlab.data import Corpus, Tokens
from normlab.data.tokenizer import Bytes


class Words(Bytes):
    """Placeholder tokenizer: it has a vocabulary size and encodes no text."""

    def __init__(self, vocabulary: int):
        self.name, self.vocab_size, self.end = "synthetic", vocabulary, vocabulary - 1
        self.fingerprint = f"synthetic-{vocabulary}"


def synthetic_corpus(vocabulary: int, tokens: int, seed: int = 0) -> Corpus:
    """Tokens drawn independently, the k-th with a probability that falls like 1 / k (Zipf); a tenth for validation."""
    weights = 1.0 / np.arange(1, vocabulary + 1)
    chances = np.cumsum(weights / weights.sum())
    chances[-1] = 1.0
    words = Words(vocabulary)
    ids = np.searchsorted(chances, np.random.default_rng(seed).random(tokens), "right").astype(words.dtype)
    # A cache ends with an end token.
    ids = np.concatenate([ids, np.array([words.end], words.dtype)])
    cut = tokens - max(1, tokens // 10)
    return Corpus(_part(ids, 0, cut), _part(ids, cut, tokens), words, "synthetic tokens")


def _part(ids: np.ndarray, start: int, stop: int) -> Tokens:
    name = f"synthetic-{ids[:-1].max()}-{start}-{stop}"
    # A token of a language is some four bytes.
    return Tokens(ids, np.array([start]), np.array([stop - start]), 4 * (stop - start), name)
