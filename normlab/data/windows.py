"""The order in which tokens are seen: a function of seed and epoch alone.

An epoch lays all documents end to end in a random order, after one end token; the stream is cut into windows of
`length` tokens to predict (each with the token before it), and the windows are shuffled too, so that a batch holds many
documents even where one document is long. The fewer than `length` tokens left over at the end of the stream are not
seen in that epoch; the next one leaves out others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from normlab.data.corpus import Tokens
from normlab.errors import NormLabError


class Window(NamedTuple):
    """Rows of inputs, what follows each of them, and the number of the document to which that belongs."""

    inputs: np.ndarray
    targets: np.ndarray
    documents: np.ndarray


class Stream:
    """Documents laid end to end in a given order, after one end token; any part of it can be read at once."""

    def __init__(self, tokens: Tokens, order: np.ndarray):
        self._ids = tokens.ids
        # A cache ends with an end token: the one that stands before the first document.
        self._stored = np.concatenate([[len(tokens.ids) - 1], tokens.starts[order]])
        self._begins = np.concatenate([[0], np.cumsum(np.concatenate([[1], tokens.lengths[order]]))])

    def read(self, begins: np.ndarray, length: int) -> Window:
        """Windows that begin at `begins`, with `length` tokens to predict each.

        A target's document is its own, so an end token that is an input already belongs to the document it opens: where
        attention stays within documents, the first token of one is predicted from the end token alone.
        """
        span = length + 1
        first = np.searchsorted(self._begins, begins, "right") - 1
        count = np.searchsorted(self._begins, begins + length, "right") - first
        # One entry for each part of a document that a window shows.
        document = np.repeat(first, count) + _counting(count)
        start = np.maximum(self._begins[document], np.repeat(begins, count))
        size = np.minimum(self._begins[document + 1], np.repeat(begins + span, count)) - start
        where = np.repeat(self._stored[document] + start - self._begins[document], size) + _counting(size)
        ids = self._ids[where].astype(np.int64).reshape(-1, span)
        return Window(ids[:, :-1], ids[:, 1:], np.repeat(document, size).reshape(-1, span)[:, 1:])


class Windows:
    """All windows of all epochs, numbered in the order in which training sees them."""

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
    """A permutation of `count` things: they are sorted by a hash of their number (splitmix64).

    Our own and not numpy's generator, whose stream may change between versions: a run must resume on another machine.
    """
    return np.argsort(mix_hash(what, seed, epoch, np.arange(count, dtype=np.uint64)), kind="stable")


def mix_hash(*parts: str | int | np.ndarray | np.uint64) -> np.ndarray:
    """A hash of what it is for and of some numbers, arrays among them: equal parts give equal bits on every machine."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        if isinstance(part, str):
            part = int.from_bytes(part.encode()[:8], "little")
        key = _mix(key ^ (np.uint64(part % (1 << 64)) if isinstance(part, int) else part))
    return key


def _mix(x: np.ndarray | np.uint64) -> np.ndarray:
    # Wrapping around 2^64 is the point; only scalars would warn of it, so there are none.
    x = np.atleast_1d(np.asarray(x, np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _counting(counts: np.ndarray) -> np.ndarray:
    """0, 1, ..., c-1 for each c of `counts`, in a row."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
