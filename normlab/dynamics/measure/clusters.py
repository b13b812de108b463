"""Count clusters of tokens: connected components of the graph of tokens within an angle of each other (union-find).

Batched over systems: in each round every tree attaches its root to the smallest root among the neighbours of its
tokens, followed by path compression; at least half of the trees of a cluster disappear per round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from normlab.dynamics.measure.pairs import reduce_rows
from normlab.errors import NormLabError


def count_clusters(theta: Tensor, angle: float) -> Tensor:
    """Number of clusters of unit tokens (S, n, d), as (S,)."""
    found = cluster_labels(theta, angle)
    return (found == torch.arange(found.shape[1], device=found.device)).sum(-1)


def cluster_labels(theta: Tensor, angle: float) -> Tensor:
    """Cluster label of each token, the index of the first token of its cluster: (S, n)."""
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


def cluster_merges(times: Sequence[float], counts: Sequence[float]) -> list[tuple[float, int]]:
    """(time, clusters left) of every recorded time with fewer clusters than ever before."""
    found, least = [], math.inf
    for time, count in zip(times, counts, strict=True):
        if count < least and math.isfinite(least):
            found.append((float(time), int(count)))
        least = min(least, count)
    return found


def _least_seen(theta: Tensor, roots: Tensor, near: float) -> Tensor:
    """The smallest root among the neighbours of each token."""
    # Small integers are exact in float32 and cost half of what 64 bits do.
    numbers, none = roots.float().unsqueeze(1), float(roots.shape[1])
    least = reduce_rows(theta, None, lambda cosines: torch.where(cosines >= near, numbers, none).amin(-1))
    # The cosine of a token with itself may be rounded below the limit.
    return torch.minimum(least.long(), roots)


def _united(roots: Tensor, least: Tensor) -> Tensor:
    parents = torch.arange(roots.shape[1], device=roots.device).repeat(roots.shape[0], 1)
    parents = parents.scatter_reduce(1, roots, least, "amin")
    while not torch.equal(above := parents.gather(1, parents), parents):
        parents = above
    return parents.gather(1, roots)
