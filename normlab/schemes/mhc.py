"""Manifold-constrained hyper-connections: n streams, mixed by a doubly stochastic matrix that depends on the token.

The mixing never expands the streams. `comb` is Sinkhorn's result, whose last operation divides every **column** by its
sum (plus an epsilon), so comb[s, t] ≥ 0 and Σ_s comb[s, t] ≤ 1 whatever the logits are. Stream t of the mixed state is
Σ_s comb[s, t]·X_s, that is combᵀX, and the RMS is a norm, so

    RMS(Σ_s comb[s, t] X_s) ≤ Σ_s comb[s, t] · RMS(X_s) ≤ max_s RMS(X_s).

The rows of comb sum to 1 only as far as the rounds have converged: comb·X, the transpose left out, may expand the
largest stream (by up to 1.08 for n = 4, 20 rounds and large logits).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.kernels.dynamic_streams import DynamicRead
from normlab.kernels.sinkhorn import sinkhorn
from normlab.norms import Norm, widen
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.parts import Step
from normlab.schemes.contract.scales import factor
from normlab.schemes.contract.site import Site
from normlab.schemes.contract.streams import (
    MeanNorm,
    StreamLogits,
    StreamRead,
    StreamScheme,
    StreamWrite,
    add_update,
    mix_streams,
    mixing_matrix,
    part_of_step,
)


@dataclass(frozen=True, kw_only=True)
class MHC(StreamScheme):
    """
    Manifold-constrained hyper-connections: n residual streams, mixed by a doubly stochastic matrix at every sublayer.

    Formula    h = Σ_j pre_j·X_j; X_t ← Σ_s comb[s,t]·X_s + post_t·F(N(h))
               pre = σ(z) + ε, post = 2σ(z), comb = Sinkhorn(z), z = α·W·rms(X) + b
               exit N(Σ_j pre_j·X_j)
    Placement  X ─┬─ W ─ pre, post, comb
                  ├─ Σ pre ─ N ─ F ─ ·post ─┐
                  └─ combᵀ ─────────────────+─ X'
    Init       n copies of the embedding; W std 0.02, α 0.01, pre = 1/n, post = 1, comb = 1/n (diagonal=8: identity)
               output projections ÷ √(2L) as Pre-Norm; W decays, α and b do not
    Source     Xie et al. 2025, arXiv 2512.24880; DeepSeek-V4, HY-V4 (mixing="none"), GLM-5-next (merge="mean")
    Law        RMS(max_t X_t) grows by at most 2Λ_k a sublayer: combᵀ never expands the largest stream
    Fails      multiplying by comb for combᵀ (four public implementations did) loses that bound; with diagonal=0 the
               streams are averaged at every sublayer, so they differ only by what the last one wrote until b is learned
    """

    name = "mhc"
    aliases = ("manifold-hyper-connections", "manifold-constrained-hyper-connections", "deepseek-v4")
    variants = MappingProxyType({"hy-v4": {"mixing": "none"}, "glm-5-next": {"merge": "mean"}})
    fewest_streams = 2
    read_options = ("streams", "mixing", "rounds", "magnitude", "mix_eps")
    exit_options = ("merge",)

    mixing: Literal["sinkhorn", "none"] = "sinkhorn"
    """none: the streams are not mixed, X ← X + post·f (HY-V4)."""
    rounds: int = 20
    """Rounds of Sinkhorn's algorithm: rows, then columns."""
    alpha: float = 0.01
    """Initial value of α, the weight of the part of the coefficients that depends on the state."""
    diagonal: float = 0.0
    """Initial bias on the diagonal of the mixing logits: with 0 comb starts as the average, with 8 as the identity."""
    magnitude: float = 2.0
    """Largest weight of an update in a stream; its initial weight is half of it."""
    merge: Literal["learned", "mean"] = "learned"
    """The exit's weights of the streams: learned as those of a branch's input, or equal."""
    mix_eps: float = 1e-6
    """Epsilon of the coefficients: added to pre, and to the sums that Sinkhorn divides by."""

    def check(self) -> None:
        super().check()
        if self.rounds < 1:
            raise NormLabError(f"mhc: rounds must be at least 1, got {self.rounds}; try 20")
        if self.mixing == "none" and (self.rounds, self.diagonal) != (20, 0.0):
            raise NormLabError("mhc: rounds and diagonal belong to mixing='sinkhorn'; leave them out")
        if self.magnitude <= 0.0:
            raise NormLabError(f"mhc: magnitude must be positive, got {self.magnitude}; try 2.0")
        if self.mix_eps < 0.0:
            raise NormLabError(f"mhc: mix_eps must not be negative, got {self.mix_eps}; try 1e-6")

    def sublayer(self, site: Site) -> Step:
        bias = [self.diagonal * (s == t) for s in range(self.streams) for t in range(self.streams)]
        start = [self._mean_logits, [0.0] * self.streams] + ([bias] if self.mixing == "sinkhorn" else [])
        logits = StreamLogits(self.streams, site.dim, start, alpha=self.alpha, eps=self.eps)
        rounds = self.rounds if self.mixing == "sinkhorn" else 0
        read = MHCRead(logits, self.new_norm(site.dim), rounds, self.magnitude, self.mix_eps)
        return Step(MHCWrite(self.magnitude, self.mix_eps, site.dt), read=read)

    def exit(self, bound: BoundScheme) -> nn.Module:
        norm = self.new_norm(bound.dim)
        if self.merge == "mean":
            return MeanNorm(norm)
        logits = StreamLogits(self.streams, bound.dim, [self._mean_logits], alpha=self.alpha, eps=self.eps)
        return MHCExit(logits, norm, self.mix_eps)

    @property
    def _mean_logits(self) -> list[float]:
        """σ(z) = 1/n: a branch starts with the mean of the streams."""
        return [-math.log(self.streams - 1.0)] * self.streams


