"""GeoNorm: residual steps along geodesics of the sphere."""

# torch annotates some tensor functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.geometry import project
from normlab.kernels.geodesic import NO_STATE, SMOOTH, Order, angle_rate, geodesic_pair, geodesic_step
from normlab.norms import widen
from normlab.schemes.contract.blocks import Block
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.law import Law, Motion, Value, on_sphere
from normlab.schemes.contract.learnt import first_steps, mean
from normlab.schemes.contract.parts import Step, ToSphere, WriteTwice
from normlab.schemes.contract.scales import ConstantScale
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.contract.site import Site


@dataclass(frozen=True, kw_only=True)
class GeoNorm(Scheme):
    """
    GeoNorm: move along the great circle in the update's direction, by an angle that decays with depth.

    Formula    x ← cos θ·x + sin θ·‖x‖·v/‖v‖
               v = g − (⟨x,g⟩/‖x‖²)·x, the component of g = F(x) orthogonal to x
               θ = min(δ_k·(a·min(t, c) + b), c) with t = ‖v‖/‖x‖, c = π/4, δ_k = 1/(k+1)
               order="decay-first": θ = min(a·min(δ_k·t, c) + b, c)
               the outer clamp only with second_clamp; for small t the offset is b·t/√(t² + 1e-6) in place of b
    Placement  x ─┬─ F ─ g ─┐
                  └─────── exp ─ x'
    Init       base std; a = 1, b = 0
    Source     arXiv 2601.22095 (2026). Its equations clamp the angle and then decay it: clamp-first, the default, with
               which the results of this project were made. Its summary reads "project, decay, exponential map", which
               suggests decay-first. The two differ if t > c: a late block then rotates by up to δ_k·c with clamp-first
               and by up to c with decay-first, where neither a nor b is decayed
    Law        ‖x_l‖ = ‖x₀‖ up to rounding; at a = 1, b = 0 each sublayer rotates by at most δ_k·c (decay-first: c);
               harmonic decay: tokens merge as t^(−2)
    Fails      without entry norm the embedding's radius is tiny and every angle is clamped; sqrt decay or none gets
               stuck at high learning rates; with harmonic decay deep blocks hardly change the state unless a grows
    """

    name = "geonorm"
    aliases = ("geo-norm", "geo", "geodesic")
    depth_rule = "its own δ_k = 1/(k+1), whose sum grows like ln L"

    step: float = 1.0
    """Factor α on the decay δ."""
    decay: Literal["harmonic", "sqrt", "linear", "none"] = "harmonic"
    """δ_k: 1/(k+1), 1/√(k+1), (L−k)/L, or 1; both sublayers of a block share it."""
    max_angle: float = math.pi / 4
    """Largest angle c, in (0, π]: a number, or text such as "pi/8"."""
    order: Order = "clamp-first"
    """clamp-first: clamp, learned map, decay, second clamp. decay-first: decay, clamp, learned map, second clamp."""
    second_clamp: bool = True
    """Clamp again at the end; without it the learned map may exceed the angle c."""
    learned: bool = True
    """Learn the map θ → a·θ + b of the clamped angle, two scalars per sublayer."""
    entry_norm: bool = True
    """Project the embedding onto the sphere of radius √d."""
    input_norm: bool = False
    """Normalise the input of branches; on that sphere this only adds a gain."""
    final_norm: bool = True
    """Normalise before the head; on that sphere this only adds a gain."""

    def check(self) -> None:
        if not 0.0 < self.max_angle <= math.pi:
            raise NormLabError(f"geonorm: max_angle must lie in (0, π], got {self.max_angle}; try π/4")
        if self.step <= 0.0:
            raise NormLabError(f"geonorm: step must be positive, got {self.step}")

    def decay_at(self, time: Any, horizon: float) -> Any:
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
        write = Geodesic(
            self.decay_at(site.time, site.horizon),
            self.max_angle,
            learned=self.learned,
            second_clamp=self.second_clamp,
            order=self.order,
            portion=site.dt,
        )
        return Step(write, read=self.new_norm(site.dim) if self.input_norm else None)

    def entry(self, bound: BoundScheme) -> nn.Module:
        return ToSphere(bound.dim) if self.entry_norm else nn.Identity()

    def exit(self, bound: BoundScheme) -> nn.Module:
        return self.new_norm(bound.dim) if self.final_norm else nn.Identity()

    def law(self, depth: int, blocks: Sequence[Block] = ()) -> Law:
        writes = [step.write for step in first_steps(blocks)] if self.learned else []
        a = Value("a", 1.0).learnt(mean(write.a) for write in writes)
        b = Value("b", 0.0).learnt(mean(write.b) for write in writes)
        return Law(
            speed=lambda m: self._divisor(m, depth, a(m.time), b(m.time)),
            values=(a, b),
            rms=on_sphere,
            forward="bounded",
            backward="bounded: the skip path is an isometry up to the curvature of the step",
            note="radius 1; below the clamp, at a = 1 and b = 0, it is Post-Norm with the time ∫δ",
        )

    def _divisor(self, m: Motion, depth: int, a: torch.Tensor | float, b: torch.Tensor | float) -> torch.Tensor:
        """The speed divisor t/θ: finite at t = 0, infinite if θ = 0."""
        over, decay = m.tangent / self.max_angle, self.decay_at(m.time, depth)
        offset = b * torch.rsqrt(m.tangent.square() + SMOOTH**2)
        if self.order == "decay-first":
            found = 1 / (a * torch.minimum(decay, 1 / over) + offset)
        else:
            wide = over.clamp_min(1.0)
            found = wide / decay / (a + offset * wide)
        # A negative angle is not clamped.
        return torch.where(found > 0, torch.maximum(found, over), found) if self.second_clamp else found


