"""Query, key and value matrices: identity, user-defined, or random; the same for all layers, or new in every layer.

Q, K and V are d × d. With H heads their rows are divided into H parts and the outputs of the heads are concatenated,
as in a network whose output matrix is the identity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, get_args

import numpy as np
import torch
from torch import Tensor, nn

from normlab.dynamics.config import AttentionKind, WeightsName
from normlab.dynamics.system.attention import LowRank, Matrix, ParticleAttention, num_heads
from normlab.dynamics.system.flow import LayerAttention
from normlab.errors import NormLabError, unknown


class LayerWeights(NamedTuple):
    """Matrices of one layer, as `ParticleAttention` takes them."""

    score: Matrix | None = None
    """QᵀK; None for the identity."""
    value: Matrix | None = None
    """V, multiplied by the output matrix if there is one; None for the identity."""


class Weights(Protocol):
    """Interface of weight sources."""

    @property
    def per_layer(self) -> bool:
        """Whether layers have different weights."""
        ...

    def layer(self, k: int) -> LayerWeights:
        """The matrices from time k to k + 1."""
        ...


def make_attention(
    weights: Weights, *, beta: Tensor, causal: bool = False, kind: AttentionKind = "softmax"
) -> LayerAttention:
    """Attention with these weights, for a `Flow` or a `ParticleNetwork`."""

    def attention(k: int) -> ParticleAttention:
        score, value = weights.layer(k)
        return ParticleAttention(beta=beta, score=score, value=value, causal=causal, kind=kind)

    return _Latest(attention) if weights.per_layer else attention(0)


class _Latest:
    """Attention by layer, with the latest one cached: an integrator asks for it many times in a row."""

    def __init__(self, attention) -> None:
        self.attention, self.kept = attention, None

    def __call__(self, k: int) -> ParticleAttention:
        if self.kept is None or self.kept[0] != k:
            self.kept = (k, self.attention(k))
        return self.kept[1]


@dataclass(frozen=True, kw_only=True)
class RandomWeights:
    """Random matrices by the name of their distribution.

    identity    Q = K = V = 1
    gaussian    entries of variance 1/d
    kaiming     entries of variance 2/d, Kaiming's normal initialisation
    orthogonal  uniformly distributed orthogonal matrices
    symmetric   QᵀK = V symmetric with entries of variance 1/d, one per head: attention is then a gradient flow
    """

    matrices: WeightsName
    dim: int
    heads: int = 1
    redraw: bool = False
    """Draw new matrices for every layer."""
    seeds: int | Sequence[int] = 0
    """One seed for all systems, or one for each system."""
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if self.matrices not in get_args(WeightsName):
            raise unknown("choice of weights", self.matrices, get_args(WeightsName))
        if self.heads < 1 or self.dim % self.heads:
            raise NormLabError(f"{self.heads} heads do not divide dimension {self.dim}; try 1")

    @property
    def per_layer(self) -> bool:
        return self.redraw and self.matrices != "identity"

    def layer(self, k: int) -> LayerWeights:
        if self.matrices == "identity":
            return LayerWeights() if self.heads == 1 else self._cut(*[torch.eye(self.dim, device="cpu")] * 3)
        if isinstance(self.seeds, int):
            return self._drawn(self.seeds, k)
        return _stacked([self._drawn(seed, k) for seed in self.seeds])

    def _drawn(self, seed: int, k: int) -> LayerWeights:
        generator = seeded_generator(seed, k if self.redraw else 0)
        if self.matrices == "symmetric":
            each = torch.stack([_symmetric(self.dim, generator) for _ in range(self.heads)])
            return LayerWeights(self._cast(each), self._cast(each / math.sqrt(self.heads)))
        return self._cut(*[_DRAW[self.matrices](self.dim, generator) for _ in range(3)])

    def _cut(self, query: Tensor, key: Tensor, value: Tensor) -> LayerWeights:
        if self.heads == 1:
            return LayerWeights(self._cast((query.mT @ key).unsqueeze(0)), self._cast(value.unsqueeze(0)))
        parts = [query, key, torch.eye(self.dim, device="cpu"), value]
        q, k, o, v = (self._cast(part.unflatten(0, (self.heads, -1))) for part in parts)
        return LayerWeights(LowRank(q, k), LowRank(o, v))

    def _cast(self, matrix: Tensor) -> Tensor:
        return matrix.to(self.device, self.dtype)


@dataclass(frozen=True)
class FixedWeights:
    """Fixed matrices, one entry per layer; a single entry is used for all layers."""

    pairs: Sequence[LayerWeights]

    def __post_init__(self) -> None:
        if not self.pairs:
            raise NormLabError("no matrices were given; expected one pair for all layers, or one for each")

    @property
    def per_layer(self) -> bool:
        return len(self.pairs) > 1

    def layer(self, k: int) -> LayerWeights:
        last = len(self.pairs) - 1
        # The end time of a network still belongs to its last layer.
        if self.per_layer and not 0 <= k <= last + 1:
            raise NormLabError(f"layer {k} has no weights: {last + 1} layers were given; a shorter horizon?")
        return self.pairs[min(k, last)]


def fixed_weights(
    *, query: Tensor | None = None, key: Tensor | None = None, value: Tensor | None = None
) -> FixedWeights:
    """User-defined matrices for all layers: each (d, d), or (H, d, d) with one per head; None: the identity."""
    q, k, v = (None if matrix is None else _headed(matrix) for matrix in (query, key, value))
    if q is None and k is None:
        return FixedWeights([LayerWeights(None, v)])
    score = k if q is None else q.mT if k is None else q.mT @ k
    if score is not None and v is not None and num_heads(score) != num_heads(v):
        raise NormLabError(
            f"{num_heads(score)} heads of queries and {num_heads(v)} of values; expected as many of each"
        )
    return FixedWeights([LayerWeights(score, v)])


def check_weights(weights: Weights, dim: int) -> None:
    """Raise unless the matrices have dimension `dim` and are common to all systems."""
    for matrix in weights.layer(0):
        right = matrix.right if isinstance(matrix, LowRank) else matrix
        if right is not None and right.shape[-1] != dim:
            raise NormLabError(
                f"matrices for dimension {right.shape[-1]} and tokens of dimension {dim}; try dim={right.shape[-1]}"
            )
        if right is not None and right.ndim != 3:
            raise NormLabError(f"expected matrices (heads, d, d) for all systems, got {tuple(right.shape)}")


def seeded_generator(*seeds: int) -> torch.Generator:
    """A random generator seeded by several numbers; different combinations give independent streams."""
    state = np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0]
    # torch takes signed 64-bit seeds.
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


def _headed(matrix: Tensor) -> Tensor:
    if matrix.ndim not in (2, 3, 4) or matrix.shape[-1] != matrix.shape[-2] or not bool(matrix.isfinite().all()):
        shape = tuple(matrix.shape)
        raise NormLabError(f"expected finite matrices (d, d), (heads, d, d) or (systems, heads, d, d), got {shape}")
    return matrix.unsqueeze(0) if matrix.ndim == 2 else matrix


def _stacked(pairs: Sequence[LayerWeights]) -> LayerWeights:
    """Stack the matrices of several systems."""
    scores, values = zip(*pairs, strict=True)
    return LayerWeights(_stack(scores), _stack(values))


def _stack(matrices: Sequence[Matrix | None]) -> Matrix | None:
    whole = [matrix for matrix in matrices if isinstance(matrix, Tensor)]
    if whole:
        return torch.stack(whole)
    factors = [matrix for matrix in matrices if isinstance(matrix, LowRank)]
    return LowRank(*(torch.stack(parts) for parts in zip(*factors, strict=True))) if factors else None


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
