"""Counts, sizes and durations in words."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """one seed, 3 seeds."""
    return f"one {thing}" if number == 1 else f"{number} {thing}s"


def size(count: float) -> str:
    """Bytes as a person says them."""
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:,.1f} GiB"


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
