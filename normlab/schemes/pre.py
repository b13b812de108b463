"""Pre-Norm, also in an equivalent form on the sphere that shows its effective step size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.norms import Norm, rms, widen
from normlab.roles import Role
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.law import Law
from normlab.schemes.contract.parts import Add, Step, Write
from normlab.schemes.contract.scales import factor
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.contract.site import Site


@dataclass(frozen=True, kw_only=True)
class Pre(Scheme):
    """
    Pre-Norm: normalise the input of each branch, add its output.

    Formula    x ← x + Δt · F(N(x))
    Placement  x ─┬─ N ─ F ─ ·Δt ─┐
                  └───────────────+─ x'
    Init       output projections ÷ √(2L) (depth_init), the rest at the base std
    Source     Xiong et al. 2020, arXiv 2002.04745; step Δt: arXiv 2510.09904
    Law        RMS(x_l) ≤ RMS(x₀) + Δt Σ Λ_k: ∝ √l at initialisation, ∝ l in the worst case with weights of the same
               size in every block; gradients follow a power law in depth
    Fails      deep blocks hardly change the direction of the large state; nothing bounds the Λ_k: weights that grow
               with depth make the state grow exponentially
    """

    name = "pre"
    aliases = ("pre-ln", "pre-norm", "prenorm", "preln", "gpt2")
    depth_transfer = "derived"
    depth_rule = (
        "branch outputs × L₀/L, initialisation as at L₀ (output projections ÷ √(2L₀)): CompleteP, arXiv 2505.01618"
    )

    step: float = 1.0
    """Residual step size Δt in (0, 1]; 0.1 keeps deep stacks near their input scale."""
    depth_init: bool = True
    """Divide output projections by √(2L) at initialisation, as GPT-2 does."""
    form: Literal["plain", "sphere"] = "plain"
    """sphere: the same function, with the state kept on the sphere and the step size Δt/RMS(x)."""

    def check(self) -> None:
        if not 0.0 < self.step <= 1.0:
            raise NormLabError(f"{self.name}: step must lie in (0, 1], got {self.step}; try 0.1")

    def sublayer(self, site: Site) -> Step:
        step = self.step * site.dt
        if self.form == "sphere":
            return Step(SphereAdd(step), read=SphereNorm(self.new_norm(site.dim)))
        return Step(Add(step), read=self.new_norm(site.dim))

    def entry(self, bound: BoundScheme) -> nn.Module:
        return SphereEntry() if self.form == "sphere" else nn.Identity()

    def exit(self, bound: BoundScheme) -> nn.Module:
        norm = self.new_norm(bound.dim)
        return SphereNorm(norm) if self.form == "sphere" else norm

    def hidden(self, state: torch.Tensor) -> torch.Tensor:
        return state[..., :-1] if self.form == "sphere" else state

    def initial_std(self, role: Role, base: float, bound: BoundScheme) -> float:
        return bound.output_std(role, base) if self.depth_init else base

    def law(self, depth: int) -> Law:
        return Law(
            speed=lambda m: m.radius / self.step,
            radial=lambda m: self.step * m.radial,
            rms=lambda i: math.sqrt(1 + self.step**2 * i),
            forward="linear",
            backward="power law in depth",
            note="linear with a slope that the weights set, and faster where weights grow with depth: training may make"
            " them do so, without bound if nothing decays them and up to e^depth if something does (arXiv 2510.09904);"
            " r ∝ t of the continuous law needs tied weights (independent ones give √t)",
        )


# The sphere form carries (y, ρ) with x = ρ·y and RMS(y) = 1 in one tensor of width D + 1. Both forms hold the same x,
# so every norm, its epsilon included, returns the same.


class SphereEntry(nn.Module):
    """x → (x / RMS(x), RMS(x))."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _join(x, torch.ones_like(x[..., :1]))

    def rms_bound(self, rms_in: float) -> float:
        return 1.0


class SphereNorm(nn.Module):
    """N(ρ·y)."""

    def __init__(self, norm: Norm):
        super().__init__()
        self.norm = norm

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        wide = widen(state)
        return self.norm(wide[..., :-1] * wide[..., -1:]).to(state.dtype)

    def rms_bound(self, rms_in: float) -> float:
        return self.norm.rms_bound(math.inf)


class SphereAdd(Write):
    """y ← (y + (Δt/ρ)·g) / RMS(…): Pre-Norm's step projected on the sphere, with its effective step size Δt/ρ."""

    def __init__(self, step: float):
        super().__init__()
        self.step = factor(step)

    def forward(self, state: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        wide = widen(state)
        y, radius = wide[..., :-1], wide[..., -1:]
        return _join(y + self.step(widen(update)) / radius, radius).to(state.dtype)

    def rms_bound(self, state: float, update: float) -> float:
        return 1.0


def _join(y: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    # A lower limit instead of an epsilon under the root: a zero state keeps a nonzero radius, all others are exact.
    size = rms(y).clamp_min(1e-12)
    return torch.cat([(widen(y) / size), radius * size], dim=-1).to(y.dtype)
