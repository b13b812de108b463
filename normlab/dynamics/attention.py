"""Attention among particles: A_j = Σ_k softmax_k(β ⟨Q x_j, K x_k⟩) V x_k, for many systems of tokens at once.

Systems stand in the first dimension: tokens are (S, n, d). Scores of at most a few megabytes exist at a time, so that
the number of tokens is limited by time and not by memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from normlab.errors import NormLabError, unknown

Kind = Literal["softmax", "unnormalised"]
KINDS: tuple[Kind, ...] = ("softmax", "unnormalised")

_SCORES = 2**22
"""Scores that exist at a time: 16 MiB in float32, which the caches of a CPU can work on."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Weights and shape of one layer's attention. Without matrices tokens are queries, keys and values themselves."""

    beta: Tensor
    """(S,) or a single number: inverse temperature of each system."""
    score: Tensor | None = None
    """QᵀK: (H, d, d), or (S, H, d, d) for every system its own; None for the identity."""
    value: Tensor | None = None
    """V, summed over heads: the same shapes; None for the identity."""
    causal: bool = False
    """Token j sees tokens 1 to j alone."""
    kind: Kind = "softmax"
    """`unnormalised` divides by the number of tokens that are seen in place of the softmax's sum."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("kind of attention", self.kind, KINDS)
        if not bool((self.beta >= 0).all()):
            raise NormLabError(f"β must not be negative, got {float(self.beta.min()):g}; try 1")
        if self.score is not None and self.value is not None and self.heads(self.score) != self.heads(self.value):
            counts = f"{self.heads(self.score)} heads of scores and {self.heads(self.value)} of values"
            raise NormLabError(f"{counts}; expected as many of each")

    @staticmethod
    def heads(matrix: Tensor | None) -> int:
        return 1 if matrix is None else matrix.shape[-3]

    def __call__(self, x: Tensor, warmth: Tensor | float = 1.0) -> Tensor:
        """A for tokens x (S, n, d); `warmth` is a factor on β."""
        beta = (self.beta * warmth).to(x.dtype).reshape(-1, 1, 1)
        total: Tensor | None = None
        for head in range(max(self.heads(self.score), self.heads(self.value))):
            part = self._mix(beta * _through(self.score, head, x), x, _through(self.value, head, x, transpose=True))
            total = part if total is None else total + part
        assert total is not None
        return total

    def _mix(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self.kind == "softmax" and not self.causal and keys.shape[1] >= _FUSED_FROM:
            return _fused(queries, keys, values)
        rows = max(1, _SCORES // (queries.shape[0] * queries.shape[1]))
        parts = [self._rows(queries, keys, values, at, at + rows) for at in range(0, queries.shape[1], rows)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _rows(self, queries: Tensor, keys: Tensor, values: Tensor, first: int, last: int) -> Tensor:
        last = min(last, queries.shape[1])
        if self.causal:
            # Later tokens are seen by none of these.
            keys, values = keys[:, :last], values[:, :last]
        scores = queries[:, first:last] @ keys.mT
        visible = _visible(first, last, scores) if self.causal else None
        if visible is not None:
            scores = scores.masked_fill(~visible, -math.inf)
        if self.kind == "softmax":
            return scores.softmax(-1) @ values
        count = scores.shape[-1] if visible is None else visible.sum(-1, keepdim=True)
        return scores.exp() @ values / count


_FUSED_FROM = 512
"""Tokens from which torch's own attention, which never holds all scores, is faster than three operations."""


def _fused(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    q, k, v = (tokens.unsqueeze(1) for tokens in (queries, keys, values))
    return F.scaled_dot_product_attention(q, k, v, scale=1.0).squeeze(1)


def _through(matrix: Tensor | None, head: int, x: Tensor, *, transpose: bool = False) -> Tensor:
    """x M for scores, x Mᵀ for values."""
    if matrix is None:
        return x
    one = matrix[..., head, :, :].to(x.dtype)
    return x @ (one.mT if transpose else one)


def _visible(first: int, last: int, scores: Tensor) -> Tensor:
    keys = torch.arange(scores.shape[-1], device=scores.device)
    return keys <= torch.arange(first, last, device=scores.device).unsqueeze(-1)
