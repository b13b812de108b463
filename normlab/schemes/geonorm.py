"""GeoNorm: the residual step as a geodesic step on the sphere."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.geometry import project
from normlab.kernels import backends
from normlab.kernels.geodesic import NO_STATE, geodesic_pair, geodesic_step
from normlab.norms import widen
from normlab.schemes.base import Bound, Scheme, Site
from normlab.schemes.law import Law, on_sphere
from normlab.schemes.parts import Constant, Step, ToSphere, Write, see


@dataclass(frozen=True, kw_only=True)
class GeoNorm(Scheme):
    """
    GeoNorm: walk along the great circle that the update points at, by an angle that decays with depth.

    Formula    x ← cos θ·x + sin θ·‖x‖·v/‖v‖
               v = g − (⟨x,g⟩/‖x‖²)·x the part of g = F(x) across x
               θ = min(δ_k·(a·min(‖v‖/‖x‖, c) + b), c), c = π/4, δ_k = 1/(k+1)
    Placement  x ─┬─ F ─ g ─┐
                  └─────── exp ─ x'
    Init       base std; a = 1, b = 0
    Source     arXiv 2601.22095 (2026)
    Law        ‖x_l‖ = ‖x₀‖ to rounding; each sublayer turns by at most δ_k·c; harmonic decay: tokens merge as t^(−2)
    Fails      without entry norm the embedding sets a tiny radius and saturates the clamp; sqrt decay or none gets
               stuck at high rates; with harmonic decay deep blocks are almost frozen unless a grows
    """

    name = "geonorm"
    aliases = ("geo-norm", "geo", "geodesic")

    step: float = 1.0
    """Factor α on the decay."""
    decay: Literal["harmonic", "sqrt", "linear", "none"] = "harmonic"
    """δ_k: 1/(k+1), 1/√(k+1), (L−k)/L, or 1; both sublayers of a block share it."""
    max_angle: float = math.pi / 4
    """Clamp c on the angle, in (0, π]."""
    second_clamp: bool = True
    """Clamp again after the learned map and the decay."""
    learned: bool = True
    """Learn the angle map θ → a·θ + b, one pair of scalars per sublayer."""
    entry_norm: bool = True
    """Put the embedding on the sphere of radius √d."""
    input_norm: bool = False
    """Normalise what a branch reads; changes nothing on that sphere beyond the gain."""
    final_norm: bool = True
    """Normalise (in effect: apply a gain) before the head."""

    def check(self) -> None:
        if not 0.0 < self.max_angle <= math.pi:
            raise NormLabError(f"geonorm: max_angle must lie in (0, π], got {self.max_angle}; try π/4")
        if self.step <= 0.0:
            raise NormLabError(f"geonorm: step must be positive, got {self.step}")

    def decay_at(self, time, horizon: float):
        """δ at a depth in blocks, for a number or a tensor."""
        match self.decay:
            case "harmonic":
                return self.step / (time + 1)
            case "sqrt":
                return self.step / (time + 1) ** 0.5
            case "linear":
                return self.step * (1 - time / horizon)
            case _:
                return self.step + 0 * time

    def sublayer(self, site: Site) -> Step:
        decay = self.decay_at(site.time, site.horizon) * site.dt
        write = Geodesic(decay, self.max_angle, learned=self.learned, second_clamp=self.second_clamp)
        return Step(write, read=self.new_norm(site.dim) if self.input_norm else None)

    def entry(self, bound: Bound) -> nn.Module:
        return ToSphere(bound.dim) if self.entry_norm else nn.Identity()

    def exit(self, bound: Bound) -> nn.Module:
        return self.new_norm(bound.dim) if self.final_norm else nn.Identity()

    def law(self, depth: int) -> Law:
        return Law(
            speed=lambda m: torch.clamp_min(m.tangent / self.max_angle, 1.0) / self.decay_at(m.time, depth),
            rms=on_sphere,
            forward="bounded",
            backward="bounded: the skip path is an isometry up to the curvature of the step",
            note="radius one, a = 1 and b = 0; below the clamp it is Post-Norm read at the time ∫δ",
        )


class Geodesic(Write):
    """The step along the great circle."""

    keeps_norm = True

    def __init__(self, decay: float, max_angle: float, *, learned: bool, second_clamp: bool):
        super().__init__()
        self.decay = Constant(decay)
        self.max_angle, self.second_clamp = max_angle, second_clamp
        self.a = nn.Parameter(torch.empty(1, dtype=torch.float32)) if learned else None
        self.b = nn.Parameter(torch.empty(1, dtype=torch.float32)) if learned else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.a is not None and self.b is not None:
            nn.init.ones_(self.a)
            nn.init.zeros_(self.b)

    def forward(self, state: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return geodesic_step(state, update, **self._options(), kernels="reference")

    def settle(
        self, state: torch.Tensor, update: torch.Tensor, shape: nn.Module, read: nn.Module, kernels: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if backends.choose(kernels, state) != "triton" or not isinstance(shape, nn.Identity):
            return super().settle(state, update, shape, read, kernels)
        state, seen = geodesic_pair(state, update, **self._options(), kernels=kernels)
        return (state, seen) if isinstance(read, nn.Identity) else see(state, read, kernels)

    def _options(self) -> dict[str, Any]:
        a, b = (None, None) if self.a is None or self.b is None else (widen(self.a), widen(self.b))
        return {
            "factor": self.decay.tensor,
            "max_angle": self.max_angle,
            "a": a,
            "b": b,
            "second_clamp": self.second_clamp,
        }

    @torch.no_grad()
    def clamped(self, state: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        x, v = widen(state), project(widen(state), widen(update))
        turn = angle = v.norm(dim=-1) / x.norm(dim=-1).clamp_min(NO_STATE)
        if self.a is not None and self.b is not None:
            angle = widen(self.a) * angle.clamp_max(self.max_angle) + widen(self.b)
        return (turn > self.max_angle) | (self.second_clamp & (self.decay(angle) > self.max_angle))

    def bound(self, state: float, update: float) -> float:
        return state
