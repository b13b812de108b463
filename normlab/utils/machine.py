"""CPU cores and free memory available to this process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Number of CPU cores that the system lets this process run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process can still allocate on a device; None if unknown."""
    if device.type == "cuda":
        import torch

        # Memory that torch has reserved but not allocated is free as well.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    known = [found for found in (_available(), _left_in_group()) if found is not None]
    return min(known, default=None)


def _available() -> int | None:
    """Memory available without swapping; where the system does not report that, the total memory."""
    with suppress(OSError, ValueError, IndexError):
        line = next(line for line in _MEMORY.read_text().splitlines() if line.startswith("MemAvailable:"))
        return 1024 * int(line.split()[1])
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _left_in_group() -> int | None:
    """Memory left under a container's limit; cached files count as free."""
    with suppress(OSError, ValueError):
        limit, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        facts = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        return limit - used + int(facts.get("inactive_file", 0))
    return None
