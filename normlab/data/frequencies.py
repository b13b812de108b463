"""Token frequencies, and the loss of a model that knows nothing else: the entropy of single tokens.

Formula    H = −Σ_v  n_v / n · ln q_v,   q_v = (c_v + 1) / (c + V)

with c_v the count of answer v among the training targets (add-one smoothed over V answers) and n_v its count among the
targets of an evaluation. A model whose loss is not below H has learnt no more than how often each answer occurs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from normlab.data.corpus import Tokens

LIMIT = 2**26
"""Training tokens that are counted, about. Of a larger corpus a sample is counted, spread evenly over its documents."""

_PIECES = 64
"""Stretches of neighbouring documents that a sample is made of."""

_AT_A_TIME = 2**22
"""Tokens that are counted at a time: numpy widens them to eight bytes each."""


def unigram_cross_entropy(trained: np.ndarray, asked: np.ndarray) -> float:
    """Cross-entropy in nats of targets counted in `asked` under the add-one smoothed frequencies of `trained`."""
    guesses = (trained + 1.0) / (trained.sum() + len(trained))
    return float(-(asked * np.log(guesses)).sum() / asked.sum())


def token_counts(tokens: Tokens, vocabulary: int, *, limit: int = LIMIT) -> np.ndarray:
    """How often each token occurs in the documents of one side of a corpus, counted on about `limit` tokens."""
    counts = np.zeros(vocabulary, np.int64)
    for start, stop in _stretches(tokens, limit):
        for first in range(start, stop, _AT_A_TIME):
            piece = tokens.ids[first : min(first + _AT_A_TIME, stop)]
            counts += np.bincount(piece, minlength=vocabulary)
    return counts


def _stretches(tokens: Tokens, limit: int) -> Iterator[tuple[int, int]]:
    """Ranges of ids: the documents to count, neighbours joined."""
    ends = np.cumsum(tokens.lengths)
    # Of each piece of the corpus the documents at its beginning.
    chosen = (ends * _PIECES / ends[-1]) % 1.0 < limit / ends[-1]
    starts, stops = tokens.starts[chosen], (tokens.starts + tokens.lengths)[chosen]
    apart = np.flatnonzero(starts[1:] != stops[:-1])
    first, last = np.concatenate([[0], apart + 1]), np.concatenate([apart, [len(starts) - 1]])
    return zip(starts[first].tolist(), stops[last].tolist(), strict=True)
