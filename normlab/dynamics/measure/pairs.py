"""All pairs of tokens, a few million at a time: what is counted over them needs no memory of n²."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_PAIRS = 2**22
"""Pairs that exist at a time."""


def tiles(left: Tensor, right: Tensor | None = None) -> Iterator[tuple[slice, Tensor]]:
    """⟨x_j, y_k⟩ of tokens (S, n, d), some rows j (S, rows, n) at a time, and which; y = x where it is left out."""
    keys = (left if right is None else right).mT
    rows = max(1, _PAIRS // (left.shape[0] * left.shape[1]))
    for first in range(0, left.shape[1], rows):
        yield slice(first, first + rows), left[:, first : first + rows] @ keys


def by_rows(left: Tensor, right: Tensor | None, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """(S, n) what `reduce` makes of each row. It is made whole at the start: rows among tiles would fragment memory."""
    found = left.new_empty(left.shape[:2])
    for rows, products in tiles(left, right):
        found[:, rows] = reduce(products)
    return found


def histogram(theta: Tensor, bins: int) -> Tensor:
    """(S, bins) shares of the pairs j ≠ k whose cosine lies in each of `bins` equal parts of [−1, 1]."""
    systems, tokens = theta.shape[:2]
    offset = torch.arange(systems, device=theta.device, dtype=torch.int32).reshape(-1, 1, 1) * bins
    counts = theta.new_zeros(systems * bins, dtype=torch.long)
    for _, cosines in tiles(theta):
        places = cosines.add_(1).mul_(bins / 2).int().clamp_(0, bins - 1).add_(offset)
        counts += torch.bincount(places.flatten(), minlength=systems * bins)
    counts = counts.reshape(systems, bins)
    # A token and itself are no pair.
    counts[:, -1] -= tokens
    return counts.double() / (tokens * (tokens - 1))


def close_share(theta: Tensor, cosine: float) -> Tensor:
    """(S,) share of the pairs j ≠ k whose cosine is above a limit (below 1)."""
    tokens = theta.shape[1]
    above = sum((cosines > cosine).sum((-2, -1)) for _, cosines in tiles(theta))
    return (torch.as_tensor(above) - tokens).double() / (tokens * (tokens - 1))


def log_mean_exp(left: Tensor, right: Tensor, beta: Tensor) -> Tensor:
    """(S,) log of the mean of e^{β ⟨x_j, y_k⟩} over all j and k, their own included."""
    scale = beta.reshape(-1, 1, 1)
    rows = by_rows(left, right, lambda products: torch.logsumexp(products.mul_(scale), dim=-1))
    return torch.logsumexp(rows, dim=-1) - 2 * math.log(left.shape[1])
