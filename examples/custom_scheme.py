"""A scheme of your own with a learned parameter. Whatever NormLab does with its own schemes, it does with this one."""

import math
from dataclasses import dataclass

import torch

import normlab
from normlab.schemes import ConstantScale, Law, Scheme, Site, Step, Write


@dataclass(frozen=True, kw_only=True)
class Balanced(Scheme):
    """
    Balanced: a residual that keeps the variance of the stream: what a branch adds, the skip gives up.

    Formula    x ← cos φ·x + sin φ·N_out(F(N_in(x))), φ learned, sin φ = τ at initialisation
    Placement  x ─┬─ N_in ─ F ─ N_out ─ ·sin φ ─┐
                  └────────── ·cos φ ───────────+─ x'
    Init       base std
    Source     this file
    Law        RMS = 1 at every depth for independent branches
    Fails      the skip decays as (1−τ²)^(l/2): keep τ²·depth of order one
    """

    name = "balanced"
    zero_outputs = False  # N_out has no direction at zero

    tau: float = 0.5
    """Weight of what a branch adds at initialisation, in (0, 1)."""

    def sublayer(self, site: Site) -> Step:
        return Step(Blend(self.tau, site.dt), read=self.new_norm(site.dim), shape=self.new_norm(site.dim))

    def law(self, depth: int) -> Law:
        return Law(speed=None, rms=lambda i: 1.0, forward="bounded", backward="the skip decays as (1−τ²)^(l/2)")


class Blend(Write):
    def __init__(self, tau: float, dt: float):
        super().__init__()
        self.tau, self.dt = tau, ConstantScale(dt)  # dt: 1, or 1/m in a refined scheme of m such steps; angles add up
        self.angle = torch.nn.Parameter(torch.empty(1))  # one dimension: FSDP2 refuses scalars
        self.reset_parameters()

    def reset_parameters(self) -> None:  # gives it its value: what __init__ writes is lost on the meta device
        torch.nn.init.constant_(self.angle, math.asin(self.tau))

    def forward(self, state: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        angle = self.dt(self.angle)
        return (torch.cos(angle) * state + torch.sin(angle) * update).to(state.dtype)

    def rms_bound(self, state: float, update: float) -> float:
        angle = self.angle.item() * self.dt.value
        return abs(math.cos(angle)) * state + abs(math.sin(angle)) * update


if __name__ == "__main__":  # or: normlab compare --schemes pre "custom_scheme.py:Balanced(tau=0.3)"
    print("rules that it keeps:", *normlab.testing.check_scheme(Balanced(tau=0.3)))
