"""Endless batches in a global order that does not depend on the number of processes; resumable at the exact sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import torch

from normlab.data.prefetch import Prefetch
from normlab.errors import NormLabError

IGNORED = -100
"""The target of positions without a loss, the default `ignore_index` of `torch.nn.functional.cross_entropy`."""


class Batch(NamedTuple):
    """One batch: inputs, targets and optional document numbers."""

    inputs: torch.Tensor
    """(B, T) int64 tokens, or (B, C, H, W) float32 pixels."""

    targets: torch.Tensor
    """int64 targets: (B, T) tokens or (B,) classes; `IGNORED` for positions without a loss."""

    documents: torch.Tensor | None = None
    """(B, T) int64 document numbers, equal within a document, if boundaries are respected."""

    @property
    def options(self) -> dict[str, torch.Tensor]:
        """Keyword arguments for the model besides inputs and targets."""
        return {} if self.documents is None else {"documents": self.documents}


class SampleSequence(Protocol):
    """The samples of all epochs, numbered in training order."""

    per_epoch: int
    """Samples in an epoch."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """What determines the samples, such as seed and `fingerprint`: a loader resumes only if it is equal."""
        ...

    def read(self, first: int, count: int) -> Batch:
        """The samples from `first` to `first + count` as one batch."""
        ...


class BatchLoader:
    """An endless iterator over batches of `batch` samples, for one of `world` ranks.

    Each step takes the next `world · batch` samples, rank 0 the first `batch` of them: two ranks with 4 get in one step
    what one rank with 8 gets. `state_dict` holds the number of samples returned so far; a loader with another number of
    ranks or another batch size continues from exactly there.

    A thread prepares `prefetch` batches ahead (0: none). For a CUDA device it pins their memory and the copy is
    asynchronous. Close it, or use it in a `with` statement.
    """

    def __init__(
        self,
        samples: SampleSequence,
        *,
        batch: int,
        rank: int = 0,
        world: int = 1,
        device: str | torch.device = "cpu",
        prefetch: int = 4,
    ):
        check_places(batch, rank, world)
        if prefetch < 0:
            raise NormLabError(f"prefetch must be 0 or more batches, got {prefetch}; try 4")
        self._samples, self._batch, self._rank, self._world = samples, batch, rank, world
        self._device, self._prefetch = torch.device(device), prefetch
        self._sequence = 0
        self._ahead: Prefetch[Batch] | Iterator[Batch] | None = None

    @property
    def epoch(self) -> float:
        """Epochs completed so far, as a fraction."""
        return self._sequence / self._samples.per_epoch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._ahead is None:
            made = self._made()
            self._ahead = Prefetch(made, self._prefetch) if self._prefetch else made
        batch = next(self._ahead)
        self._sequence += self._batch * self._world
        return to_device(batch, self._device)

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches returned so far: the same on every rank."""
        return {"sequence": self._sequence, **self._samples.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; raises if it belongs to other data, another seed or another length."""
        for name, mine in self._samples.identity.items():
            if state.get(name) != mine:
                what = f"another {'corpus' if name == 'fingerprint' else name}"
                raise NormLabError(f"cannot resume on {what}: saved with {name} {state.get(name)}, this has {mine}")
        self.close()
        self._sequence = int(state["sequence"])

    def close(self) -> None:
        """Stop the prefetching thread; the next batch starts a new one."""
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
        return batches(self._samples, first, self._batch, self._world, pinned=self._device.type == "cuda")


def batches(samples: SampleSequence, first: int, batch: int, world: int, *, pinned: bool) -> Iterator[Batch]:
    """Endless batches of one rank, from sample `first` on."""
    while True:
        made = samples.read(first, batch)
        yield _each(made, torch.Tensor.pin_memory) if pinned else made
        first += batch * world


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to a device, asynchronously from pinned memory."""
    if device.type == "cpu":
        return batch
    return _each(batch, lambda tensor: tensor.to(device, non_blocking=True))


def check_places(batch: int, rank: int, world: int) -> None:
    """Raise for an invalid batch size, rank or world size."""
    for name, value in (("batch", batch), ("world", world)):
        if value < 1:
            raise NormLabError(f"{name} must be at least 1, got {value}")
    if not 0 <= rank < world:
        raise NormLabError(f"rank must lie in 0 to {world - 1} for a world of {world}, got {rank}")


def _each(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    return Batch(*(None if tensor is None else change(tensor) for tensor in batch))  # type: ignore[arg-type]
