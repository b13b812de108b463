"""Particle attention: A_j = Σ_k softmax_k(β ⟨Q x_j, K x_k⟩) V x_k, for a batch of systems.

Tokens are (S, n, d), with S systems. Attention scores are computed in tiles of a few megabytes, so that memory does
not limit the number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from normlab.dynamics.config import AttentionKind
from normlab.errors import NormLabError, unknown

_SCORES = 2**20
"""Scores per tile: 4 MiB in float32. Larger tiles exceed the caches of a CPU, smaller ones cost more calls."""

_SCORES_ON_GPU = 2**24
"""Scores per tile on a GPU, which needs more work per kernel."""

_FUSED_FROM = 1024
"""Number of tokens from which `scaled_dot_product_attention` is faster on a CPU; it never stores all scores. On a GPU
its kernels support neither float64 nor every width, and the fallback stores all scores."""

_NARROW = 16
"""Width up to which the transposed product of weights and values is faster."""


class LowRank(NamedTuple):
    """A matrix leftᵀ right of rank e, in factors: QᵀK of a head, or OV, where `left` is Oᵀ and `right` is V."""

    left: Tensor
    """(H, e, d), or (S, H, e, d) with different matrices for each system."""
    right: Tensor


Matrix = Tensor | LowRank
"""(H, d, d) or (S, H, d, d), as a whole or in factors."""


@dataclass(frozen=True, kw_only=True)
class ParticleAttention:
    """Attention of one layer. Without matrices, Q = K = V = 1."""

    beta: Tensor
    """Inverse temperature of each system: (S,), or a single number."""
    score: Matrix | None = None
    """QᵀK; None for the identity."""
    value: Matrix | None = None
    """V, summed over heads; None for the identity."""
    causal: bool = False
    """Token j attends to tokens 1 to j."""
    kind: AttentionKind = "softmax"
    """`unnormalised` divides the exponentials by the number of visible tokens instead of their sum."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(AttentionKind):
            raise unknown("kind of attention", self.kind, get_args(AttentionKind))
        # Comparisons with NaN are false, so NaN is refused as well.
        if not bool(((self.beta >= 0) & self.beta.isfinite()).all()):
            bad = self.beta[~((self.beta >= 0) & self.beta.isfinite())].flatten()[0]
            raise NormLabError(f"β must be finite in {self.beta.dtype} and not negative, got {float(bad):g}; try 1")
        if self.score is not None and self.value is not None and num_heads(self.score) != num_heads(self.value):
            counts = f"{num_heads(self.score)} heads of scores and {num_heads(self.value)} of values"
            raise NormLabError(f"{counts}; expected as many of each")

    def __call__(self, x: Tensor, warmth: Tensor | float = 1.0) -> Tensor:
        """Return A for tokens x (S, n, d); β is multiplied by `warmth`."""
        beta = (self.beta * warmth).to(x.dtype).reshape(-1, 1, 1)
        total: Tensor | None = None
        for head in range(max(num_heads(self.score), num_heads(self.value))):
            queries, keys = queries_and_keys(self.score, head, x)
            part = self._head(beta * queries, keys, x, head)
            total = part if total is None else total + part
        assert total is not None
        return total

    def _head(self, queries: Tensor, keys: Tensor, x: Tensor, head: int) -> Tensor:
        if not isinstance(self.value, LowRank):
            value = None if self.value is None else _one(self.value, head, x)
            return self._mix(queries, keys, x if value is None else x @ value.mT)
        narrow = self._mix(queries, keys, x @ _one(self.value.right, head, x).mT)
        return narrow @ _one(self.value.left, head, x)

    def _mix(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        on_cpu = queries.device.type == "cpu"
        if self.kind == "softmax" and on_cpu and keys.shape[1] >= _FUSED_FROM:
            return _fused(queries, keys, values, self.causal)
        pieces = _pieces(queries.shape[0], queries.shape[1], _SCORES if on_cpu else _SCORES_ON_GPU)
        parts = [self._piece(queries, keys, values, *piece) for piece in pieces]
        return parts[0] if len(parts) == 1 else _joined(parts, values)

    def _piece(self, queries: Tensor, keys: Tensor, values: Tensor, systems: slice, rows: slice) -> Tensor:
        """Attention output of one tile: some rows of some systems."""
        # With a causal mask, later tokens are invisible to all rows of the tile.
        seen = slice(rows.stop) if self.causal else slice(None)
        queries, keys, values = queries[systems, rows], keys[systems, seen], values[systems, seen]
        hidden = _hidden(rows, keys) if self.causal else None
        if self.kind == "softmax":
            mix = _mix_narrow if values.shape[-1] <= _NARROW and values.device.type == "cpu" else _mix_wide
            return mix(queries, keys, values, hidden)
        weights = (queries @ keys.mT).exp_()
        if hidden is None:
            return weights @ values / keys.shape[1]
        return weights.masked_fill_(hidden, 0.0) @ values / (~hidden).sum(-1, keepdim=True)


def num_heads(matrix: Matrix | None) -> int:
    """Number of heads of a matrix; 1 for the identity."""
    if matrix is None:
        return 1
    return (matrix.left if isinstance(matrix, LowRank) else matrix).shape[-3]


def queries_and_keys(score: Matrix | None, head: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of one head for tokens x (S, n, d)."""
    if score is None:
        return x, x
    if isinstance(score, LowRank):
        return x @ _one(score.left, head, x).mT, x @ _one(score.right, head, x).mT
    return x @ _one(score, head, x), x


def _one(matrix: Tensor, head: int, x: Tensor) -> Tensor:
    return matrix[..., head, :, :].to(x)


def _pieces(systems: int, tokens: int, scores: int) -> Iterator[tuple[slice, slice]]:
    """Tiles (systems, rows) of at most `scores` scores; systems are divided by rows if one alone is too large."""
    rows = max(1, min(tokens, scores // tokens))
    many = max(1, scores // (tokens * tokens))
    for first in range(0, systems, many):
        for row in range(0, tokens, rows):
            yield slice(first, min(first + many, systems)), slice(row, min(row + rows, tokens))


def _joined(parts: list[Tensor], values: Tensor) -> Tensor:
    """Concatenate tiles in the order of `_pieces`."""
    systems, tokens, width = values.shape
    # Either every tile holds whole systems, or every tile is part of one system.
    whole = parts[0].shape[1] == tokens
    return torch.cat(parts) if whole else torch.cat([part[0] for part in parts]).view(systems, tokens, width)


def _mix_wide(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
    scores = queries @ keys.mT
    if hidden is not None:
        scores = scores.masked_fill_(hidden, -math.inf)
    return scores.softmax(-1) @ values


def _mix_narrow(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
    """`_mix_wide` transposed: a product with few long rows is several times faster on a CPU."""
    scores = keys @ queries.mT
    if hidden is not None:
        scores = scores.masked_fill_(hidden.mT, -math.inf)
    if scores.dtype != torch.float64:
        return (values.mT @ scores.softmax(-2)).mT.contiguous()
    # torch's softmax of short rows in float64 takes three times as long as its parts.
    weights = scores.sub_(scores.amax(-2, keepdim=True)).exp_()
    return ((values.mT @ weights) / weights.sum(-2, keepdim=True)).mT.contiguous()


def _fused(queries: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Tensor:
    q, k, v = (tokens.unsqueeze(1) for tokens in (queries, keys, values))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1.0).squeeze(1)


def _hidden(rows: slice, keys: Tensor) -> Tensor:
    """Causal mask, True where a row may not attend to a key: (rows, keys)."""
    places = torch.arange(rows.stop, device=keys.device)
    return places > places[rows].unsqueeze(-1)
