"""Evenly spaced indices: a few of many blocks, records or points, the first and the last among them."""

from __future__ import annotations


def evenly_spaced(count: int, most: int) -> list[int]:
    """At most `most` of the indices 0 to `count` - 1, in order; 0 and `count` - 1 are among them."""
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / max(most - 1, 1)) for place in range(most)]
