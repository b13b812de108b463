"""Peri-LN (Sandwich-LN): norms before and after each branch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.schemes.contract.blocks import Block
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.law import Law, Motion, Value
from normlab.schemes.contract.learnt import branch_factors
from normlab.schemes.contract.parts import Add, Step
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.contract.site import Site


@dataclass(frozen=True, kw_only=True)
class Peri(Scheme):
    """
    Peri-LN: normalise the input and the output of each branch.

    Formula    x ← x + Δt · N_out(F(N_in(x)));  x₀ = N(embedding)
    Placement  x ─┬─ N_in ─ F ─ N_out ─ ·Δt ─┐
                  └──────────────────────────+─ x'
    Init       base std
    Source     Kim et al. 2025, arXiv 2502.02732; Gemma 2 (gain="offset"); step Δt: arXiv 2510.09904
    Law        RMS(x_l) ≤ RMS(x₀) + Δt Σ (max|γ| + RMS(b)); ∝ √l at initialisation, closer to ∝ l in training
    Fails      Δt = 1 in deep networks: every branch adds RMS 1, so the state grows larger than Pre-Norm's
    """

    name = "peri"
    aliases = ("peri-ln", "peri-norm", "sandwich", "sandwich-norm", "sandwich-ln")
    variants = MappingProxyType({name: {"gain": "offset", "entry_norm": False} for name in ("gemma2", "gemma-2")})
    zero_outputs = False
    depth_transfer = "derived"
    depth_rule = "branch outputs × L₀/L, as CompleteP: N_out(F(N_in(x))) does not depend on the depth"

    step: float = 1.0
    """Residual step size Δt in (0, 1]; 0.1 keeps deep stacks near their input scale."""
    output_gain: float = 1.0
    """Initial gain of the output norms; the bound on the state's RMS is linear in it."""
    entry_norm: bool = True
    """Normalise the embedding, too: at std 0.02 it would be negligible beside the first branch, which adds RMS 1."""

    def check(self) -> None:
        if not 0.0 < self.step <= 1.0:
            raise NormLabError(f"peri: step must lie in (0, 1], got {self.step}; try 0.1")
        if self.output_gain <= 0.0:
            raise NormLabError(f"peri: output_gain must be positive, got {self.output_gain}")
        if self.output_gain != 1.0 and self.gain == "none":
            raise NormLabError("peri: output_gain needs a gain to live in; leave gain='none' off")

    def sublayer(self, site: Site) -> Step:
        return Step(
            Add(self.step * site.dt),
            read=self.new_norm(site.dim),
            shape=self.new_norm(site.dim, init=self.output_gain),
        )

    def entry(self, bound: BoundScheme) -> nn.Module:
        return self.new_norm(bound.dim) if self.entry_norm else nn.Identity()

    def law(self, depth: int, blocks: Sequence[Block] = ()) -> Law:
        gain = Value("gain of N_out", self.output_gain).learnt(branch_factors(blocks))

        def size(m: Motion) -> torch.Tensor | float:
            return self.step * gain(m.time)

        return Law(
            speed=lambda m: m.radius * m.attention / size(m),
            radial=lambda m: size(m) * m.radial / m.attention,
            values=(gain,),
            rms=lambda i: math.sqrt(1 + (self.step * self.output_gain) ** 2 * i),
            forward="linear",
            backward="power law in depth, independent of the size of the output projections",
        )
