"""LayerScale; ReZero is its scalar variant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from normlab.schemes.contract.blocks import Block
from normlab.schemes.contract.law import Law, Value
from normlab.schemes.contract.learnt import branch_factors
from normlab.schemes.contract.parts import Add, Step
from normlab.schemes.contract.scales import LearnedScale
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.contract.site import Site


@dataclass(frozen=True, kw_only=True)
class LayerScale(Scheme):
    """
    LayerScale: Pre-Norm with a learned factor per channel on every branch output, initially small.

    Formula    x ← x + γ ⊙ F(N(x))
    Placement  x ─┬─ N ─ F ─ ⊙γ ─┐
                  └──────────────+─ x'
    Init       base std; γ = 0.1 (CaiT: 1e-5 at 24 blocks, 1e-6 at 36)
    Source     Touvron et al. 2021, arXiv 2103.17239; ReZero, arXiv 2003.04887 (gamma=0, scalar=True)
    Law        RMS √(1 + γ²·l) at initialisation; as Pre-Norm once γ has grown
    Fails      γ = 0: in the first step only γ receives a gradient; weight decay on γ drives branch outputs to zero
    """

    name = "layerscale"
    aliases = ("layer-scale", "cait")
    variants = MappingProxyType({"rezero": {"gamma": 0.0, "scalar": True}})
    depth_transfer = "derived"
    depth_rule = "branch outputs × L₀/L, as CompleteP; γ starts and learns as at L₀"

    gamma: float = 0.1
    """Initial value of γ."""
    scalar: bool = False
    """One scalar per sublayer instead of a vector."""

    def sublayer(self, site: Site) -> Step:
        gamma = LearnedScale(1 if self.scalar else site.dim, self.gamma)
        return Step(Add(site.dt), read=self.new_norm(site.dim), shape=gamma)

    def law(self, depth: int, blocks: Sequence[Block] = ()) -> Law:
        gamma = Value("γ", self.gamma).learnt(branch_factors(blocks))
        return Law(
            speed=lambda m: m.radius / gamma(m.time),
            radial=lambda m: gamma(m.time) * m.radial,
            values=(gamma,),
            rms=lambda i: math.sqrt(1 + self.gamma**2 * i),
            forward="linear",
            backward="power law in depth, flat while γ is small",
        )
