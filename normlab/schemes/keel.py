"""KEEL: Post-Norm with a skip connection scaled by the depth, for a thousand layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from normlab.errors import NormLabError, unknown
from normlab.schemes.contract.blocks import Block
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.law import Law, Value
from normlab.schemes.contract.learnt import main_gains
from normlab.schemes.contract.parts import Add, AddNorm, Step
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.contract.site import Site

_RULES = ("sublayers", "blocks", "sqrt")


@dataclass(frozen=True, kw_only=True)
class Keel(Scheme):
    """
    KEEL: Pre-Norm's input norm, and Post-Norm with the skip connection scaled by the depth.

    Formula    x ← N_out(α·x + F(N_in(x)))
               α = 2L; the first block is plain Pre-Norm
    Placement  x ─┬─ N_in ─ F ─┐
                  └──── ·α ────+─ N_out ─ x'
    Init       base std
    Source     arXiv 2601.19895
    Law        RMS = 1 from the second block on; 2L steps of size 1/(2L): a total time of 1
    Fails      with a learned gate or a factor 1 − α, as in some posts, it is a different scheme
    """

    name = "keel"
    aliases = ("keel-norm",)
    depth_rule = "its own α, 2L by default"

    alpha: float | str = "sublayers"
    """Factor α on the skip connection: "sublayers" (2L), "blocks" (L), "sqrt" (√L), or a number."""
    final_norm: bool = False
    """A norm before the head; only a single block needs it, and always gets it."""

    def check(self) -> None:
        if isinstance(self.alpha, str):
            if self.alpha not in _RULES:
                raise unknown("alpha rule of keel", self.alpha, _RULES)
        elif not self.alpha > 0.0:
            raise NormLabError(f"keel: alpha must be positive, got {self.alpha}; try 'sublayers'")

    def skip_weight(self, sublayers: float, horizon: float) -> float:
        """The factor α on the skip connection."""
        rules = {"sublayers": sublayers, "blocks": horizon, "sqrt": math.sqrt(horizon)}
        return rules[self.alpha] if isinstance(self.alpha, str) else float(self.alpha)

    def sublayer(self, site: Site) -> Step:
        if site.time < 1:
            return Step(Add(site.dt), read=self.new_norm(site.dim))
        keep = self.skip_weight(site.sublayers, site.horizon)
        return Step(AddNorm(self.new_norm(site.dim), keep=keep, step=site.dt), read=self.new_norm(site.dim))

    def exit(self, bound: BoundScheme) -> nn.Module:
        ends_in_norm = bound.horizon > 1
        return nn.Identity() if ends_in_norm and not self.final_norm else self.new_norm(bound.dim)

    def law(self, depth: int, blocks: Sequence[Block] = ()) -> Law:
        gain = Value("gain of N_out", 1.0).learnt(main_gains(blocks))
        alpha = self.skip_weight(2.0 * depth, depth)
        return Law(
            # The length of the skip is the gain of the norm before it; the length of an update is not affected.
            speed=lambda m: torch.where(m.time < 1.0, m.radius, alpha * gain(m.time)),
            values=(gain,),
            radial=lambda m: torch.where(m.time < 1.0, m.radial, 0.0),
            switches=(1.0,),
            resets_radius=True,
            rms=lambda i: math.sqrt(1 + i) if i <= 2 else 1.0,
            forward="bounded",
            backward="bounded: the skip path keeps 1 − O(1/α²) per sublayer",
            note="two sublayers per block; the first block is Pre-Norm",
        )
