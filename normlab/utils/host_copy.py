"""Asynchronous device-to-host copies."""

from __future__ import annotations

import torch


class HostCopy:
    """A copy of a tensor on the host. From a GPU it is asynchronous, in stream order; elsewhere it is immediate."""

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
        """Whether the copy has finished."""
        return self._event is None or self._event.query()

    def wait(self) -> torch.Tensor:
        """Wait for the copy and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
