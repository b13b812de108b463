"""Slice any batch (tensor, tuple, list or dict): fewer samples, its tensors, its size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

SAMPLES = 4
"""As many as a structural test needs: a norm over two samples leaves their signs alone."""


def found_tensors(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch with a first dimension, ids included."""
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
    """The first dimension that all tensors of a batch share; None where they do not."""
    sizes = {tensor.shape[0] for tensor in found_tensors(batch)}
    return sizes.pop() if len(sizes) == 1 else None


def cut(batch: Any, count: int = SAMPLES) -> Any:
    """The first samples of a batch; the whole batch if its tensors share no first dimension."""
    return _cut(batch, count) if (samples(batch) or 0) > count else batch


def length(batch: Any) -> int | None:
    """Tokens of a sequence: the second dimension of the first tensor with one."""
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
