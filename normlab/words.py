"""Numbers of things, in words."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """one seed, 3 seeds."""
    return f"one {thing}" if number == 1 else f"{number} {thing}s"
