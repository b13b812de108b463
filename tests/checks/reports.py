"""Checks of schemes that several tests look at, made once in a process."""

from __future__ import annotations

from functools import cache

from normlab.checks.check import check
from normlab.checks.result import Check

SHOWN = ("post", "peri", "peri(step=0.1)")
"""What the guide shows, as users run it: with the start at 125m, which takes seconds and is not needed elsewhere."""


@cache
def report(scheme: str, depths: tuple[int, ...] | None, seeds: int) -> Check:
    """A check of a scheme; without depths at those that a check has by itself. Both are named: one call, one check."""
    start = "125m" if scheme in SHOWN and depths is None else "tiny"
    return check(scheme, depths=depths, seeds=seeds, start_size=start, max_seconds=3600.0)
