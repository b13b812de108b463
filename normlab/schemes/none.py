"""No normalisation: a plain residual network, as a control."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.law import Law
from normlab.schemes.contract.parts import Add, Step
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.contract.site import Site


@dataclass(frozen=True, kw_only=True)
class NoNorm(Scheme):
    """
    None: a plain residual, the control experiment.

    Formula    x ← x + F(x)
    Placement  x ─┬─ F ─┐
                  └─────+─ x'
    Init       base std
    Source     He et al. 2015, arXiv 1512.03385, without its norms
    Law        RMS ∝ 2^(l/2) at initialisation for variance-preserving branches: exponential in depth
    Fails      as expected of a control: activations explode from about a dozen blocks on
    """

    name = "none"
    aliases = ("no-norm", "nonorm", "plain")
    depth_rule = "no constant is changed: a branch that reads no norm can grow faster than the state at any step size"

    def sublayer(self, site: Site) -> Step:
        return Step(Add(site.dt))

    def exit(self, bound: BoundScheme) -> nn.Module:
        return nn.Identity()

    def law(self, depth: int) -> Law:
        return Law(
            speed=lambda m: m.radius,
            radial=lambda m: m.radial,
            reads_state=True,
            rms=lambda i: math.sqrt(2.0**i),
            forward="exponential",
            backward="exponential",
        )
