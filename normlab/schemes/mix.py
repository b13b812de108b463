"""Mix-LN: Post-Norm in the first blocks, Pre-Norm in the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from normlab.errors import NormLabError
from normlab.schemes.contract.blocks import Block
from normlab.schemes.contract.law import Law, Value, squared_radius
from normlab.schemes.contract.learnt import main_gains
from normlab.schemes.contract.parts import Add, AddNorm, Step
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.contract.site import Site


@dataclass(frozen=True, kw_only=True)
class Mix(Scheme):
    """
    Mix-LN: Post-Norm in the first blocks, Pre-Norm in the rest.

    Formula    x ← N(x + F(x)), later x + F(N(x))
               the switch comes at block ⌊a·L⌋
    Placement  k < ⌊aL⌋:  x ─┬─ F ─┐            then:  x ─┬─ N ─ F ─┐
                             └─────+─ N ─ x'              └─────────+─ x'
    Init       base std
    Source     Li et al. 2024, arXiv 2412.13795
    Law        RMS = 1 up to the switch, then ∝ √l as in Pre-Norm
    Fails      with a large fraction gradients vanish as in Post-Norm; 7B models need about 0.06
    """

    name = "mix"
    aliases = ("mix-ln", "mixln", "mix-norm")
    depth_rule = "no constant is changed; the switch is at the same fraction of the depth"

    post_fraction: float = 0.25
    """Fraction a of the blocks that are Post-Norm, from the first block on."""

    def check(self) -> None:
        if not 0.0 <= self.post_fraction <= 1.0:
            raise NormLabError(f"mix: post_fraction must lie in [0, 1], got {self.post_fraction}; try 0.25")

    def switch(self, horizon: float) -> int:
        """The first block that is Pre-Norm."""
        # 0.29 · 100 is 28.999999999999996 in floating point, but means 29.
        return math.floor(self.post_fraction * horizon + 1e-9)

    def sublayer(self, site: Site) -> Step:
        norm = self.new_norm(site.dim)
        if site.time < self.switch(site.horizon):
            return Step(AddNorm(norm, step=site.dt))
        return Step(Add(site.dt), read=norm)

    def law(self, depth: int, blocks: Sequence[Block] = ()) -> Law:
        gain = Value("gain", 1.0).learnt(main_gains(blocks))
        switch = self.switch(depth)
        # The gain of the last norm on the main path is the initial radius of the Pre-Norm part.
        unit = gain.blocks[switch - 1] if switch and gain.blocks else 1.0
        return Law(
            speed=lambda m: torch.where(m.time < switch, torch.ones_like(m.radius), unit * m.radius),
            radial=lambda m: torch.where(m.time < switch, torch.zeros_like(m.radius), m.radial / unit),
            temperature=squared_radius(gain),
            values=(gain,),
            switches=(float(switch),),
            rms=lambda i: math.sqrt(1 + max(0, i - 2 * switch)),
            forward="linear",
            backward="power law after the switch, as Post-Norm before it",
        )
