"""Batches: for training in an order that no number of machines changes, for evaluation each token once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self, get_args

import numpy as np
import torch

from normlab.choices import Boundaries
from normlab.data.corpus import Tokens
from normlab.data.prefetch import Prefetch
from normlab.data.windows import Stream, Window, Windows
from normlab.errors import NormLabError, unknown

IGNORED = -100
"""The target of a place that is not scored, as `torch.nn.functional.cross_entropy` has it."""


class Batch(NamedTuple):
    """B sequences of T tokens."""

    inputs: torch.Tensor
    """(B, T) int64."""

    targets: torch.Tensor
    """(B, T) int64: the token that follows each input; `IGNORED` where none is to be predicted."""

    documents: torch.Tensor | None
    """(B, T) int64, equal within a document, where boundaries are respected."""


class Loader:
    """Batches of `batch` sequences for one of `world` ranks, without end.

    The sequences of all epochs stand in one line, a function of the corpus, `length` and `seed` alone (`windows.py`).
    Each step takes the next `world · batch` of them, rank 0 the first `batch`: two ranks with 4 see in a step what one
    with 8 sees. `state_dict` says how far down the line the batches handed out have come; a loader with another number
    of ranks or another batch goes on from exactly there.

    `boundaries="respected"` adds the document of every token for attention that stays within documents; the tokens are
    the same. A thread works `prefetch` batches ahead (0: none); for a CUDA device it leaves them in pinned memory and
    the copy is queued behind the GPU's own work, so that neither waits. Close it, or use it in a `with`.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        length: int,
        batch: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        boundaries: Boundaries = "packed",
        device: str | torch.device = "cpu",
        prefetch: int = 4,
    ):
        _check(length, batch, rank, world, boundaries)
        if prefetch < 0:
            raise NormLabError(f"prefetch must be 0 or more batches, got {prefetch}; try 4")
        self._windows = Windows(tokens, length=length, seed=seed)
        self._state = {"seed": seed, "length": length, "fingerprint": tokens.fingerprint}
        self._batch, self._rank, self._world = batch, rank, world
        self._respected, self._device, self._prefetch = boundaries == "respected", torch.device(device), prefetch
        self._sequence = 0
        self._ahead: Prefetch[Batch] | Iterator[Batch] | None = None

    @property
    def sequences_per_epoch(self) -> int:
        """How many sequences an epoch has, over all ranks."""
        return self._windows.per_epoch

    @property
    def epoch(self) -> float:
        """How often the corpus was seen so far."""
        return self._sequence / self._windows.per_epoch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._ahead is None:
            made = self._made()
            self._ahead = Prefetch(made, self._prefetch) if self._prefetch else made
        batch = next(self._ahead)
        self._sequence += self._batch * self._world
        return _moved(batch, self._device)

    def state_dict(self) -> dict[str, Any]:
        """Where the batches handed out end: the same on every rank."""
        return {"sequence": self._sequence, **self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, which a loader of the same corpus, length and seed gave."""
        for name, mine in self._state.items():
            if state.get(name) != mine:
                what = f"another {'corpus' if name == 'fingerprint' else name}"
                raise NormLabError(f"cannot resume on {what}: saved with {name} {state.get(name)}, this has {mine}")
        self.close()
        self._sequence = int(state["sequence"])

    def close(self) -> None:
        """End the thread. The loader can go on: the next batch starts another."""
        if isinstance(self._ahead, Prefetch):
            self._ahead.close()
        self._ahead = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _made(self) -> Iterator[Batch]:
        first = self._sequence + self._rank * self._batch
        return _batches(self._windows, first, self._batch, self._world, self._respected, self._device.type == "cuda")


def evaluation_batches(
    tokens: Tokens,
    *,
    length: int,
    batch: int,
    max_tokens: int | None = None,
    rank: int = 0,
    world: int = 1,
    boundaries: Boundaries = "packed",
    device: str | torch.device = "cpu",
) -> Iterator[Batch]:
    """Every token of `tokens` (or of the first `max_tokens`) as a target exactly once, in the order of the corpus.

    The first token follows an end token. All batches have one shape and all ranks the same number of them; what is
    beyond the last token is `IGNORED`.
    """
    _check(length, batch, rank, world, boundaries)
    if max_tokens is not None and max_tokens < 1:
        raise NormLabError(f"max_tokens must be at least 1, got {max_tokens}; leave it out for all")
    total = min(tokens.n_tokens, max_tokens or tokens.n_tokens)
    stream = Stream(tokens, np.arange(tokens.n_documents))
    for first in range(0, -(-total // length), batch * world):
        rows = _padded(stream, (first + rank * batch) * length, length, batch, total)
        yield _moved(_batch(rows, boundaries == "respected"), torch.device(device))


def _padded(stream: Stream, begin: int, length: int, batch: int, total: int) -> Window:
    """`batch` windows from `begin` on, of which none reaches beyond `total`."""
    rows = Window(*(np.full((batch, length), value, np.int64) for value in (0, IGNORED, -1)))
    # Whole windows first, then what is left of the last one.
    whole = min(batch, max(0, (total - begin) // length))
    rest = min(length, max(0, total - begin - whole * length)) if whole < batch else 0
    for row, count, size in ((0, whole, length), (whole, 1, rest)):
        if count and size:
            found = stream.read(begin + (row + np.arange(count)) * length, size)
            for mine, read in zip(rows, found, strict=True):
                mine[row : row + count, :size] = read
    return rows


def _batches(windows: Windows, first: int, batch: int, world: int, respected: bool, pinned: bool) -> Iterator[Batch]:
    while True:
        made = _batch(windows.read(first, batch), respected)
        yield _each(made, torch.Tensor.pin_memory) if pinned else made
        first += batch * world


def _batch(rows: Window, respected: bool) -> Batch:
    inputs, targets, documents = (torch.from_numpy(np.ascontiguousarray(array)) for array in rows)
    return Batch(inputs, targets, documents if respected else None)


def _moved(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    return _each(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _each(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    inputs, targets, documents = batch
    return Batch(change(inputs), change(targets), None if documents is None else change(documents))


def _check(length: int, batch: int, rank: int, world: int, boundaries: str) -> None:
    for name, value in (("length", length), ("batch", batch), ("world", world)):
        if value < 1:
            raise NormLabError(f"{name} must be at least 1, got {value}")
    if not 0 <= rank < world:
        raise NormLabError(f"rank must lie in 0 to {world - 1} for a world of {world}, got {rank}")
    if boundaries not in get_args(Boundaries):
        raise unknown("boundaries", boundaries, get_args(Boundaries))
