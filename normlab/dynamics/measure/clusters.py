"""Clusters of tokens: connected by chains of neighbours that are at most an angle apart, found by union-find.

All systems of a batch at once: every tree of tokens hooks its root to the least root that any of its tokens sees, and
paths are cut short; of the trees of a cluster at least half vanish in a round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from normlab.dynamics.measure.pairs import by_rows
from normlab.errors import NormLabError


def clusters(theta: Tensor, angle: float) -> Tensor:
    """(S,) how many clusters the unit tokens (S, n, d) form."""
    found = labels(theta, angle)
    return (found == torch.arange(found.shape[1], device=found.device)).sum(-1)


def labels(theta: Tensor, angle: float) -> Tensor:
    """(S, n) for each token the first token of its cluster."""
    if not 0.0 < angle < math.pi:
        raise NormLabError(f"an angle between neighbours lies in (0, π), got {angle:g}; try 0.1")
    roots = torch.arange(theta.shape[1], device=theta.device).repeat(theta.shape[0], 1)
    while True:
        following = _united(roots, _least_seen(theta, roots, math.cos(angle)))
        if torch.equal(following, roots):
            return roots
        roots = following
        if not bool(roots.any()):
            return roots


def merges(times: Sequence[float], counts: Sequence[float]) -> list[tuple[float, int]]:
    """(time, clusters left) of every look at which there were fewer than ever before."""
    found, least = [], math.inf
    for time, count in zip(times, counts, strict=True):
        if count < least and math.isfinite(least):
            found.append((float(time), int(count)))
        least = min(least, count)
    return found


def _least_seen(theta: Tensor, roots: Tensor, near: float) -> Tensor:
    """The least root among the neighbours of each token."""
    # Small whole numbers are exact in float32 and cost half of what 64 bits do.
    numbers, none = roots.float().unsqueeze(1), float(roots.shape[1])
    least = by_rows(theta, None, lambda cosines: torch.where(cosines >= near, numbers, none).amin(-1))
    # A token's own cosine may be rounded below the limit; it always sees itself.
    return torch.minimum(least.long(), roots)


def _united(roots: Tensor, least: Tensor) -> Tensor:
    parents = torch.arange(roots.shape[1], device=roots.device).repeat(roots.shape[0], 1)
    parents = parents.scatter_reduce(1, roots, least, "amin")
    while not torch.equal(above := parents.gather(1, parents), parents):
        parents = above
    return parents.gather(1, roots)
