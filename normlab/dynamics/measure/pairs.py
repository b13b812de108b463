"""Statistics over all pairs of tokens, computed in tiles so that memory does not grow as n²."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_PAIRS = 2**22
"""Pairs per tile."""


def pair_tiles(left: Tensor, right: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Yield (slice of rows, products ⟨x_j, y_k⟩ (S, rows, n)) for tokens (S, n, d); `right` defaults to `left`."""
    keys = (left if right is None else right).mT
    rows = max(1, _PAIRS // (left.shape[0] * left.shape[1]))
    for first in range(0, left.shape[1], rows):
        yield slice(first, first + rows), left[:, first : first + rows] @ keys


def reduce_rows(left: Tensor, right: Tensor | None, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduce each row of products: (S, n). Allocated at the start, because rows between tiles fragment memory."""
    found = left.new_empty(left.shape[:2])
    for rows, products in pair_tiles(left, right):
        found[:, rows] = reduce(products)
    return found


def cosine_histogram(theta: Tensor, bins: int) -> Tensor:
    """Share of the pairs j ≠ k in each of `bins` equal bins of the cosine over [−1, 1]: (S, bins)."""
    systems, tokens = theta.shape[:2]
    offset = torch.arange(systems, device=theta.device, dtype=torch.int32).reshape(-1, 1, 1) * bins
    counts = theta.new_zeros(systems * bins, dtype=torch.long)
    for _, cosines in pair_tiles(theta):
        places = cosines.add_(1).mul_(bins / 2).int().clamp_(0, bins - 1).add_(offset)
        counts += torch.bincount(places.flatten(), minlength=systems * bins)
    counts = counts.reshape(systems, bins)
    # Leave out the pairs of a token with itself.
    counts[:, -1] -= tokens
    return counts.double() / (tokens * (tokens - 1))


def close_share(theta: Tensor, cosine: float) -> Tensor:
    """Share of the pairs j ≠ k whose cosine is above a threshold below 1: (S,)."""
    tokens = theta.shape[1]
    above = sum((cosines > cosine).sum((-2, -1)) for _, cosines in pair_tiles(theta))
    return (torch.as_tensor(above) - tokens).double() / (tokens * (tokens - 1))


def log_mean_exp(left: Tensor, right: Tensor, beta: Tensor) -> Tensor:
    """log of the mean of e^{β ⟨x_j, y_k⟩} over all j and k, j = k included: (S,)."""
    scale = beta.reshape(-1, 1, 1)
    rows = reduce_rows(left, right, lambda products: torch.logsumexp(products.mul_(scale), dim=-1))
    return torch.logsumexp(rows, dim=-1) - 2 * math.log(left.shape[1])
