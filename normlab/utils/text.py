"""Format counts, byte sizes and durations as text; text of users without control characters."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """Pluralise a count: one seed, 3 seeds."""
    return f"one {thing}" if number == 1 else f"{number} {thing}s"


def capitalised(text: str) -> str:
    """The text with an upper-case first letter; unlike `str.capitalize`, the rest keeps its case."""
    return text[:1].upper() + text[1:]


def printable(text: str) -> str:
    """Replace control characters, which a terminal would obey."""
    return "".join(character if character.isprintable() else "�" for character in text)


def size(count: float) -> str:
    """Format bytes: 1.5 MiB, 2.0 GiB."""
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:,.1f} GiB"


def duration(seconds: float) -> str:
    """Format seconds: 5 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
