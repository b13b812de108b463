"""Data loaders for text: endless shuffled batches for training, every token once for evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

import numpy as np
import torch

from normlab.choices import Boundaries
from normlab.data.batch_loader import IGNORED, Batch, BatchLoader, check_places, to_device
from normlab.data.corpus import Tokens
from normlab.data.masking import Masking
from normlab.data.windows import Stream, Window, Windows
from normlab.errors import NormLabError, unknown

__all__ = ["IGNORED", "Batch", "Loader", "TextSamples", "evaluation_batches"]


class TextSamples:
    """The training windows of all epochs, determined by corpus, `length` and `seed` alone (`windows.py`).

    `boundaries="respected"` adds document numbers, for attention that stays within documents; the tokens are the same.
    With `masking` the targets are masked tokens (BERT) and not the next tokens.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        length: int,
        seed: int,
        boundaries: Boundaries = "packed",
        masking: Masking | None = None,
    ):
        _check(length, boundaries)
        self._windows = Windows(tokens, length=length, seed=seed)
        self._respected, self._masking = boundaries == "respected", masking
        self._identity = {"seed": seed, "length": length, "fingerprint": tokens.fingerprint}
        self.per_epoch = self._windows.per_epoch

    @property
    def identity(self) -> Mapping[str, Any]:
        return self._identity if self._masking is None else {**self._identity, "mask": self._masking.share}

    def read(self, first: int, count: int) -> Batch:
        rows = self._windows.read(first, count)
        if self._masking is not None:
            rows = self._masking.hide(rows, np.arange(first, first + count))
        return _batch(rows, self._respected)


class Loader(BatchLoader):
    """Endless batches of text: a `BatchLoader` over `TextSamples`."""

    def __init__(
        self,
        tokens: Tokens,
        *,
        length: int,
        batch: int,
        seed: int,
        boundaries: Boundaries = "packed",
        masking: Masking | None = None,
        **places: Any,
    ):
        samples = TextSamples(tokens, length=length, seed=seed, boundaries=boundaries, masking=masking)
        super().__init__(samples, batch=batch, **places)


def evaluation_batches(
    tokens: Tokens,
    *,
    length: int,
    batch: int,
    max_tokens: int | None = None,
    rank: int = 0,
    world: int = 1,
    boundaries: Boundaries = "packed",
    masking: Masking | None = None,
    device: str | torch.device = "cpu",
) -> Iterator[Batch]:
    """Evaluation batches: every token (or the first `max_tokens`) is a target exactly once, in the corpus's order.

    The first token follows an end token. All batches have the same shape and all ranks the same number of batches;
    targets after the last token are `IGNORED`. With `masking` only the masked tokens are targets, and a window that
    ends early comes with document numbers: bidirectional attention must not see its padding.
    """
    _check(length, boundaries)
    check_places(batch, rank, world)
    if max_tokens is not None and max_tokens < 1:
        raise NormLabError(f"max_tokens must be at least 1, got {max_tokens}; leave it out for all")
    total = min(tokens.n_tokens, max_tokens or tokens.n_tokens)
    stream = Stream(tokens, np.arange(tokens.n_documents))
    for first in range(0, -(-total // length), batch * world):
        number = first + rank * batch
        rows, respected = _padded(stream, number * length, length, batch, total), boundaries == "respected"
        if masking is not None:
            rows = masking.hide(rows, np.arange(number, number + batch))
            if not respected and _ends_early(rows).any():
                rows, respected = rows._replace(documents=np.minimum(rows.documents, 0)), True
        yield to_device(_batch(rows, respected), torch.device(device))


def _padded(stream: Stream, begin: int, length: int, batch: int, total: int) -> Window:
    """`batch` windows from `begin` on, padded after token `total`."""
    rows = Window(*(np.full((batch, length), value, np.int64) for value in (0, IGNORED, -1)))
    # Whole windows first, then the rest of the last one.
    whole = min(batch, max(0, (total - begin) // length))
    rest = min(length, max(0, total - begin - whole * length)) if whole < batch else 0
    for row, count, size in ((0, whole, length), (whole, 1, rest)):
        if count and size:
            found = stream.read(begin + (row + np.arange(count)) * length, size)
            for mine, read in zip(rows, found, strict=True):
                mine[row : row + count, :size] = read
    return rows


def _ends_early(rows: Window) -> np.ndarray:
    """Which windows begin with tokens and end with padding."""
    return (rows.documents[:, 0] >= 0) & (rows.documents[:, -1] < 0)


def _batch(rows: Window, respected: bool) -> Batch:
    inputs, targets, documents = (torch.from_numpy(np.ascontiguousarray(array)) for array in rows)
    return Batch(inputs, targets, documents if respected else None)


def _check(length: int, boundaries: str) -> None:
    if length < 1:
        raise NormLabError(f"length must be at least 1, got {length}")
    if boundaries not in get_args(Boundaries):
        raise unknown("boundaries", boundaries, get_args(Boundaries))
