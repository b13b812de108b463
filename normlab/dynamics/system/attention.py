"""Attention among particles: A_j = Σ_k softmax_k(β ⟨Q x_j, K x_k⟩) V x_k, for many systems of tokens at once.

Systems stand in the first dimension: tokens are (S, n, d). Scores of a few megabytes exist at a time, so that the
number of tokens is limited by time and not by memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from normlab.dynamics.choices import Kind
from normlab.errors import NormLabError, unknown

_SCORES = 2**20
"""Scores that exist at a time: 4 MiB in float32. Larger pieces leave the caches of a CPU, smaller ones cost calls."""

_SCORES_ON_GPU = 2**24
"""The same on a GPU, which wants more work at once."""

_FUSED_FROM = 1024
"""Tokens from which a CPU is faster with torch's own attention, which never holds all scores. On a GPU its kernels
know neither float64 nor every width, and where they do not, all scores are held."""

_NARROW = 16
"""Width up to which the product of weights and values is faster from the other side."""


class Factors(NamedTuple):
    """A matrix leftᵀ right of low rank e: QᵀK of a head, or its value matrix, with `left` the output's transpose."""

    left: Tensor
    """(H, e, d), or (S, H, e, d) for every system its own."""
    right: Tensor


Matrix = Tensor | Factors
"""(H, d, d) or (S, H, d, d), whole or in factors."""


@dataclass(frozen=True, kw_only=True)
class ParticleAttention:
    """Weights and shape of one layer's attention. Without matrices tokens are queries, keys and values themselves."""

    beta: Tensor
    """(S,) or a single number: inverse temperature of each system."""
    score: Matrix | None = None
    """QᵀK; None for the identity."""
    value: Matrix | None = None
    """V, summed over heads; None for the identity."""
    causal: bool = False
    """Token j sees tokens 1 to j alone."""
    kind: Kind = "softmax"
    """`unnormalised` divides by the number of tokens that are seen in place of the softmax's sum."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise unknown("kind of attention", self.kind, get_args(Kind))
        # What is not finite does not compare, and is refused with the rest.
        if not bool(((self.beta >= 0) & self.beta.isfinite()).all()):
            worst = float(self.beta.nan_to_num(-math.inf, -math.inf).min())
            raise NormLabError(f"β must be finite and not negative, got {worst:g}; try 1")
        if self.score is not None and self.value is not None and heads(self.score) != heads(self.value):
            counts = f"{heads(self.score)} heads of scores and {heads(self.value)} of values"
            raise NormLabError(f"{counts}; expected as many of each")

    def __call__(self, x: Tensor, warmth: Tensor | float = 1.0) -> Tensor:
        """A for tokens x (S, n, d); `warmth` is a factor on β."""
        beta = (self.beta * warmth).to(x.dtype).reshape(-1, 1, 1)
        total: Tensor | None = None
        for head in range(max(heads(self.score), heads(self.value))):
            queries, keys = queries_and_keys(self.score, head, x)
            part = self._head(beta * queries, keys, x, head)
            total = part if total is None else total + part
        assert total is not None
        return total

    def _head(self, queries: Tensor, keys: Tensor, x: Tensor, head: int) -> Tensor:
        if not isinstance(self.value, Factors):
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
        """What some tokens of some systems see."""
        # Tokens after the last of these are seen by none of them.
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


def heads(matrix: Matrix | None) -> int:
    """How many heads a matrix is for."""
    if matrix is None:
        return 1
    return (matrix.left if isinstance(matrix, Factors) else matrix).shape[-3]


def queries_and_keys(score: Matrix | None, head: int, x: Tensor) -> tuple[Tensor, Tensor]:
    if score is None:
        return x, x
    if isinstance(score, Factors):
        return x @ _one(score.left, head, x).mT, x @ _one(score.right, head, x).mT
    return x @ _one(score, head, x), x


def _one(matrix: Tensor, head: int, x: Tensor) -> Tensor:
    return matrix[..., head, :, :].to(x)


def _pieces(systems: int, tokens: int, scores: int) -> Iterator[tuple[slice, slice]]:
    """Systems, and rows where one system is too large, whose scores may exist at a time."""
    rows = max(1, min(tokens, scores // tokens))
    many = max(1, scores // (tokens * tokens))
    for first in range(0, systems, many):
        for row in range(0, tokens, rows):
            yield slice(first, min(first + many, systems)), slice(row, min(row + rows, tokens))


def _joined(parts: list[Tensor], values: Tensor) -> Tensor:
    """Pieces in the order of `_pieces`, as one."""
    systems, tokens, width = values.shape
    # Either every piece holds whole systems, or every piece is a part of one.
    whole = parts[0].shape[1] == tokens
    return torch.cat(parts) if whole else torch.cat([part[0] for part in parts]).view(systems, tokens, width)


def _mix_wide(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
    scores = queries @ keys.mT
    if hidden is not None:
        scores = scores.masked_fill_(hidden, -math.inf)
    return scores.softmax(-1) @ values


def _mix_narrow(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
    """The same with tokens in columns: a product that returns a few long rows is several times faster on a CPU."""
    scores = keys @ queries.mT
    if hidden is not None:
        scores = scores.masked_fill_(hidden.mT, -math.inf)
    if scores.dtype != torch.float64:
        return (values.mT @ scores.softmax(-2)).mT.contiguous()
    # torch's softmax of short rows in float64 takes thrice as long as its parts.
    weights = scores.sub_(scores.amax(-2, keepdim=True)).exp_()
    return ((values.mT @ weights) / weights.sum(-2, keepdim=True)).mT.contiguous()


def _fused(queries: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Tensor:
    q, k, v = (tokens.unsqueeze(1) for tokens in (queries, keys, values))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1.0).squeeze(1)


def _hidden(rows: slice, keys: Tensor) -> Tensor:
    """Which keys each of the rows may not see: (rows, keys)."""
    places = torch.arange(rows.stop, device=keys.device)
    return places > places[rows].unsqueeze(-1)
