"""Timing on a device: median and quantiles with a cold cache; copy bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_HEAD_START = 2_000_000
"""Clock cycles that the device sleeps, about a millisecond."""


@dataclass(frozen=True)
class Timing:
    """Seconds: the median, and the 20 % and 80 % quantiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """Summarise samples."""
        ordered = sorted(samples)
        return cls(statistics.median(ordered), ordered[len(ordered) // 5], ordered[-1 - len(ordered) // 5])


def measure(call: Callable[[], object], device: torch.device, *, repeats: int = 40, warmup: int = 5) -> Timing:
    """Time `call` repeatedly; on a GPU with events, and with the L2 cache flushed before every sample.

    The device sleeps before each sample, so that the host has queued all kernels when the first one starts: launch
    overhead is not measured.
    """
    for _ in range(warmup):
        call()
    if device.type != "cuda":
        return Timing.of([_clock(call) for _ in range(repeats)])
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        flush.zero_()
        torch.cuda._sleep(_HEAD_START)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return Timing.of([start.elapsed_time(end) / 1e3 for start, end in pairs])


def _clock(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def copy_bandwidth(device: torch.device, bytes_moved: int) -> float:
    """Bytes per second of a plain copy that reads and writes `bytes_moved` in total."""
    source = torch.empty(bytes_moved // 2, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return bytes_moved / measure(lambda: target.copy_(source), device).median
