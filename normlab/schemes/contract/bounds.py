"""Bounds on the RMS that a module or a branch can return, from which the bound of a whole network is composed."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

BranchBound = Callable[[float], float]
"""Maps a bound on the RMS of a branch's input to a bound on the RMS of its output."""


def unbounded(rms_in: float) -> float:
    """The `BranchBound` of a branch with unknown weights: infinity."""
    return math.inf


def rms_bound_of(part: nn.Module, rms_in: float) -> float:
    """Bound on the RMS of a module's output; infinite for a module that does not define `rms_bound`."""
    if isinstance(part, nn.Identity):
        return rms_in
    bound = getattr(part, "rms_bound", unbounded)
    return bound(rms_in)
