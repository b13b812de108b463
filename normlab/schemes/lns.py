"""LayerNorm scaling: Pre-Norm with the norm's output divided by √layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from normlab.errors import NormLabError
from normlab.schemes.contract.law import Law
from normlab.schemes.contract.parts import Add, Step
from normlab.schemes.contract.scales import BoundedSequential, ConstantScale
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.contract.site import Site


@dataclass(frozen=True, kw_only=True)
class LNS(Scheme):
    """
    LN-Scaling: Pre-Norm with the norm's output divided by the square root of the block's index.

    Formula    x ← x + F(N(x)/√ℓ)
               ℓ = 1 … L, the block
    Placement  x ─┬─ N ─ ÷√ℓ ─ F ─┐
                  └───────────────+─ x'
    Init       base std, not scaled by depth
    Source     Sun et al. 2025, arXiv 2502.05795
    Law        variance 1 + 2·H_L at initialisation (RMS 2.68 at 12 blocks): logarithmic in depth
    Fails      with depth-scaled output initialisation branches are scaled down twice (refused); the final norm is not
               scaled
    """

    name = "lns"
    aliases = ("ln-scaling", "lnscaling", "layernorm-scaling")
    depth_transfer = "derived"
    depth_rule = (
        "branch outputs × L₀/L, as CompleteP, and ℓ = 1 + k·L₀/L for block k from 0: the factors of the "
        "base, stretched over the depth"
    )

    depth_init: bool = False
    """Not supported; exists to explain why in an error message."""

    def check(self) -> None:
        if self.depth_init:
            raise NormLabError("lns scales by depth already; its authors warn against depth_init, leave it off")

    def sublayer(self, site: Site) -> Step:
        shrink = ConstantScale(1.0 / math.sqrt(site.time + 1.0))
        return Step(Add(site.dt), read=BoundedSequential(self.new_norm(site.dim), shrink))

    def law(self, depth: int) -> Law:
        return Law(
            speed=lambda m: m.radius * (m.time + 1.0).sqrt(),
            radial=lambda m: m.radial / (m.time + 1.0).sqrt(),
            temperature=lambda t: 1.0 / (t + 1.0),
            rms=lambda i: math.sqrt(1 + sum(1.0 / (j // 2 + 1) for j in range(i))),
            forward="random walk",
            backward="power law in depth",
            note="attention logits shrink by ℓ, since queries and keys both read the scaled norm",
        )
