"""SpanNorm: Post-Norm with a skip connection that spans the whole block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from normlab.choices import Topology
from normlab.roles import OUTPUTS, Role
from normlab.schemes.contract.blocks import Block
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.bounds import BranchBound
from normlab.schemes.contract.law import Law, Value, on_sphere, squared_radius
from normlab.schemes.contract.learnt import first_gains, main_gains
from normlab.schemes.contract.parts import AddNorm, Branch, Seen, Step, ToSphere, call_branch, split_read
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.contract.site import Site


@dataclass(frozen=True, kw_only=True)
class SpanNorm(Scheme):
    """
    SpanNorm: Post-Norm with all skip connections from the block's input, so the main path has one norm per block.

    Formula    y = N₁(x + Attn(x)); x' = N₂(x + FFN(y))
    Placement  x ─┬─ Attn ─+─ N₁ ─ FFN ─+─ N₂ ─ x'
                  ├────────┘            │
                  └─────────────────────┘
    Init       ScaleInit: output projections × 1/√L, the rest at the base std
    Source     arXiv 2601.22580 (ICML 2026)
    Law        RMS = 1 after every block; the skip path keeps (1+c/L)^(−1/2) per block, e^(−c/2) in all
    Fails      without entry norm a small embedding is negligible beside the first branch; reported to diverge at the
               highest of three learning rates at which Pre-Norm is stable (arXiv 2602.08064); at 125M and 1.2e-3, 3 of
               4 runs stayed at the unigram entropy with 40 steps of warm-up, 0 of 4 with 100, 0 of 8 at 6e-4; at
               6×384 stuck from 4e-3 on in 8 of 9 runs, 122 steps of warm-up
    """

    name = "spannorm"
    aliases = ("span-norm", "span", "fusenorm")
    topologies = ("serial",)
    depth_rule = "its own ScaleInit, output projections × 1/√L"

    scale_init: Literal["blocks", "sublayers", "none"] = "blocks"
    """ScaleInit: output projections × 1/√L, × 1/√(2L), or not scaled."""
    scale_inputs: bool = False
    """Apply ScaleInit to W_V, W_up and W_gate, too."""
    first_norm: bool = True
    """Normalise the input of the first block's attention, but not its skip connection."""
    entry_norm: bool = True
    """Scale the embedding to unit RMS; off for the paper's literal text, where the first skip is not normalised."""
    final_norm: bool = False
    """A norm before the head; the last block already ends in one."""

    def sublayer(self, site: Site) -> Step:
        # A refined scheme divides what attention adds. The last branch passes attention's result on, so dividing its
        # update as well would make steps second order in dt: in the limit nothing would move.
        last = site.branch == site.steps - 1
        first = self.first_norm and site.block == 0 and site.branch == 0
        write = AddNorm(self.new_norm(site.dim), step=1.0 if last else site.dt)
        return Step(write, read=self.new_norm(site.dim) if first else None)

    def block(self, sites: Sequence[Site], topology: Topology) -> Block:
        return SpanBlock([self.sublayer(site) for site in sites])

    def entry(self, bound: BoundScheme) -> nn.Module:
        return ToSphere(bound.dim) if self.entry_norm else nn.Identity()

    def exit(self, bound: BoundScheme) -> nn.Module:
        return self.new_norm(bound.dim) if self.final_norm else nn.Identity()

    def initial_std(self, role: Role, base: float, bound: BoundScheme) -> float:
        scaled = OUTPUTS + (("v", "up", "gate") if self.scale_inputs else ())
        if self.scale_init == "none" or role.role not in scaled:
            return base
        return base / math.sqrt(bound.horizon if self.scale_init == "blocks" else bound.updates)

    def law(self, depth: int, blocks: Sequence[Block] = ()) -> Law:
        inner = Value("gain of N₁", 1.0).learnt(first_gains(blocks))
        outer = Value("gain of N₂", 1.0).learnt(main_gains(blocks))
        return Law(
            # N₂(x + γ₁ n(x + A)) with ‖x‖ = γ₂: the fraction γ₁ / (γ₂ + γ₁) rotates.
            speed=lambda m: (1.0 + outer(m.time) / inner(m.time)) * torch.ones_like(m.radius),
            temperature=squared_radius(outer),
            values=(inner, outer),
            mlp="identity",
            rms=on_sphere,
            forward="bounded",
            backward="the skip path shrinks by 1/√(1+σ_f²) per block; ScaleInit makes the product e^(−c/2)",
            note="with the identity in place of the MLP, n(x + n(x + A)): half of Post-Norm's rotation; without an MLP"
            " tokens do not move",
        )


class SpanBlock(Block):
    """Each step reads the previous step's result and writes onto the block's input."""

    def run_steps(self, state: torch.Tensor, branches: Sequence[Branch]) -> torch.Tensor | None:
        written = state
        for step, branch in self.pairs(branches):
            written = step(written, branch, onto=state)
        return written

    def run(
        self, state: torch.Tensor, seen: Seen, branches: Sequence[Branch], after: nn.Module
    ) -> tuple[torch.Tensor, Seen]:
        kernels, written = self.usable_kernels(), state
        for (step, branch), read in zip(self.pairs(branches), self.reads(after), strict=True):
            x, carry = split_read(seen)
            written, seen = step.write.write_and_read(state, call_branch(branch, x), step.shape, read, kernels, *carry)
        return written, seen

    def rms_bound(self, state: float, branches: Sequence[BranchBound]) -> float:
        seen = state
        for step, branch in self.pairs(branches):
            seen = step.write.rms_bound(state, step.update_bound(seen, branch))
        return seen
