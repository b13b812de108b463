"""A scheme of your own, outside the package. Whatever NormLab does with its own schemes, it does with this one."""

import math
from dataclasses import dataclass

import torch

import normlab
from normlab.schemes import Constant, Law, Scheme, Site, Step, Write


@dataclass(frozen=True, kw_only=True)
class Balanced(Scheme):
    """
    Balanced: a residual that keeps the variance of the stream: what a branch adds, the skip gives up.

    Formula    x ← √(1−τ²)·x + τ·N_out(F(N_in(x)))
    Placement  x ─┬─ N_in ─ F ─ N_out ─ ·τ ─┐
                  └──────── ·√(1−τ²) ───────+─ x'
    Init       base std
    Source     this file
    Law        RMS = 1 at every depth for independent branches
    Fails      the skip decays as (1−τ²)^(l/2): keep τ²·depth of order one
    """

    name = "balanced"
    zero_outputs = False  # N_out has no direction at zero

    tau: float = 0.5
    """Weight of what a branch adds, in (0, 1)."""

    def sublayer(self, site: Site) -> Step:
        # site.dt is 1, and 1/m in a refined scheme, which takes m such steps: angles add up.
        write = Blend(math.asin(self.tau) * site.dt)
        return Step(write, read=self.new_norm(site.dim), shape=self.new_norm(site.dim))

    def law(self, depth: int) -> Law:
        return Law(speed=None, rms=lambda i: 1.0, forward="bounded", backward="the skip decays as (1−τ²)^(l/2)")


class Blend(Write):
    def __init__(self, angle: float):
        super().__init__()
        self.keep, self.take = Constant(math.cos(angle)), Constant(math.sin(angle))

    def forward(self, state: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return (self.keep(state) + self.take(update)).to(state.dtype)

    def bound(self, state: float, update: float) -> float:
        return self.keep.bound(state) + self.take.bound(update)


if __name__ == "__main__":
    model = normlab.Decoder(normlab.DecoderConfig.preset("tiny", scheme=Balanced(tau=0.3)))
    tokens = torch.randint(0, 256, (4, 64))
    print(f"loss of an untrained decoder: {model.loss(tokens[:, :-1], tokens[:, 1:]).item():.3f} (ln 256 = 5.545)")
    print("certified RMS after each block:", [round(bound, 2) for bound in model.stack.certificate()])
