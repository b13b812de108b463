"""Post-Norm, as in the original Transformer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from normlab.roles import Role, xavier_std
from normlab.schemes.contract.blocks import Block
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.law import Law, Value, on_sphere, squared_radius
from normlab.schemes.contract.learnt import main_gains
from normlab.schemes.contract.parts import AddNorm, Step
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.contract.site import Site


@dataclass(frozen=True, kw_only=True)
class Post(Scheme):
    """
    Post-Norm: add the branch output, then normalise the sum.

    Formula    x ← N(x + F(x))
    Placement  x ─┬─ F ─┐
                  └─────+─ N ─ x'
    Init       base std, or Xavier (init)
    Source     Vaswani et al. 2017, arXiv 1706.03762
    Law        RMS = 1 at every depth; tokens merge at the exponential rate e^(−2t)
    Fails      needs warm-up and a low learning rate (at 125M stuck at 2e-3 in 2 of 2 runs, 10 % warm-up; at 6×384
               from 4e-3 on in 9 of 9, 20 %); in deep stacks tokens collapse and gradients vanish early in training
    """

    name = "post"
    aliases = ("post-ln", "post-norm", "postnorm", "postln", "bert")
    depth_rule = "no constant depends on the depth, and none is changed"

    init: Literal["base", "xavier"] = "base"
    """Standard deviation of matrices: the base, or √(2/(fan in + fan out))."""

    def sublayer(self, site: Site) -> Step:
        return Step(AddNorm(self.new_norm(site.dim), step=site.dt))

    def exit(self, bound: BoundScheme) -> nn.Module:
        return nn.Identity()

    def initial_std(self, role: Role, base: float, bound: BoundScheme) -> float:
        return base if self.init == "base" else xavier_std(role, base)

    def law(self, depth: int, blocks: Sequence[Block] = ()) -> Law:
        gain = Value("gain", 1.0).learnt(main_gains(blocks))
        return Law(
            speed=lambda m: torch.ones_like(m.radius),
            temperature=squared_radius(gain),
            values=(gain,),
            rms=on_sphere,
            forward="bounded",
            backward="the skip path shrinks by 1/√(1+σ²) per sublayer; vanishes once tokens have collapsed",
        )
