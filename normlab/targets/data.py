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
"""Spread of a row's log-probabilities. At 64 tokens: 4.07 nats for a token alone, 2.24 given the one before."""
_LANGUAGE = 20251009
"""Seed of the rules themselves: one language for all checks, whatever the seed of their sequences."""
_MOST = 4096
"""Largest vocabulary of the two-token rules, which are a table of its square."""


MADE_UP = ("random", "bigram")
"""Data that needs no file."""


class TokenData(ABC):
    """Sequences of token ids below `vocabulary`, without end."""

    vocabulary: int
    unigram: float
    """Unigram entropy in nats: the loss of who knows how often each occurs, and nothing of their order."""

    @abstractmethod
    def sequences(self, batch: int, length: int, seed: int) -> Iterator[torch.Tensor]:
        """Blocks of `batch` sequences of `length` tokens, (B, T), on the CPU."""


class RandomTokens(TokenData):
    """Tokens drawn one by one, all equally likely: nothing to learn."""

    def __init__(self, vocabulary: int):
        self.vocabulary, self.unigram = vocabulary, math.log(vocabulary)

    def sequences(self, batch: int, length: int, seed: int) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randint(self.vocabulary, (batch, length), generator=generator)


class Bigrams(TokenData):
    """A language in which a token depends on the one before it: little to learn, and any sound model learns it."""

    def __init__(self, vocabulary: int):
        if vocabulary > _MOST:
            raise NormLabError(f"bigram data has a vocabulary of at most {_MOST}, got {vocabulary}; try data='random'")
        generator = torch.Generator().manual_seed(_LANGUAGE)
        scores = torch.randn(vocabulary, vocabulary, generator=generator, dtype=torch.float64)
        self.vocabulary = vocabulary
        self.rules = torch.softmax(_SHARPNESS * scores, dim=-1)
        """Row i: how likely each token is after token i."""
        self.frequencies = _stationary(self.rules)
        self.unigram = _entropy(self.frequencies)
        self.conditional = float((self.frequencies * torch.special.entr(self.rules).sum(-1)).sum())
        """Entropy of a token given the one before: the lowest loss there is."""

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
    """Windows of a text, in bytes or in the numbers of a tokenizer."""

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
    """The data that `--data` names. `vocabulary` is that of made-up tokens; a text brings its own."""
    if spec in MADE_UP:
        if vocabulary < 2:
            raise NormLabError(f"data needs a vocabulary of at least 2 tokens, got {vocabulary}; try 64")
        return RandomTokens(vocabulary) if spec == "random" else Bigrams(vocabulary)
    if not Path(spec).exists():
        raise NormLabError(f"data {spec!r} is neither 'random' nor 'bigram' nor a file that exists; check the path")
    return TextFile(spec, tokenizer)


def _stationary(rules: torch.Tensor) -> torch.Tensor:
    """How often each token occurs in a long text: p with pR = p. All rules are positive, so powers of R converge."""
    frequencies = torch.full((len(rules),), 1.0 / len(rules), dtype=rules.dtype)
    for _ in range(200):
        frequencies = frequencies @ rules
    return frequencies / frequencies.sum()


def _entropy(probabilities: torch.Tensor) -> float:
    return float(torch.special.entr(probabilities).sum())
