"""Token data for checks: random tokens, a bigram language, or a text file.

Whatever the source, the same seed gives the same sequences to every depth, width and learning rate: what differs
between two runs of a ladder is the model alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from normlab.data import prepare
from normlab.data.windows import Windows
from normlab.errors import NormLabError

_SHARPNESS = 2.5
"""Standard deviation of log-probabilities. At 64 tokens: entropy 4.07 nats for a token, 2.24 given the one before."""
_LANGUAGE = 20251009
"""Seed of the transition matrix: the same language for all checks; sequences have seeds of their own."""
_MOST = 4096
"""Largest vocabulary of the bigram language, whose transition matrix has its square of entries."""


MADE_UP = ("random", "bigram")
"""Names of synthetic data."""


class TokenData(ABC):
    """Endless sequences of token ids below `vocabulary`."""

    vocabulary: int
    unigram: float
    """Unigram entropy in nats: the loss of predicting token frequencies alone."""

    @abstractmethod
    def sequences(self, batch: int, length: int, seed: int) -> Iterator[torch.Tensor]:
        """Yield tensors (B, T) of `batch` sequences of `length` tokens, on the CPU."""


class RandomTokens(TokenData):
    """Independent tokens from a uniform distribution: nothing can be learnt."""

    def __init__(self, vocabulary: int):
        self.vocabulary, self.unigram = vocabulary, math.log(vocabulary)

    def sequences(self, batch: int, length: int, seed: int) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randint(self.vocabulary, (batch, length), generator=generator)


class Bigrams(TokenData):
    """A bigram language, in which a token depends on the one before it: easy to learn."""

    def __init__(self, vocabulary: int):
        if vocabulary > _MOST:
            raise NormLabError(f"bigram data has a vocabulary of at most {_MOST}, got {vocabulary}; try data='random'")
        generator = torch.Generator().manual_seed(_LANGUAGE)
        scores = torch.randn(vocabulary, vocabulary, generator=generator, dtype=torch.float64)
        self.vocabulary = vocabulary
        self.rules = torch.softmax(_SHARPNESS * scores, dim=-1)
        """Transition matrix: row i has the probabilities of the next token after token i."""
        self.frequencies = _stationary(self.rules)
        self.unigram = _entropy(self.frequencies)
        self.conditional = float((self.frequencies * torch.special.entr(self.rules).sum(-1)).sum())
        """Entropy of a token given the one before: the lowest possible loss."""

    def sequences(self, batch: int, length: int, seed: int) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        # The last entry is 1 but for rounding; a draw beyond it would fall out of the vocabulary.
        steps, first = (torch.cumsum(p, -1)[..., :-1].contiguous() for p in (self.rules, self.frequencies))
        while True:
            draws = torch.rand(length, batch, 1, generator=generator, dtype=torch.float64)
            tokens = [torch.searchsorted(first.expand(batch, -1).contiguous(), draws[0])]
            for draw in draws[1:]:
                tokens.append(torch.searchsorted(steps[tokens[-1].squeeze(-1)], draw))
            yield torch.cat(tokens, dim=-1)


class TextFile(TokenData):
    """Windows of a text file, as bytes or as tokens of a tokenizer."""

    def __init__(self, path: str, tokenizer: str = "bytes"):
        corpus = prepare([path], tokenizer=tokenizer, progress=False)
        self._tokens, self.vocabulary = corpus.train, corpus.tokenizer.vocab_size
        counts = np.bincount(np.asarray(corpus.train.ids), minlength=self.vocabulary)
        self.unigram = _entropy(torch.from_numpy(counts / counts.sum()))

    def sequences(self, batch: int, length: int, seed: int) -> Iterator[torch.Tensor]:
        windows, seen = Windows(self._tokens, length=length - 1, seed=seed), 0
        while True:
            found = windows.read(seen, batch)
            yield torch.from_numpy(np.concatenate([found.inputs[:, :1], found.targets], axis=1))
            seen += batch


def token_data(spec: str, *, vocabulary: int = 64, tokenizer: str = "bytes") -> TokenData:
    """The data named by `--data`. `vocabulary` is for synthetic data; a text has its own."""
    if spec in MADE_UP:
        if vocabulary < 2:
            raise NormLabError(f"data needs a vocabulary of at least 2 tokens, got {vocabulary}; try 64")
        return RandomTokens(vocabulary) if spec == "random" else Bigrams(vocabulary)
    if not Path(spec).exists():
        raise NormLabError(f"data {spec!r} is neither 'random' nor 'bigram' nor a file that exists; check the path")
    return TextFile(spec, tokenizer)


def _stationary(rules: torch.Tensor) -> torch.Tensor:
    """Stationary distribution p with pR = p; all entries of R are positive, so that its powers converge."""
    frequencies = torch.full((len(rules),), 1.0 / len(rules), dtype=rules.dtype)
    for _ in range(200):
        frequencies = frequencies @ rules
    return frequencies / frequencies.sum()


def _entropy(probabilities: torch.Tensor) -> float:
    return float(torch.special.entr(probabilities).sum())
