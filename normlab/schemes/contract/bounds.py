"""Bounds on the RMS that a module or a branch can return, from which the bound of a whole network is composed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

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


def compose_bounds(
    entry: nn.Module, layers: Iterable[Any], rms_in: float, branches: Sequence[Sequence[BranchBound]] | None
) -> list[float]:
    """Bounds on the RMS after the entry and after the `block` of every layer; `branches` has those of its branches."""
    bounds = [rms_bound_of(entry, rms_in)]
    for k, layer in enumerate(layers):
        known = [unbounded] * len(layer.branches) if branches is None else branches[k]
        bounds.append(layer.block.rms_bound(bounds[-1], known))
    return bounds
