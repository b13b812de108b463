"""Cores and memory that this process may use."""

from __future__ import annotations

import os


def cores() -> int:
    """Number of CPU cores that the system lets this process run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
