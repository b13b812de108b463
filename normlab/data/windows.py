"""Shuffled training windows: the order of tokens, determined by seed and epoch alone.

In each epoch all documents are concatenated in a random order, after one end token. The stream is split into windows of
`length` targets, each with the token before it, and the windows are shuffled, too, so that a batch contains many
documents even if one document is long. The fewer than `length` tokens left at the end of the stream are skipped in that
epoch; the next epoch skips others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from normlab.data.corpus import Tokens
from normlab.errors import NormLabError


class Window(NamedTuple):
    """Rows of inputs, targets (the next tokens), and the document number of each target."""

    inputs: np.ndarray
    targets: np.ndarray
    documents: np.ndarray


class Stream:
    """Documents concatenated in a given order, after one end token; supports random access."""

    def __init__(self, tokens: Tokens, order: np.ndarray):
        self._ids = tokens.ids
        # A cache ends with an end token, which is used before the first document.
        self._stored = np.concatenate([[len(tokens.ids) - 1], tokens.starts[order]])
        self._begins = np.concatenate([[0], np.cumsum(np.concatenate([[1], tokens.lengths[order]]))])

    def read(self, begins: np.ndarray, length: int) -> Window:
        """Windows that begin at `begins`, with `length` targets each.

        Document numbers are those of the targets, so an end token in the inputs belongs to the document after it. If
        attention stays within documents, the first token of a document is predicted from the end token alone.
        """
        span = length + 1
        first = np.searchsorted(self._begins, begins, "right") - 1
        count = np.searchsorted(self._begins, begins + length, "right") - first
        # One entry for each part of a document in a window.
        document = np.repeat(first, count) + _counting(count)
        start = np.maximum(self._begins[document], np.repeat(begins, count))
        size = np.minimum(self._begins[document + 1], np.repeat(begins + span, count)) - start
        where = np.repeat(self._stored[document] + start - self._begins[document], size) + _counting(size)
        ids = self._ids[where].astype(np.int64).reshape(-1, span)
        return Window(ids[:, :-1], ids[:, 1:], np.repeat(document, size).reshape(-1, span)[:, 1:])


class Windows:
    """All windows of all epochs, numbered in training order."""

    def __init__(self, tokens: Tokens, *, length: int, seed: int):
        self.length, self.per_epoch = length, tokens.n_tokens // length
        if self.per_epoch == 0:
            have = tokens.n_tokens
            raise NormLabError(
                f"the data has {have:,} tokens, fewer than one window of {length:,}; try --length {have}"
            )
        self._tokens, self._seed = tokens, seed
        self._epoch, self._stream, self._order = -1, Stream(tokens, np.empty(0, np.int64)), np.empty(0, np.int64)

    def read(self, first: int, count: int) -> Window:
        """Windows `first` to `first + count`."""
        parts = []
        while count:
            epoch, index = divmod(first, self.per_epoch)
            taken = min(count, self.per_epoch - index)
            parts.append(self._read(epoch, index, taken))
            first, count = first + taken, count - taken
        return parts[0] if len(parts) == 1 else Window(*map(np.concatenate, zip(*parts, strict=True)))

    def _read(self, epoch: int, index: int, count: int) -> Window:
        if epoch != self._epoch:
            self._stream = Stream(self._tokens, shuffled(self._tokens.n_documents, self._seed, epoch, "documents"))
            self._order = shuffled(self.per_epoch, self._seed, epoch, "windows")
            self._epoch = epoch
        return self._stream.read(self._order[index : index + count] * self.length, self.length)


def shuffled(count: int, seed: int, epoch: int, what: str) -> np.ndarray:
    """A permutation of `count` items: their indices sorted by a hash (splitmix64).

    Not numpy's generator, whose stream may change between versions: a run must resume on another machine.
    """
    return np.argsort(mix_hash(what, seed, epoch, np.arange(count, dtype=np.uint64)), kind="stable")


def mix_hash(*parts: str | int | np.ndarray | np.uint64) -> np.ndarray:
    """64-bit hash of a text and numbers or arrays of numbers: the same on every machine."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        if isinstance(part, str):
            part = int.from_bytes(part.encode()[:8], "little")
        key = _mix(key ^ (np.uint64(part % (1 << 64)) if isinstance(part, int) else part))
    return key


def _mix(x: np.ndarray | np.uint64) -> np.ndarray:
    # Overflow modulo 2^64 is intended; numpy warns about it for scalars only, so arrays are used.
    x = np.atleast_1d(np.asarray(x, np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _counting(counts: np.ndarray) -> np.ndarray:
    """0, 1, ..., c-1 for each c of `counts`, concatenated."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
