"""Unigram cross-entropy: the loss of a model that predicts token frequencies and nothing else.

Formula    H = −Σ_v  n_v / n · ln q_v,   q_v = (c_v + 1) / (c + V)

with c_v the count of class v among the training targets (add-one smoothed over V classes) and n_v its count among the
evaluation targets. A model whose loss is not below H has learned no more than class frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from normlab.data.corpus import Tokens

LIMIT = 2**26
"""Approximate number of training tokens to count. Of a larger corpus an evenly spread sample is counted."""

_PIECES = 64
"""Number of runs of consecutive documents in a sample."""

_AT_A_TIME = 2**22
"""Tokens counted at a time, because numpy widens them to eight bytes each."""

_counted: dict[tuple[str, int, int], np.ndarray] = {}
"""Counts by fingerprint, vocabulary and limit: a process that executes many runs counts their data once."""


def unigram_cross_entropy(trained: np.ndarray, asked: np.ndarray) -> float:
    """Cross-entropy in nats of targets counted in `asked` under the add-one smoothed frequencies of `trained`."""
    guesses = (trained + 1.0) / (trained.sum() + len(trained))
    return float(-(asked * np.log(guesses)).sum() / asked.sum())


def token_counts(tokens: Tokens, vocabulary: int, *, limit: int = LIMIT) -> np.ndarray:
    """Counts of each token in one split of a corpus, from about `limit` tokens."""
    key = (tokens.fingerprint, vocabulary, limit)
    if key not in _counted:
        _counted[key] = _count(tokens, vocabulary, limit)
    return _counted[key].copy()


def _count(tokens: Tokens, vocabulary: int, limit: int) -> np.ndarray:
    counts = np.zeros(vocabulary, np.int64)
    for start, stop in _stretches(tokens, limit):
        for first in range(start, stop, _AT_A_TIME):
            piece = tokens.ids[first : min(first + _AT_A_TIME, stop)]
            counts += np.bincount(piece, minlength=vocabulary)
    return counts


def _stretches(tokens: Tokens, limit: int) -> Iterator[tuple[int, int]]:
    """Ranges of token indices to count: the chosen documents, consecutive ones joined."""
    ends = np.cumsum(tokens.lengths)
    # The documents at the beginning of each piece of the corpus.
    chosen = (ends * _PIECES / ends[-1]) % 1.0 < limit / ends[-1]
    starts, stops = tokens.starts[chosen], (tokens.starts + tokens.lengths)[chosen]
    apart = np.flatnonzero(starts[1:] != stops[:-1])
    first, last = np.concatenate([[0], apart + 1]), np.concatenate([apart, [len(starts) - 1]])
    return zip(starts[first].tolist(), stops[last].tolist(), strict=True)
