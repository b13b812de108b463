"""Query, key and value matrices: the identity, given, or drawn; the same for all time, or anew in every layer.

Matrices Q, K, V are d × d. With H heads their rows are cut in H parts and the heads' outputs stand side by side, as in
a network whose output matrix is the identity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, get_args

import numpy as np
import torch
from torch import Tensor, nn

from normlab.dynamics.choices import Kind, Matrices
from normlab.dynamics.system.attention import Factors, Matrix, ParticleAttention, heads
from normlab.dynamics.system.flow import Layers
from normlab.errors import NormLabError, unknown


class Pair(NamedTuple):
    """One layer's matrices, as attention takes them."""

    score: Matrix | None = None
    """QᵀK; None for the identity."""
    value: Matrix | None = None
    """V, with the output matrix where there is one; None for the identity."""


class Weights(Protocol):
    """Where a flow's matrices come from."""

    @property
    def per_layer(self) -> bool:
        """Whether layers differ."""
        ...

    def layer(self, k: int) -> Pair:
        """The matrices from time k to k + 1."""
        ...


def layers(weights: Weights, *, beta: Tensor, causal: bool = False, kind: Kind = "softmax") -> Layers:
    """Attention with these weights, for a flow and for a network alike."""

    def attention(k: int) -> ParticleAttention:
        score, value = weights.layer(k)
        return ParticleAttention(beta=beta, score=score, value=value, causal=causal, kind=kind)

    return _Latest(attention) if weights.per_layer else attention(0)


class _Latest:
    """Attention of each layer, the latest kept: an integrator asks for it many times in a row."""

    def __init__(self, attention) -> None:
        self.attention, self.kept = attention, None

    def __call__(self, k: int) -> ParticleAttention:
        if self.kept is None or self.kept[0] != k:
            self.kept = (k, self.attention(k))
        return self.kept[1]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Matrices by name, from a seed of their own.

    identity    Q = K = V = 1
    gaussian    entries of variance 1/d
    kaiming     entries of variance 2/d, Kaiming's normal initialisation
    orthogonal  uniform among orthogonal matrices
    symmetric   QᵀK = V symmetric with entries of variance 1/d, each head its own: attention then climbs an energy
    """

    matrices: Matrices
    dim: int
    heads: int = 1
    redraw: bool = False
    """Draw anew in every layer."""
    seeds: int | Sequence[int] = 0
    """One seed for all systems, or one for each: a system's weights depend on its own seed alone."""
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if self.matrices not in get_args(Matrices):
            raise unknown("choice of weights", self.matrices, get_args(Matrices))
        if self.heads < 1 or self.dim % self.heads:
            raise NormLabError(f"{self.heads} heads do not divide dimension {self.dim}; try 1")

    @property
    def per_layer(self) -> bool:
        return self.redraw and self.matrices != "identity"

    def layer(self, k: int) -> Pair:
        if self.matrices == "identity":
            return Pair() if self.heads == 1 else self._cut(*[torch.eye(self.dim, device="cpu")] * 3)
        if isinstance(self.seeds, int):
            return self._drawn(self.seeds, k)
        return _stacked([self._drawn(seed, k) for seed in self.seeds])

    def _drawn(self, seed: int, k: int) -> Pair:
        generator = seeded(seed, k if self.redraw else 0)
        if self.matrices == "symmetric":
            each = torch.stack([_symmetric(self.dim, generator) for _ in range(self.heads)])
            return Pair(self._cast(each), self._cast(each / math.sqrt(self.heads)))
        return self._cut(*[_DRAW[self.matrices](self.dim, generator) for _ in range(3)])

    def _cut(self, query: Tensor, key: Tensor, value: Tensor) -> Pair:
        if self.heads == 1:
            return Pair(self._cast((query.mT @ key).unsqueeze(0)), self._cast(value.unsqueeze(0)))
        parts = [query, key, torch.eye(self.dim, device="cpu"), value]
        q, k, o, v = (self._cast(part.unflatten(0, (self.heads, -1))) for part in parts)
        return Pair(Factors(q, k), Factors(o, v))

    def _cast(self, matrix: Tensor) -> Tensor:
        return matrix.to(self.device, self.dtype)