class Geodesic(WriteTwice):
    """Moves the state along the great circle in the update's direction; keeps its length."""

    keeps_norm = True

    def __init__(
        self, decay: float, max_angle: float, *, learned: bool, second_clamp: bool, order: Order, portion: float
    ):
        super().__init__()
        self.decay = ConstantScale(decay)
        self.max_angle, self.second_clamp, self.order, self.portion = max_angle, second_clamp, order, portion
        self.a = nn.Parameter(torch.empty(1, dtype=torch.float32)) if learned else None
        self.b = nn.Parameter(torch.empty(1, dtype=torch.float32)) if learned else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.a is not None and self.b is not None:
            nn.init.ones_(self.a)
            nn.init.zeros_(self.b)

    def forward(self, state: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return geodesic_step(state, update, **self._options(), kernels="reference")

    def write_twice(
        self, state: torch.Tensor, update: torch.Tensor, input_dtype: torch.dtype, kernels: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return geodesic_pair(state, update, **self._options(), input_dtype=input_dtype, kernels=kernels)

    def _options(self) -> dict[str, Any]:
        a, b = self._map()
        return {
            "factor": self.decay.tensor,
            "max_angle": self.max_angle,
            "a": a,
            "b": b,
            "second_clamp": self.second_clamp,
            "order": self.order,
            "portion": self.portion,
        }

    def _map(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return (None, None) if self.a is None or self.b is None else (widen(self.a), widen(self.b))

    @torch.no_grad()
    def clamped(self, state: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        x, v = widen(state), project(widen(state), widen(update))
        t, first = v.norm(dim=-1) / x.norm(dim=-1).clamp_min(NO_STATE), self.order == "decay-first"
        # As in the step, b fades in with t.
        angle = t * angle_rate(t.square(), self.decay.tensor, *self._map(), self.max_angle, first)
        inner = self.decay(t) if first else t
        return (inner > self.max_angle) | (self.second_clamp & (angle > self.max_angle))

    def rms_bound(self, state: float, update: float) -> float:
        return state
