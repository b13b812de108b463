"""HybridNorm: norms on q, k and v inside attention, Post-Norm for the MLP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.roles import OUTPUTS, Role
from normlab.schemes.contract.blocks import Block
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.law import Law, Value, squared_radius
from normlab.schemes.contract.learnt import main_gains
from normlab.schemes.contract.needs import Need
from normlab.schemes.contract.parts import Add, AddNorm, Step
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.contract.site import Site


@dataclass(frozen=True, kw_only=True)
class Hybrid(Scheme):
    """
    HybridNorm: attention normalises q, k and v instead of its input; the MLP's skip connection starts after a norm.

    Formula    z = N(x + Attn_qkv(x)); x' = z + FFN(z)
    Placement  x ─┬─ Attn(N q, N k, N v) ─┐           ┌─ FFN ─┐
                  └───────────────────────+─ y ─ N ─┬─┘       │
                                                    └─────────+─ x'
    Init       std 0.014, truncated at 3σ; output projections ÷ √(2L)
    Source     Zhuo et al. 2025, arXiv 2503.04598
    Law        RMS(x_l) ≤ max|γ| + Λ_FFN: one MLP away from the sphere, at any depth
    Fails      reported to diverge at learning rates at which Pre-Norm is stable (arXiv 2602.08064); star=True makes the
               first block Pre-Norm; at 125M and 1.2e-3, 4 of 4 runs stayed at the unigram entropy with 40 steps of
               warm-up, 1 of 2 with 100
    """

    name = "hybrid"
    aliases = ("hybridnorm", "hybrid-norm")
    topologies = ("serial",)
    truncate = 3.0
    depth_rule = "its own initialisation, output projections ÷ √(2L)"

    star: bool = False
    """HybridNorm*: block 0 is a Pre-Norm block with q, k, v norms."""

    def check(self) -> None:
        if self.qk_norm != "none":
            raise NormLabError("hybrid brings its own norms on q, k and v; leave qk_norm off")

    def sublayer(self, site: Site) -> Step:
        if self.star and site.block == 0:
            return Step(Add(site.dt), read=self.new_norm(site.dim))
        if site.kind == "attention":
            # Everything after reads z = N(y) and not y, so the norm is part of the write.
            return Step(AddNorm(self.new_norm(site.dim), step=site.dt))
        return Step(Add(site.dt))

    @property
    def needs(self) -> tuple[Need, ...]:
        def per_head(attention: Any) -> nn.Module:
            return self.new_norm(attention.head_dim)

        return Need("q-norm", per_head), Need("k-norm", per_head), Need("v-norm", per_head)

    def base_std(self, dim: int) -> float:
        return 0.014

    def initial_std(self, role: Role, base: float, bound: BoundScheme) -> float:
        return base / math.sqrt(bound.updates) if role.role in OUTPUTS else base

    def law(self, depth: int, blocks: Sequence[Block] = ()) -> Law:
        gain = Value("gain", 1.0).learnt(main_gains(blocks))
        return Law(
            speed=lambda m: torch.ones_like(m.radius),
            temperature=squared_radius(gain),
            values=(gain,),
            rms=self._rms,
            forward="bounded",
            backward="as Post-Norm, with one norm per block on the main path",
            note="the law of attention alone, with the state after the norm; q and k norms do not change unit tokens",
        )

    def _rms(self, i: int) -> float:
        if self.star and i <= 2:
            return math.sqrt(1 + i)
        return 1.0 if i % 2 else math.sqrt(2) if i else 1.0