@dataclass(frozen=True)
class Given:
    """Matrices of each layer; a single layer holds for all time."""

    pairs: Sequence[Pair]

    def __post_init__(self) -> None:
        if not self.pairs:
            raise NormLabError("no matrices were given; expected one pair for all layers, or one for each")

    @property
    def per_layer(self) -> bool:
        return len(self.pairs) > 1

    def layer(self, k: int) -> Pair:
        last = len(self.pairs) - 1
        # At its very end a network still has its last layer's weights.
        if self.per_layer and not 0 <= k <= last + 1:
            raise NormLabError(f"layer {k} has no weights: {last + 1} layers were given; a shorter horizon?")
        return self.pairs[min(k, last)]


def given(*, query: Tensor | None = None, key: Tensor | None = None, value: Tensor | None = None) -> Given:
    """A user's own matrices for all time: each (d, d), or (H, d, d) with a matrix for each head; None: the identity."""
    q, k, v = (None if matrix is None else _headed(matrix) for matrix in (query, key, value))
    if q is None and k is None:
        return Given([Pair(None, v)])
    score = k if q is None else q.mT if k is None else q.mT @ k
    if score is not None and v is not None and heads(score) != heads(v):
        raise NormLabError(f"{heads(score)} heads of queries and {heads(v)} of values; expected as many of each")
    return Given([Pair(score, v)])


def check_fit(weights: Weights, dim: int) -> None:
    """Whether matrices are for tokens of this dimension, and the same for all systems."""
    for matrix in weights.layer(0):
        right = matrix.right if isinstance(matrix, Factors) else matrix
        if right is not None and right.shape[-1] != dim:
            raise NormLabError(
                f"matrices for dimension {right.shape[-1]} and tokens of dimension {dim}; try dim={right.shape[-1]}"
            )
        if right is not None and right.ndim != 3:
            raise NormLabError(f"expected matrices (heads, d, d) for all systems, got {tuple(right.shape)}")


def seeded(*seeds: int) -> torch.Generator:
    """A generator for a combination of numbers: neighbouring ones give independent streams."""
    state = np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0]
    # torch takes signed numbers of 64 bits.
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


def _headed(matrix: Tensor) -> Tensor:
    if matrix.ndim not in (2, 3, 4) or matrix.shape[-1] != matrix.shape[-2] or not bool(matrix.isfinite().all()):
        shape = tuple(matrix.shape)
        raise NormLabError(f"expected finite matrices (d, d), (heads, d, d) or (systems, heads, d, d), got {shape}")
    return matrix.unsqueeze(0) if matrix.ndim == 2 else matrix


def _stacked(pairs: Sequence[Pair]) -> Pair:
    """For every system its own."""
    scores, values = zip(*pairs, strict=True)
    return Pair(_stack(scores), _stack(values))


def _stack(matrices: Sequence[Matrix | None]) -> Matrix | None:
    whole = [matrix for matrix in matrices if isinstance(matrix, Tensor)]
    if whole:
        return torch.stack(whole)
    factors = [matrix for matrix in matrices if isinstance(matrix, Factors)]
    return Factors(*(torch.stack(parts) for parts in zip(*factors, strict=True))) if factors else None


def _gaussian(dim: int, generator: torch.Generator) -> Tensor:
    return torch.randn(dim, dim, generator=generator, device="cpu") / math.sqrt(dim)


def _kaiming(dim: int, generator: torch.Generator) -> Tensor:
    return math.sqrt(2.0) * _gaussian(dim, generator)


def _orthogonal(dim: int, generator: torch.Generator) -> Tensor:
    return nn.init.orthogonal_(torch.empty(dim, dim, dtype=torch.float64, device="cpu"), generator=generator)


def _symmetric(dim: int, generator: torch.Generator) -> Tensor:
    matrix = _gaussian(dim, generator)
    return (matrix + matrix.mT) / math.sqrt(2.0)


_DRAW = {"gaussian": _gaussian, "kaiming": _kaiming, "orthogonal": _orthogonal}
