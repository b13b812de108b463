"""A curve in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from normlab.probes.profile import Number

_BARS = "▁▂▃▄▅▆▇█"
_GAP = "·"
_TOO_STEEP = 3.0
"""A largest value so many times the smallest is drawn by its logarithm."""


def sparks(curves: Sequence[Sequence[Number]], width: int) -> list[str]:
    """One line of at most `width` characters for each curve, all on the same scale; a gap where there is no number."""
    cut = [_shorten(curve, width) for curve in curves]
    known = [x for curve in cut for x in curve if x is not None]
    if not known:
        return [_GAP * len(curve) for curve in cut]
    steep = min(known) > 0.0 and max(known) > _TOO_STEEP * min(known)
    low, high = (math.log(x) if steep else x for x in (min(known), max(known)))
    return ["".join(_bar(x, low, high, steep) for x in curve) for curve in cut]


def _shorten(curve: Sequence[Number], width: int) -> list[Number]:
    """The curve at evenly spaced places, its two ends among them."""
    if len(curve) <= width:
        return list(curve)
    return [curve[round(place * (len(curve) - 1) / max(width - 1, 1))] for place in range(width)]


def _bar(x: Number, low: float, high: float, steep: bool) -> str:
    if x is None:
        return _GAP
    share = ((math.log(x) if steep else x) - low) / (high - low) if high > low else 0.5
    return _BARS[min(int(share * len(_BARS)), len(_BARS) - 1)]
