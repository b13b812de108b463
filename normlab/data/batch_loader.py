"""Batches without end, from samples that stand in one line: in an order that no number of machines changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import torch

from normlab.data.prefetch import Prefetch
from normlab.errors import NormLabError

IGNORED = -100
"""The target of a place that is not scored, as `torch.nn.functional.cross_entropy` has it."""


class Batch(NamedTuple):
    """Samples, and what is to be said of them."""

    inputs: torch.Tensor
    """(B, T) int64 tokens, or (B, C, H, W) float32 pixels."""

    targets: torch.Tensor
    """int64, `IGNORED` where nothing is to be predicted: (B, T) tokens, or (B,) classes."""

    documents: torch.Tensor | None = None
    """(B, T) int64, equal within a document, where boundaries are respected."""

    @property
    def options(self) -> dict[str, torch.Tensor]:
        """What a model is told besides inputs and targets."""
        return {} if self.documents is None else {"documents": self.documents}


class SampleSequence(Protocol):
    """The samples of all epochs, numbered in the order in which training sees them."""

    per_epoch: int

    @property
    def identity(self) -> Mapping[str, Any]:
        """What the line follows from, its `fingerprint` among it: a loader resumes on an equal one alone."""
        ...

    def read(self, first: int, count: int) -> Batch:
        """Samples `first` to `first + count`."""
        ...


class BatchLoader:
    """Batches of `batch` samples of a line for one of `world` ranks.

    Each step takes the next `world · batch` samples, rank 0 the first `batch`: two ranks with 4 see in a step what one
    with 8 sees. `state_dict` says how far down the line the batches handed out have come; a feed with another number
    of ranks or another batch goes on from exactly there.

    A thread works `prefetch` batches ahead (0: none); for a CUDA device it leaves them in pinned memory and the copy is
    queued behind the GPU's own work, so that neither waits. Close it, or use it in a `with`.
    """

    def __init__(
        self,
        line: SampleSequence,
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
        self._line, self._batch, self._rank, self._world = line, batch, rank, world
        self._device, self._prefetch = torch.device(device), prefetch
        self._sequence = 0
        self._ahead: Prefetch[Batch] | Iterator[Batch] | None = None

    @property
    def sequences_per_epoch(self) -> int:
        """How many samples an epoch has, over all ranks."""
        return self._line.per_epoch

    @property
    def epoch(self) -> float:
        """How often the data was seen so far."""
        return self._sequence / self._line.per_epoch

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
        """Where the batches handed out end: the same on every rank."""
        return {"sequence": self._sequence, **self._line.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, which a feed of an equal line gave."""
        for name, mine in self._line.identity.items():
            if state.get(name) != mine:
                what = f"another {'corpus' if name == 'fingerprint' else name}"
                raise NormLabError(f"cannot resume on {what}: saved with {name} {state.get(name)}, this has {mine}")
        self.close()
        self._sequence = int(state["sequence"])

    def close(self) -> None:
        """End the thread. The feed can go on: the next batch starts another."""
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
        return batches(self._line, first, self._batch, self._world, pinned=self._device.type == "cuda")


def batches(line: SampleSequence, first: int, batch: int, world: int, *, pinned: bool) -> Iterator[Batch]:
    """The batches of one rank, from sample `first` on."""
    while True:
        made = line.read(first, batch)
        yield _each(made, torch.Tensor.pin_memory) if pinned else made
        first += batch * world


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device."""
    if device.type == "cpu":
        return batch
    return _each(batch, lambda tensor: tensor.to(device, non_blocking=True))


def check_places(batch: int, rank: int, world: int) -> None:
    """Raise where there is no such rank, or nothing for it to do."""
    for name, value in (("batch", batch), ("world", world)):
        if value < 1:
            raise NormLabError(f"{name} must be at least 1, got {value}")
    if not 0 <= rank < world:
        raise NormLabError(f"rank must lie in 0 to {world - 1} for a world of {world}, got {rank}")


def _each(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    return Batch(*(None if tensor is None else change(tensor) for tensor in batch))  # type: ignore[arg-type]
