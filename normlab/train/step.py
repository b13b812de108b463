"""A step whose numbers may still be on their way from the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from normlab.data import Batch


class Taken(NamedTuple):
    """A step that was taken, to be judged once its numbers are there."""

    step: int
    values: torch.Tensor
    """Loss and gradient norm."""
    arrived: Callable[[], Any]
    parts: Sequence[Batch]
    threshold: float
    """The loss beyond which it is a spike."""


def send(values: torch.Tensor) -> tuple[torch.Tensor, Callable[[], Any]]:
    """Memory of the host that a GPU will have written to once the call returns, and that call."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event.synchronize
