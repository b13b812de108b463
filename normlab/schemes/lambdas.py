"""Residual scalars: before each block the state is scaled, and the embedding is added again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.norms import Norm, widen
from normlab.roles import Role
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.bounds import BranchBound, rms_bound_of
from normlab.schemes.contract.law import Growth, Law
from normlab.schemes.contract.parts import Step, Write
from normlab.schemes.contract.scales import factor
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.contract.site import Site
from normlab.schemes.contract.streams import FirstStreamRead


@dataclass(frozen=True, kw_only=True)
class Lambdas(Scheme):
    """
    Residual scalars: Pre-Norm whose blocks begin with a learned sum of the state and the embedding.

    Formula    x ← λ_r·x + λ_0·x₀ before each block, then x ← x + F(N(x)) twice
               x₀ = N(embedding); λ_r, λ_0: one learned number each a block
    Placement  x ── ·λ_r ─+─┬─ N ─ F ─┐
               x₀ ─ ·λ_0 ─┘ └─────────+─ x'
    Init       λ_r from 1.15 in the first block to 1.05 in the last, λ_0 from 0.20 to 0.05; outputs ÷ √(2L) as Pre-Norm
               learning rate of λ_0 × 100, of λ_r × 1; neither decays (nanochat: λ_r by 0.05)
    Source     nanochat, without its x − 0.2·x_mid at the exit; modded-nanogpt
    Law        Pre-Norm's steps on a state that grows by λ_r a block: 1.10^L at initialisation
    Fails      the state grows exponentially (× 6, 21, 219 at 12, 24, 48 blocks): bf16 resolves updates ever less
    """

    name = "lambdas"
    aliases = ("x0-lambdas", "residual-lambdas", "residual-scalars")
    variants = MappingProxyType({"nanochat": {"gain": "none", "decay_r": 0.05}})
    topologies = ("serial",)
    depth_rule = "its own λ over the depth, output projections ÷ √(2L); no constant is changed"

    first_r: float = 1.15
    """Initial λ_r of the first block; between first and last block λ_r is linear."""
    last_r: float = 1.05
    """Initial λ_r of the last block."""
    first_0: float = 0.20
    """Initial λ_0 of the first block; linear in between."""
    last_0: float = 0.05
    """Initial λ_0 of the last block."""
    lr_r: float = 1.0
    """Multiplier on the learning rate of λ_r."""
    lr_0: float = 100.0
    """Multiplier on the learning rate of λ_0."""
    decay_r: float = 0.0
    """Weight decay of λ_r, toward zero, whatever that of the matrices; off where theirs is off."""
    entry_norm: bool = True
    """Normalise the embedding: x₀ has RMS 1."""
    depth_init: bool = True
    """Divide output projections by √(2L) at initialisation, as Pre-Norm does."""

    def check(self) -> None:
        if self.lr_r <= 0.0 or self.lr_0 <= 0.0:
            raise NormLabError(f"lambdas: lr_r and lr_0 must be positive, got {self.lr_r} and {self.lr_0}; try 1.0")
        if self.decay_r < 0.0:
            raise NormLabError(f"lambdas: decay_r must not be negative, got {self.decay_r}; try 0.05")

    @property
    def streams(self) -> int:
        return 2

    def starts(self, block: float, depth: float) -> tuple[float, float]:
        """(λ_r, λ_0) of a block at initialisation."""
        part = min(block / (depth - 1), 1.0) if depth > 1 else 0.0
        return self.first_r + part * (self.last_r - self.first_r), self.first_0 + part * (self.last_0 - self.first_0)

    def sublayer(self, site: Site) -> Step:
        norm = self.new_norm(site.dim)
        if site.branch > 0:
            return Step(StateWrite(site.dt), read=FirstStreamRead(norm))
        return LambdaStep(StateWrite(site.dt), LambdaRead(norm, *self.starts(site.time, site.horizon), site.dt))

    def entry(self, bound: BoundScheme) -> nn.Module:
        return WithEmbedding(self.new_norm(bound.dim) if self.entry_norm else nn.Identity())

    def exit(self, bound: BoundScheme) -> nn.Module:
        return FirstStreamRead(self.new_norm(bound.dim))

    def hidden(self, state: torch.Tensor) -> torch.Tensor:
        return state[..., 0, :]

    def initial_std(self, role: Role, base: float, bound: BoundScheme) -> float:
        return bound.output_std(role, base) if self.depth_init else base

    def lr_scale(self, role: Role) -> float:
        return {"lambda_r": self.lr_r, "lambda_0": self.lr_0}.get(_last_name(role), 1.0)

    def weight_decay(self, role: Role, base: float) -> float:
        if _last_name(role) == "lambda_r":
            return self.decay_r if base else 0.0
        return super().weight_decay(role, base)

    def law(self, depth: int) -> Law:
        return Law(
            speed=None,
            rms=lambda i: math.sqrt(sum(_sizes(self, depth, i))),
            forward=self._growth(depth),
            backward="the skip grows by λ_r a block",
            note="no flow: the embedding pulls on every token, and a law of directions does not know it",
        )

    def _growth(self, depth: int) -> Growth:
        total = sum(math.log(abs(self.starts(k, depth)[0]) or 1e-300) for k in range(depth))
        return "linear" if abs(total) < 1e-9 else "exponential" if total > 0 else "bounded"


def _last_name(role: Role) -> str:
    return role.name.rpartition(".")[2]


def _sizes(scheme: Lambdas, depth: int, sublayers: int) -> Iterator[float]:
    """Squared sizes of the state's parts after some sublayers: along x₀, and across, where branches write."""
    along, across = 1.0, 0.0
    for i in range(sublayers):
        if i % 2 == 0:
            keep, source = scheme.starts(i // 2, depth)
            along, across = keep * along + source, keep**2 * across
        across += 1.0
    yield along**2
    yield across


class WithEmbedding(nn.Module):
    """x → (N(x), N(x)), stacked before the last dimension: the state, and the embedding that is added again."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return torch.stack([x, x], dim=-2)

    def rms_bound(self, rms_in: float) -> float:
        return rms_bound_of(self.norm, rms_in)


class LambdaRead(nn.Module):
    """(x, x₀) → (N(y), y) with y = λ_r·x + λ_0·x₀, which the write updates; a refined step goes the part dt to y."""

    def __init__(self, norm: Norm, start_r: float, start_0: float, dt: float):
        super().__init__()
        self.norm, self.start_r, self.start_0, self.part, self.dt = norm, start_r, start_0, dt, factor(dt)
        self.lambda_r, self.lambda_0 = (nn.Parameter(torch.empty(1, dtype=torch.float32)) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.lambda_r, self.start_r)
        nn.init.constant_(self.lambda_0, self.start_0)

    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """λ_r and λ_0; of a refined step 1 + dt·(λ_r − 1) and dt·λ_0."""
        keep, source = widen(self.lambda_r), widen(self.lambda_0)
        return (keep, source) if self.part == 1.0 else (1.0 + self.dt(keep - 1.0), self.dt(source))

    def forward(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, embedding = widen(state).unbind(-2)
        keep, source = self.values()
        y = (keep * x + source * embedding).to(state.dtype)
        return self.norm(y), y

    def sum_bound(self, rms_in: float) -> float:
        """Largest RMS of y if neither x nor x₀ exceeds `rms_in`."""
        return sum(abs(float(value.detach())) for value in self.values()) * rms_in

    def rms_bound(self, rms_in: float) -> float:
        return self.norm.rms_bound(self.sum_bound(rms_in))


class StateWrite(Write):
    """(x, x₀) → (x + dt·f, x₀), from the y that the block's first read has made in place of x."""

    def __init__(self, dt: float):
        super().__init__()
        self.part, self.dt = dt, factor(dt)

    def forward(self, state: torch.Tensor, update: torch.Tensor, *carry: torch.Tensor) -> torch.Tensor:
        x, embedding = state.unbind(-2)
        x = widen(carry[0] if carry else x) + self.dt(widen(update))
        return torch.stack([x.to(state.dtype), embedding], dim=-2)

    def rms_bound(self, state: float, update: float) -> float:
        return state + self.part * update


class LambdaStep(Step):
    """The first step of a block, whose read makes the state that its write updates."""

    def __init__(self, write: StateWrite, read: LambdaRead):
        super().__init__(write, read=read)

    def rms_bound(self, state: float, branch: BranchBound) -> float:
        """Of the larger of x and x₀, which stays."""
        return max(state, self.write.rms_bound(self.read.sum_bound(state), self.update_bound(state, branch)))  # type: ignore
