"""Attention residuals: every sublayer reads a softmax-weighted sum of earlier outputs, collected in groups of blocks.

The state holds a slot for the embedding and one for each group of blocks, (..., groups + 1, D). A sublayer adds its
output to the slot of its group, and reads the slots of finished groups and, unless it is the group's first, its own. So
all states have one shape, and which slots are read and written are numbers in tensors: blocks share a compiled graph.
With as many groups as sublayers every output is a source of its own (full attention residuals).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.norms import Norm, widen
from normlab.roles import Role
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.law import Law
from normlab.schemes.contract.parts import Step, Write
from normlab.schemes.contract.scales import ConstantScale, factor
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.contract.site import Site
from normlab.schemes.contract.streams import FirstStreamRead, add_update, full_precision, weighted_sum


@dataclass(frozen=True, kw_only=True)
class AttnRes(Scheme):
    """
    Attention residuals: a branch reads a learned convex combination of the embedding and the sums of earlier groups.

    Formula    h = Σ_j α_j·V_j, α = softmax_j(w·rms(V_j)); V_g ← V_g + F(N(h)) in the slot g of the block's group
               V_0 = embedding; sources: finished groups, and the own group once it holds something
               exit N(Σ_j α_j·V_j) over all slots
    Placement  V_0 … V_g ─┬─ softmax(w) ─ Σ ─ N ─ F ─┐
                          └──────────────────── V_g ─+─ V_g'
    Init       w = 0: equal weights, Pre-Norm but for epsilons; outputs ÷ √(2L) as Pre-Norm; no decay on w
    Source     Kimi, arXiv 2603.15031 (block form); the key's gain is part of w unless key_gain=True
    Law        RMS(h) ≤ max_j RMS(V_j); finished groups never change, a group's sum grows as Pre-Norm over its blocks
    Fails      w that does not start at zero; without fused kernels all slots are copied and kept for every sublayer
    """

    name = "attnres"
    aliases = ("attention-residuals", "attn-res", "block-attnres")
    depth_rule = "as many groups, of more blocks each; output projections ÷ √(2L); no constant is changed"

    groups: int = 8
    """Groups of blocks whose sums are sources; as many as sublayers or more: every sublayer is a source."""
    key_gain: bool = False
    """Give the norm of the keys a gain of its own beside w; it has no gradient while w is zero."""
    depth_init: bool = True
    """Divide output projections by √(2L) at initialisation, as Pre-Norm does."""

    def check(self) -> None:
        if self.groups < 1:
            raise NormLabError(f"attnres: groups must be at least 1, got {self.groups}; try 8")

    @property
    def streams(self) -> int:
        return self.groups + 1

    def sublayer(self, site: Site) -> Step:
        slot, visible = self._place(site)
        return Step(SlotWrite(slot, site.dt), read=self._read(site.dim, visible))

    def _place(self, site: Site) -> tuple[int, int]:
        """(slot that a sublayer writes to, number of slots that it reads, from the first on)."""
        if self.groups >= site.in_all:
            return site.step + 1, site.step + 1
        group, place = divmod(site.block, math.ceil(site.depth / self.groups))
        begins = place == 0 and (site.branch == 0 or site.steps == 1)
        return group + 1, group + 1 if begins else group + 2

    def _used(self, bound: BoundScheme) -> int:
        """Slots that hold something at the end."""
        steps = bound.steps_before(bound.depth)
        if self.groups >= steps:
            return steps + 1
        return math.ceil(bound.depth / math.ceil(bound.depth / self.groups)) + 1

    def _read(self, dim: int, visible: int) -> nn.Module:
        norm = self.new_norm(dim)
        if visible == 1:
            return FirstStreamRead(norm)
        key = self.new_norm(dim, gain=self.gain if self.key_gain else "none", bias=False)
        return SourcesRead(norm, key, visible)

    def entry(self, bound: BoundScheme) -> nn.Module:
        return FirstSlot(self.streams)

    def exit(self, bound: BoundScheme) -> nn.Module:
        return self._read(bound.dim, self._used(bound))

    def hidden(self, state: torch.Tensor) -> torch.Tensor:
        return widen(state).sum(-2).to(state.dtype)

    def initial_std(self, role: Role, base: float, bound: BoundScheme) -> float:
        return bound.output_std(role, base) if self.depth_init else base

    def law(self, depth: int) -> Law:
        return Law(
            speed=lambda m: m.radius,
            radial=lambda m: m.radial,
            rms=lambda i: math.sqrt(1 + i),
            forward="linear",
            backward="power law in depth",
            note="the law of the sum of all slots at initialisation, which is Pre-Norm's; none is known for trained w",
        )


class FirstSlot(nn.Module):
    """x → (x, 0, …, 0), stacked before the last dimension."""

    def __init__(self, slots: int):
        super().__init__()
        self.slots = slots

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(x.unsqueeze(-2), (0, 0, 0, self.slots - 1))

    def rms_bound(self, rms_in: float) -> float:
        return rms_in

    def extra_repr(self) -> str:
        return f"{self.slots}"


class SourcesRead(nn.Module):
    """V → N(Σ_j α_j·V_j) over the first `visible` slots, α = softmax_j(w·key(V_j)) in full precision."""

    def __init__(self, norm: Norm, key: Norm, visible: int):
        super().__init__()
        self.norm, self.key, self.visible = norm, key, ConstantScale(visible)
        self.query = nn.Parameter(torch.empty(norm.dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)

    def shares(self, state: torch.Tensor) -> torch.Tensor:
        """The weight α_j of every slot, (..., slots); zero for those that are not read."""
        with full_precision(state):
            scores = self.key(widen(state)) @ widen(self.query)
        read = torch.arange(state.shape[-2], device=state.device) < self.visible.tensor
        return scores.masked_fill(~read, -math.inf).softmax(-1)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return self.norm(weighted_sum(self.shares(state), widen(state))).to(state.dtype)

    def rms_bound(self, rms_in: float) -> float:
        return self.norm.rms_bound(rms_in)


class SlotWrite(Write):
    """V_slot ← V_slot + dt·f. Its bound is that of Σ_j RMS(V_j), which no slot exceeds and no sum of slots."""

    def __init__(self, slot: int, dt: float):
        super().__init__()
        self.slot, self.part, self.dt = ConstantScale(slot), dt, factor(dt)

    def forward(self, state: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        here = torch.arange(state.shape[-2], device=state.device) == self.slot.tensor
        wide = widen(state)
        return add_update(wide, self.dt(here.to(wide.dtype)), widen(update)).to(state.dtype)

    def rms_bound(self, state: float, update: float) -> float:
        return state + self.part * update
