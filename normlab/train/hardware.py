"""Hardware facts: measured peak FLOP/s of matrix products, device name, peak memory."""

from __future__ import annotations

import functools
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


def forget_peak_memory(device: torch.device) -> None:
    """Reset the peak-memory statistics of a GPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Peak memory allocated by tensors on a GPU, in bytes; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
