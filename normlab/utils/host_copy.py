"""Tensors on their way from a device to the host, which does not wait for them."""

from __future__ import annotations

import torch


class HostCopy:
    """A copy on the host. On a GPU's side it is queued behind all that was queued before; elsewhere it is there."""

    def __init__(self, values: torch.Tensor):
        self._event: torch.cuda.Event | None = None
        if not values.is_cuda:
            self._host = values.cpu()
            return
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(values.device))

    @property
    def is_there(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> torch.Tensor:
        """The copy, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
