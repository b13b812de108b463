"""Gated residual streams: n streams, read through a gate for each stream and channel that depends on all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from normlab import norms
from normlab.errors import NormLabError
from normlab.norms import Norm, rms, widen
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.gates import GateProjection
from normlab.schemes.contract.law import Law
from normlab.schemes.contract.parts import Step, Write
from normlab.schemes.contract.scales import factor
from normlab.schemes.contract.site import Site
from normlab.schemes.contract.streams import StreamScheme, add_update


@dataclass(frozen=True, kw_only=True)
class Gated(StreamScheme):
    """
    Gated residual streams: a branch reads the mean of n normalised streams, each behind a gate of low rank.

    Formula    h = mean_j g_j⊙N_j(X_j); X_t ← X_t + post_t·F(h)
               g = σ(W_up·SiLU(W_down·N/n)) per stream and channel, post = 2σ(W_inj·N/n), N = all N_j(X_j) in a row
               exit mean_j g_j⊙N_j(X_j), with no norm behind it
    Placement  X ─┬─ N_j ─┬─ W ─ g, post
                  │       └─ mean g⊙ ─ F ─ ·post ─┐
                  └───────────────────────────────+─ X'
    Init       n copies of the embedding; W_down, W_up, W_inj std 0.02: g ≈ ½, post ≈ 1; all three decay
               output projections ÷ √(2L) as Pre-Norm
    Source     Qwen (transformers, Qwen4ExpTextGatedResidual)
    Law        RMS(h) ≤ max|γ| at any state; Pre-Norm with half the branch input at initialisation
    Fails      adds nD(2r + n + 1) parameters a sublayer, at n = 4, r = 320 and D = 768 over half of its own
    """

    name = "gated"
    aliases = ("gated-residual", "qwen-gated-residual", "qwen4")
    fewest_streams = 2
    read_options = ("streams", "rank")

    rank: int = 320
    """Rank r of the gate: width between W_down and W_up."""

    def check(self) -> None:
        super().check()
        if self.rank < 1:
            raise NormLabError(f"gated: rank must be at least 1, got {self.rank}; try 320")

    def sublayer(self, site: Site) -> Step:
        return Step(InjectWrite(site.dt), read=self._read(site.dim, inject=True))

    def exit(self, bound: BoundScheme) -> nn.Module:
        return self._read(bound.dim, inject=False)

    def _read(self, dim: int, *, inject: bool) -> GatedRead:
        core = self.new_norm(dim, gain="none", bias=False)
        affine = norms.norm("identity", self.streams * dim, gain=self.gain, bias=self.bias)
        return GatedRead(StreamNorm(core, affine), self.rank, inject=inject)

    def law(self, depth: int) -> Law:
        return Law(
            # Gates of ½: attention reads ½·N(x), so its output is halved, and its logits are a quarter.
            speed=lambda m: 2.0 * m.radius,
            radial=lambda m: 0.5 * m.radial,
            temperature=lambda time: torch.full_like(time, 0.25),
            rms=lambda i: math.sqrt(1 + 0.25 * i),
            forward="linear",
            backward="power law in depth",
            note="the law of the mean stream at initialisation with W = 0, where all gates are ½; none is known for"
            " trained gates",
        )


class StreamNorm(nn.Module):
    """The streams normalised one by one, in a row: (..., n, D) → (..., n·D), with gain and bias of their own each."""

    def __init__(self, core: Norm, affine: Norm):
        super().__init__()
        self.core, self.affine = core, affine
        self.streams = affine.dim // core.dim

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return self.affine(self.core.core(state).flatten(-2))

    def rms_bound(self, rms_in: float) -> float:
        """Of the largest stream."""
        gain, bias = self.affine.scale(), self.affine.bias
        largest = 1.0 if gain is None else float(gain.detach().abs().max())
        shift = 0.0 if bias is None else float(rms(bias.detach().view(self.streams, -1)).max())
        return largest * self.core.rms_bound(rms_in) + shift


class GatedRead(nn.Module):
    """X → (mean_j g_j⊙N_j(X_j), post): a branch's input and the weights of its write; without `inject` no weights."""

    def __init__(self, norm: StreamNorm, rank: int, *, inject: bool):
        super().__init__()
        self.norm, self.streams = norm, norm.streams
        width = norm.affine.dim
        self.down = GateProjection(width, rank)
        self.up = GateProjection(rank, width, "spread")
        self.inject = GateProjection(width, norm.streams) if inject else None

    def forward(self, state: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm(state)
        row = normed.to(state.dtype)
        low = nn.functional.silu(self.down(row) / self.streams)
        gated = torch.sigmoid(self.up(low)) * normed
        seen = gated.unflatten(-1, (self.streams, -1)).mean(-2).to(state.dtype)
        if self.inject is None:
            return seen
        return seen, 2.0 * torch.sigmoid(self.inject(row) / self.streams)

    def rms_bound(self, rms_in: float) -> float:
        return self.norm.rms_bound(rms_in)


class InjectWrite(Write):
    """X_t ← X_t + dt·post_t·f."""

    def __init__(self, dt: float):
        super().__init__()
        self.part, self.dt = dt, factor(dt)

    def forward(self, state: torch.Tensor, update: torch.Tensor, *carry: torch.Tensor) -> torch.Tensor:
        (post,) = carry
        return add_update(widen(state), self.dt(post), widen(update)).to(state.dtype)

    def rms_bound(self, state: float, update: float) -> float:
        return state + 2.0 * self.part * update
