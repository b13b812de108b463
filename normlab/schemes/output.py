"""Output-norm: normalise the output of each branch, as OLMo 2 does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from normlab.schemes.contract.blocks import Block
from normlab.schemes.contract.law import Law, Value
from normlab.schemes.contract.learnt import branch_factors
from normlab.schemes.contract.parts import Add, Step
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.contract.site import Site


@dataclass(frozen=True, kw_only=True)
class Output(Scheme):
    """
    Output-norm: normalise the output of each branch and nothing else.

    Formula    x ← x + N(F(x))
    Placement  x ─┬─ F ─ N ─┐
                  └─────────+─ x'
    Init       base std
    Source     OLMo 2, arXiv 2501.00656 (with qk_norm="flat"); Swin v2, arXiv 2111.09883
    Law        RMS(x_l) ≤ RMS(x₀) + Σ max|γ|; ∝ √l at initialisation
    Fails      branches read the state without a norm: attention logits grow with it unless qk_norm is on
    """

    name = "output"
    aliases = ("output-norm", "outputnorm", "res-post-norm", "swin-v2")
    variants = MappingProxyType({"olmo2": {"qk_norm": "flat"}, "olmo-2": {"qk_norm": "flat"}})
    zero_outputs = False
    depth_rule = "no constant is changed: branches read the state itself, whose initial size depends on their number"

    def sublayer(self, site: Site) -> Step:
        return Step(Add(site.dt), shape=self.new_norm(site.dim))

    def law(self, depth: int, blocks: Sequence[Block] = ()) -> Law:
        gain = Value("gain", 1.0).learnt(branch_factors(blocks))
        return Law(
            speed=lambda m: m.radius * m.attention / gain(m.time),
            radial=lambda m: gain(m.time) * m.radial / m.attention,
            values=(gain,),
            reads_state=True,
            rms=lambda i: math.sqrt(1 + i),
            forward="linear",
            backward="power law in depth, independent of the size of the output projections",
        )
