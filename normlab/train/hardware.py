"""Hardware facts: measured peak FLOP/s of matrix products, device name, peak memory."""

from __future__ import annotations

import functools
import math
import time

import torch

_SIZES = {"cuda": 8192, "cpu": 1024}
_REPEATS = {"cuda": 20, "cpu": 4}


@functools.cache
def matmul_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Measured FLOP/s of a large matrix product in `dtype`; cached, takes a few tenths of a second."""
    size, repeats = _SIZES.get(device.type, 1024), _REPEATS.get(device.type, 4)
    # Random values, as in training: a GPU is faster on values that need less power. A generator of its own: a run must
    # not depend on whether the speed was measured.
    chance = torch.Generator(device).manual_seed(0)
    a = torch.randn(size, size, device=device, generator=chance).to(dtype)
    out = torch.empty_like(a)
    for _ in range(2):
        torch.mm(a, a, out=out)
    begin = _now(device)
    for _ in range(repeats):
        torch.mm(a, a, out=out)
    return repeats * 2 * size**3 / (_now(device) - begin)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def describe(device: torch.device) -> str:
    """Name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'' if threads == 1 else 's'}"


def identity(device: torch.device) -> str | None:
    """UUID of a GPU; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


class PeakMemory:
    """Peak memory allocated by tensors on a GPU since this was made, in bytes; None on a CPU.

    `besides`: memory that was taken before and does not count. Reading takes 0.1 ms, as long as many kernels of a small
    model, so records of steps use the value of the last second, `recent`.
    """

    def __init__(self, device: torch.device, *, besides: int = 0):
        self._device, self._besides = device, besides
        self._read_at, self._value = -math.inf, None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @property
    def now(self) -> int | None:
        if self._device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self._device) - self._besides

    @property
    def recent(self) -> int | None:
        if time.monotonic() > self._read_at + 1.0:
            self._read_at, self._value = time.monotonic(), self.now
        return self._value
