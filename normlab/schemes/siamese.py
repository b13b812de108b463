"""SiameseNorm: a normalised and an unnormalised residual stream that share every branch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.norms import Norm, widen
from normlab.roles import Role
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.bounds import BranchBound, rms_bound_of
from normlab.schemes.contract.law import Law
from normlab.schemes.contract.needs import Need
from normlab.schemes.contract.parts import Step, Write
from normlab.schemes.contract.scales import LearnedScale, factor
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.contract.site import Site
from normlab.schemes.contract.streams import CopyStreams


@dataclass(frozen=True, kw_only=True)
class Siamese(Scheme):
    """
    SiameseNorm: branches read the sum of a Post-Norm stream p and a Pre-Norm stream u, and write to both.

    Formula    p ← N_p(p); f = F(N_i(p + N_u(u))); p ← p + f/c, u ← u + f, c = √(2(ℓ+1)) in block ℓ = 0, 1, ...
               form="hybrid": attention reads γ ⊙ p + N_u(u), without N_p and N_i, and has norms on q, k and v
               exit N_f(N_a(p) + N_b(u))
    Placement  p ─ N_p ─┬────────────────────+─ p'
                        +─ N_i ─ F ─┬─ ·1/c ─┘
               u ─┬ N_u ┘           └────────┐
                  └──────────────────────────+─ u'
    Init       p₀ = u₀ = x₀; output projections ÷ √(2L) as Pre-Norm; gains and γ are 1
    Source     arXiv 2602.08064: the form "post" is that of its vision code, "hybrid" that of its language code
    Law        RMS(p) ≤ max|γ_p| + Λ_k/c: bounded; RMS(u) ≤ RMS(x₀) + Σ Λ_k: as Pre-Norm's state, with branches that
               read a normalised sum of both
    Fails      three norms a sublayer, and two streams to keep; a hidden state that shows p alone hides that u grows
    """

    name = "siamese"
    aliases = ("siamesenorm", "siamese-norm")
    topologies = ("serial",)
    depth_rule = "its own constants, updates of p ÷ √(2(ℓ+1)), output projections ÷ √(2L); no constant is changed"

    form: Literal["post", "hybrid"] = "post"
    """hybrid: attention reads p without a norm and normalises queries, keys and values instead."""
    depth_init: bool = True
    """Divide output projections by √(2L) at initialisation, as Pre-Norm does."""

    def check(self) -> None:
        if self.form == "hybrid" and self.qk_norm != "none":
            raise NormLabError("siamese: the hybrid form brings its own norms on q, k and v; leave qk_norm off")

    @property
    def streams(self) -> int:
        return 2

    def sublayer(self, site: Site) -> Step:
        share = 1.0 / math.sqrt(2.0 * (site.time + 1.0))
        hybrid = self.form == "hybrid" and site.kind == "attention"
        inner: nn.Module = nn.Identity() if hybrid else self.new_norm(site.dim)
        scale = LearnedScale(site.dim) if hybrid else None
        main = None if hybrid else self.new_norm(site.dim)
        read = SiameseRead(main, scale, self.new_norm(site.dim), inner)
        return SiameseStep(SiameseWrite(share, site.dt), read=read)

    @property
    def needs(self) -> tuple[Need, ...]:
        def per_head(attention: Any) -> nn.Module:
            return self.new_norm(attention.head_dim)

        if self.form == "post":
            return super().needs
        return Need("q-norm", per_head), Need("k-norm", per_head), Need("v-norm", per_head)

    def entry(self, bound: BoundScheme) -> nn.Module:
        return CopyStreams(2)

    def exit(self, bound: BoundScheme) -> nn.Module:
        return SiameseExit(*(self.new_norm(bound.dim) for _ in range(3)))

    def hidden(self, state: torch.Tensor) -> torch.Tensor:
        # The stream that no norm touches: p is bounded by its norm, whatever happens to u.
        return state[..., 1, :]

    def initial_std(self, role: Role, base: float, bound: BoundScheme) -> float:
        return bound.output_std(role, base) if self.depth_init else base

    def law(self, depth: int) -> Law:
        return Law(
            speed=None,
            rms=lambda i: math.sqrt(1 + i),
            forward="linear",
            backward="as Pre-Norm: the gradient in the stream u passes no norm",
            note="growth of the stream u; no flow is known, since branches read a sum of two streams that turn at"
            " different speeds",
        )


class SiameseRead(nn.Module):
    """(p, u) → (N_i(p̂ + N_u(u)), p̂), p̂ = N_p(p): a branch's input, and what p is replaced by before the update.

    Without N_p the stream p stays as it is, and the branch reads γ ⊙ p in its place.
    """

    def __init__(self, main: Norm | None, scale: LearnedScale | None, beside: Norm, inner: nn.Module):
        super().__init__()
        self.main, self.scale, self.beside, self.inner = main, scale, beside, inner

    def forward(self, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        main, beside = widen(state).unbind(-2)
        main = main if self.main is None else self.main(main)
        seen = (main if self.scale is None else self.scale(main)) + self.beside(beside)
        return self.inner(seen).to(state.dtype), main

    def main_bound(self, rms_in: float) -> float:
        """Largest RMS of p̂."""
        return rms_in if self.main is None else self.main.rms_bound(rms_in)

    def rms_bound(self, rms_in: float) -> float:
        main = self.main_bound(rms_in)
        main = main if self.scale is None else self.scale.rms_bound(main)
        return rms_bound_of(self.inner, main + self.beside.rms_bound(rms_in))


class SiameseWrite(Write):
    """p ← p̂ + dt·f/c, u ← u + dt·f."""

    def __init__(self, share: float, dt: float):
        super().__init__()
        self.share, self.dt = factor(share), factor(dt)

    def forward(self, state: torch.Tensor, update: torch.Tensor, *carry: torch.Tensor) -> torch.Tensor:
        (main,) = carry
        beside, update = widen(state)[..., 1, :], self.dt(widen(update))
        return torch.stack([main + self.share(update), beside + update], dim=-2).to(state.dtype)

    def rms_bound(self, state: float, update: float) -> float:
        # Of both streams, for a p̂ no larger than the state; p takes less of the update than u.
        return state + rms_bound_of(self.dt, update)


class SiameseStep(Step):
    """The step of SiameseNorm: the norm in its read may enlarge p."""

    def rms_bound(self, state: float, branch: BranchBound) -> float:
        larger = max(state, cast(SiameseRead, self.read).main_bound(state))
        return self.write.rms_bound(larger, self.update_bound(state, branch))


class SiameseExit(nn.Module):
    """N_f(N_a(p) + N_b(u))."""

    def __init__(self, main: Norm, beside: Norm, final: Norm):
        super().__init__()
        self.main, self.beside, self.final = main, beside, final

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        main, beside = widen(state).unbind(-2)
        return self.final(self.main(main) + self.beside(beside)).to(state.dtype)