class MHCRead(StreamRead):
    """X → (N(Σ pre_j X_j), post, comb): a branch's input and the coefficients of its write; no comb without mixing."""

    def __init__(self, logits: StreamLogits, norm: Norm, rounds: int, magnitude: float, eps: float):
        super().__init__()
        self.logits, self.norm = logits, norm
        self.rounds, self.magnitude, self.eps = rounds, magnitude, eps
        self.streams = logits.sizes[0]

    def coefficients(self, state: torch.Tensor, kernels: str = "reference") -> tuple[torch.Tensor, ...]:
        state, pre, *logits = self.logits(state, kernels)
        return state, pre.sigmoid() + self.eps, *self._write_weights(logits, kernels)

    def dynamic_read(self) -> DynamicRead:
        return self.logits.first_group(self.eps)

    def carried(self, u: torch.Tensor, kernels: str) -> tuple[torch.Tensor, ...]:
        return self._write_weights(self.logits.groups(u)[1:], kernels)

    def _write_weights(self, logits: Sequence[torch.Tensor], kernels: str) -> tuple[torch.Tensor, ...]:
        """(post, comb), or post alone without mixing."""
        post, *comb = logits
        post = self.magnitude * post.sigmoid()
        if not comb:
            return (post + self.eps,)
        square = comb[0].reshape(*comb[0].shape[:-1], self.streams, self.streams)
        return post, sinkhorn(square, self.rounds, self.eps, kernels=kernels)

    def rms_bound(self, rms_in: float) -> float:
        return self.norm.rms_bound(self.streams * (1.0 + self.eps) * rms_in)


class MHCWrite(StreamWrite):
    """X_t ← Σ_s comb[s, t]·X_s + post_t·f; a refined step mixes by (1 − dt)·1 + dt·combᵀ, doubly stochastic, too."""

    def __init__(self, magnitude: float, eps: float, dt: float):
        super().__init__()
        self.dt = factor(dt)
        self.largest = dt * (magnitude + eps)

    def forward(self, state: torch.Tensor, update: torch.Tensor, *carry: torch.Tensor) -> torch.Tensor:
        post, *comb = carry
        wide = widen(state)
        mixed = part_of_step(wide, mix_streams(comb[0], wide), self.dt) if comb else wide
        return add_update(mixed, self.dt(post), widen(update)).to(state.dtype)

    def mixing(self, *carry: torch.Tensor) -> torch.Tensor | None:
        return mixing_matrix(carry[1], self.dt) if len(carry) > 1 else None

    def rms_bound(self, state: float, update: float) -> float:
        return state + self.largest * update


class MHCExit(StreamRead):
    """N(Σ pre_j X_j)."""

    def __init__(self, logits: StreamLogits, norm: Norm, eps: float):
        super().__init__()
        self.logits, self.norm, self.eps = logits, norm, eps

    def coefficients(self, state: torch.Tensor, kernels: str = "reference") -> tuple[torch.Tensor, ...]:
        state, pre = self.logits(state, kernels)
        return state, pre.sigmoid() + self.eps

    def dynamic_read(self) -> DynamicRead:
        return self.logits.first_group(self.eps)

    def carried(self, u: torch.Tensor, kernels: str) -> tuple[torch.Tensor, ...]:
        return ()
