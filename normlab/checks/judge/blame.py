"""Find the blocks that cause a finding (robust outliers), and name them in words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from normlab.probes.profile import Number, Series

_STANDS_OUT = 3.5
"""Robust z-score above which a block is an outlier (Iglewicz and Hoaglin's usual value)."""

_LEAST_SPREAD = 1e-3
"""Differences in log growth below this are no fault, even if all other blocks are equal."""

_MUCH = 0.25
"""Share of the growth above which outliers are blamed for it alone."""

_REACH = 2
"""Number of neighbours on each side that a block is compared with."""


def blocks(layers: Sequence[int], depth: int) -> str:
    """Block numbers as text: "blocks 3, 17-23", "block 5", "all blocks", "the entry"."""
    inside = sorted({layer for layer in layers if layer >= 0})
    entry = ["the entry"] if any(layer < 0 for layer in layers) else []
    if len(inside) == depth and depth > 1:
        return " and ".join([*entry, "all blocks"])
    runs: list[list[int]] = []
    for layer in inside:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    ranges = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    named = [f"block{'s' if len(inside) > 1 else ''} {ranges}"] if runs else []
    return " and ".join([*entry, *named])


def blame(layers: Sequence[int], depth: int) -> str:
    """End of a verdict's text: the blocks, if there are any."""
    return f"; {blocks(layers, depth)}" if layers else ""


def standing_out(values: Series, *, sign: float = 1.0) -> tuple[int, ...]:
    """Indices of outliers: values larger (sign -1: smaller) than the others by a robust z-score."""
    known = {place: sign * value for place, value in enumerate(values) if value is not None}
    if not known:
        return ()
    middle = float(np.median([*known.values()]))
    spread = max(float(np.median([abs(x - middle) for x in known.values()])) / 0.6745, _LEAST_SPREAD)
    return tuple(place for place, value in known.items() if (value - middle) / spread > _STANDS_OUT)


def to_blame(growth: Series, *, sign: float = 1.0) -> tuple[int, ...]:
    """The outliers, if they make up much of the log growth; otherwise all blocks.

    A stack that loses its gradient a little in every block does not owe that to the block that loses some more.
    """
    found = standing_out(growth, sign=sign)
    total = sum(sign * value for value in growth if value is not None)
    theirs = sum(sign * (growth[place] or 0.0) for place in found)
    return found if found and theirs >= _MUCH * total else tuple(range(len(growth)))


def upwards(marks: Sequence[bool]) -> tuple[int, ...]:
    """The blocks below the marked boundaries that reach the top without a gap."""
    gap = max((place for place, mark in enumerate(marks) if not mark), default=-1)
    return tuple(place - 1 for place in range(gap + 1, len(marks)))


def beside(series: Series) -> Series:
    """Factor by which each value is above or below all its neighbours: near 1 for a smooth series.

    None with fewer than two neighbours, and where a value is zero.
    """
    return [_factor(value, _neighbours(series, place)) for place, value in enumerate(series)]


def _neighbours(series: Series, place: int) -> list[float]:
    near = [*series[max(place - _REACH, 0) : place], *series[place + 1 : place + 1 + _REACH]]
    return [x for x in near if x is not None]


def _factor(value: Number, others: Sequence[float]) -> Number:
    if not value or len(others) < 2 or min(others) <= 0.0:
        return None
    return max(value / max(others), min(others) / value)
