"""Slice any batch (tensor, tuple, list or dict): fewer samples, its tensors, its size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

SAMPLES = 4
"""Samples of a structural test: a batch norm over two samples would leave only signs."""


def found_tensors(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch with at least one dimension, integer ids included."""
    if isinstance(batch, Tensor):
        if batch.ndim:
            yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from found_tensors(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from found_tensors(part)


def samples(batch: Any) -> int | None:
    """Number of samples: the first dimension that all tensors of a batch share; None if they differ."""
    sizes = {tensor.shape[0] for tensor in found_tensors(batch)}
    return sizes.pop() if len(sizes) == 1 else None


def cut(batch: Any, count: int = SAMPLES) -> Any:
    """The first `count` samples of a batch; the whole batch if its tensors differ in their first dimension."""
    return _cut(batch, count) if (samples(batch) or 0) > count else batch


def length(batch: Any) -> int | None:
    """Sequence length: the second dimension of the first tensor that has one."""
    return next((tensor.shape[1] for tensor in found_tensors(batch) if tensor.ndim >= 2), None)


def _cut(batch: Any, count: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[:count] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {name: _cut(part, count) for name, part in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [_cut(part, count) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
