"""Angles written as multiples of π: "pi/8", "π/4", "3*pi/8"."""

from __future__ import annotations

import math
import re

_ANGLE = re.compile(r"(?:(?P<times>\d+(?:\.\d+)?)\s*\*?\s*)?(?:pi|π)\s*(?:/\s*(?P<over>\d+(?:\.\d+)?))?", re.IGNORECASE)


def angle(text: str) -> float | None:
    """The number that a multiple of π stands for, None for any other text."""
    found = _ANGLE.fullmatch(text.strip())
    if found is None or (found["over"] and float(found["over"]) == 0.0):
        return None
    return float(found["times"] or 1) * math.pi / float(found["over"] or 1)
