"""HybridNorm: norms on q, k and v in attention, Post-Norm around the MLP."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.norms import Norm
from normlab.roles import OUTPUTS, Role
from normlab.schemes.base import Bound, Scheme, Site
from normlab.schemes.law import Law
from normlab.schemes.needs import Need
from normlab.schemes.parts import Add, Branch, BranchBound, Step


@dataclass(frozen=True, kw_only=True)
class Hybrid(Scheme):
    """
    HybridNorm: attention normalises q, k and v in place of its input; the MLP's skip starts behind a norm.

    Formula    z = N(x + Attn_qkv(x)); x' = z + FFN(z)
    Placement  x ─┬─ Attn(N q, N k, N v) ─┐           ┌─ FFN ─┐
                  └───────────────────────+─ y ─ N ─┬─┘       │
                                                    └─────────+─ x'
    Init       std 0.014, cut at 3σ; output projections ÷ √(2L)
    Source     Zhuo et al. 2025, arXiv 2503.04598
    Law        RMS(x_l) ≤ max|γ| + Λ_FFN: one MLP away from the sphere, at any depth
    Fails      reported to diverge at rates that Pre-Norm bears (arXiv 2602.08064); star=True guards the first block
    """

    name = "hybrid"
    aliases = ("hybridnorm", "hybrid-norm")
    topologies = ("serial",)
    truncate = 3.0

    star: bool = False
    """HybridNorm*: block 0 is a Pre-Norm block with q, k, v norms."""

    def check(self) -> None:
        if self.qk_norm != "none":
            raise NormLabError("hybrid brings its own norms on q, k and v; leave qk_norm off")

    def sublayer(self, site: Site) -> Step:
        write = Add(site.dt)
        if self.star and site.block == 0:
            return Step(write, read=self.new_norm(site.dim))
        if site.branch == 0:
            return Step(write)
        return NormedSkip(write, self.new_norm(site.dim))

    @property
    def needs(self) -> tuple[Need, ...]:
        def per_head(attention) -> nn.Module:
            return self.new_norm(attention.head_dim)

        return Need("q-norm", per_head), Need("k-norm", per_head), Need("v-norm", per_head)

    def base_std(self, dim: int) -> float:
        return 0.014

    def initial_std(self, role: Role, base: float, bound: Bound) -> float:
        return base / math.sqrt(bound.updates) if role.role in OUTPUTS else base

    def law(self, depth: int) -> Law:
        return Law(
            speed=lambda m: torch.ones_like(m.radius),
            rms=self._rms,
            forward="bounded",
            backward="Post-Norm's, with one norm on the main path of a block",
            note="the law of attention alone, seen behind the norm; q and k norms do nothing to unit tokens",
        )

    def _rms(self, i: int) -> float:
        size = 1.0
        for j in range(i):
            plain = self.star and j < 2
            size = math.sqrt(size**2 + 1) if plain else math.sqrt(2) * (size if j % 2 == 0 else 1.0)
        return size


class NormedSkip(Step):
    """z = N(x), then z + F(z): branch and skip both start behind the norm."""

    def __init__(self, write: Add, norm: Norm):
        super().__init__(write)
        self.norm = norm

    def forward(self, state: torch.Tensor, branch: Branch) -> torch.Tensor:
        return super().forward(self.norm(state), branch)

    def bound(self, state: float, branch: BranchBound) -> float:
        return super().bound(self.norm.bound(state), branch)
