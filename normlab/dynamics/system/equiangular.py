"""Symmetric (equiangular) case: all pairs of tokens have the same cosine ρ and radius r, with Q = K = V = 1.

Two scalar ODEs then describe any law; the full system is tested against them:

    ρ̇ = 2 e^{βρ} (1 − ρ)(1 + (n − 1)ρ) / (s Z),   Z = e^β + (n − 1) e^{βρ},   ṙ by the law
    ⟨θ,A⟩ = (e^β + (n − 1) ρ e^{βρ}) / Z
    ‖A‖²  = (e^{2β} + 2(n − 1) ρ e^{β(1+ρ)} + (n − 1)(1 + (n − 2)ρ) e^{2βρ}) / Z²

Unnormalised attention has Z = n. For a law that reads the state, β is replaced by r²β and A by r A. The integrated
variable is log(1 − ρ), which keeps the precision of the tail, in the time log(1 + t), in which late times cost little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from normlab.dynamics.config import AttentionKind
from normlab.dynamics.system.integrators import ERROR, NODES, STAGES
from normlab.errors import NormLabError
from normlab.schemes.contract.law import Law, Motion

_MOST_STEPS = 100_000


class EquiangularState(NamedTuple):
    """State of the symmetric system."""

    gap: Tensor
    """log(1 − ρ)."""
    radius: Tensor


@dataclass(frozen=True)
class Equiangular:
    """The symmetric system of n tokens under one law, at one inverse temperature β or a batch of them."""

    law: Law
    tokens: int
    beta: float | Tensor
    kind: AttentionKind = "softmax"

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise NormLabError(f"it takes two tokens to have an angle, got {self.tokens}")
        if self.law.speed is None:
            raise NormLabError("this scheme states no speed; the symmetric case needs one")

    def motion(self, time: Tensor, rho: Tensor, radius: Tensor) -> Motion:
        """Inputs of the law (time, radius, ‖A‖, radial and tangential parts) in the symmetric state."""
        return self._motion(time, rho, radius, *self._weights(time, rho, radius))

    def _motion(self, time: Tensor, rho: Tensor, radius: Tensor, own: Tensor, weight: Tensor, total: Tensor) -> Motion:
        others = self.tokens - 1
        square = own**2 + 2 * others * rho * own * weight + others * (1 + (self.tokens - 2) * rho) * weight.square()
        # P A = (e^{βρ}/Z) Σ_k (θ_k − ρ θ_j) over the others.
        across = weight * (others * (1 - rho) * (1 + others * rho)).clamp_min(0).sqrt()
        return Motion(
            time=time,
            radius=radius,
            attention=square.sqrt() / total,
            radial=(own + others * rho * weight) / total,
            tangent=across / total,
        )

    def __call__(self, time: Tensor, rho: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        """Return (ρ̇, ṙ)."""
        slope = self._slope(time, EquiangularState(torch.log1p(-rho), radius))
        return -(1 - rho) * slope.gap, slope.radius

    def orbit(self, times: Tensor, *, rho: float = 0.0, radius: float = 1.0, tolerance: float = 1e-11) -> Tensor:
        """ρ and r at each time: (time, 2), or (time, 2, β) for several β."""
        path = self.path(times, rho=rho, radius=radius, tolerance=tolerance)
        return torch.stack([torch.stack([-state.gap.expm1(), state.radius]) for state in path])

    def path(
        self, times: Tensor, *, rho: float = 0.0, radius: float = 1.0, tolerance: float = 1e-11
    ) -> Iterator[EquiangularState]:
        """Yield the state at each time; times are increasing and start from zero."""
        beta = torch.as_tensor(self.beta, dtype=torch.float64)
        state = EquiangularState(torch.full_like(beta, math.log1p(-rho)), torch.full_like(beta, radius))
        now, step = 0.0, 0.01
        for time in times.tolist():
            for stop in [*(switch for switch in self.law.switches if now < switch < time), time]:
                state, step = self._reach(state, now, stop, step, tolerance)
                now = stop
                if stop in self.law.switches and self.law.resets_radius:
                    state = state._replace(radius=torch.ones_like(state.radius))
            yield state

    def _reach(
        self, state: EquiangularState, begin: float, end: float, step: float, tolerance: float
    ) -> tuple[EquiangularState, float]:
        """Return the state at `end` and the next step size."""
        tau, last, below = math.log1p(begin), math.log1p(end), math.nextafter(end, begin)

        def slope(tau: float, state: EquiangularState) -> EquiangularState:
            time = torch.full_like(state.gap, min(max(math.expm1(tau), begin), below))
            return EquiangularState(*((1 + time) * part for part in self._slope(time, state)))

        for _ in range(_MOST_STEPS):
            if tau >= last:
                return state, step
            taken = min(step, last - tau)
            ahead, error = _advance(slope, tau, state, taken)
            error = max(error / tolerance, 1e-10)
            grown = taken * min(max(0.9 * error**-0.2, 0.2), 5.0)
            if error <= 1.0:
                state, tau = ahead, last if taken == last - tau else tau + taken
                grown = max(grown, step) if tau == last else grown
            step = grown
        raise NormLabError(f"the symmetric case did not reach time {end:g}; is the law smooth?")

    def _slope(self, time: Tensor, state: EquiangularState) -> EquiangularState:
        rho = -state.gap.expm1()
        own, weight, total = self._weights(time, rho, state.radius)
        motion = self._motion(time, rho, state.radius, own, weight, total)
        assert self.law.speed is not None
        turn = 2 * weight * (1 + (self.tokens - 1) * rho) / total
        return EquiangularState(-turn / self.law.speed(motion), self.law.radial(motion))

    def _weights(self, time: Tensor, rho: Tensor, radius: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Unnormalised weight of a token on itself, on another token, and their normalisation."""
        beta = torch.as_tensor(self.beta, dtype=rho.dtype) * self.law.temperature(time)
        size = radius if self.law.reads_state else torch.ones_like(radius)
        beta = beta * size**2
        if self.kind == "unnormalised":
            return beta.exp(), torch.exp(beta * rho), self.tokens / size
        # A common factor e^β cancels.
        weight = torch.exp(beta * (rho - 1))
        return torch.ones_like(weight), weight, (1 + (self.tokens - 1) * weight) / size


def _advance(
    slope: Callable[[float, EquiangularState], EquiangularState], tau: float, state: EquiangularState, step: float
) -> tuple[EquiangularState, float]:
    """One Dormand-Prince step; return the new state and the error estimate."""
    slopes, ahead = [slope(tau, state)], state
    for node, row in zip(NODES, STAGES, strict=True):
        moved = _combined(row, slopes)
        ahead = EquiangularState(state.gap + step * moved.gap, state.radius + step * moved.radius)
        slopes.append(slope(tau + node * step, ahead))
    wrong = _combined(ERROR, slopes)
    error = step * float(torch.maximum(wrong.gap.abs(), (wrong.radius / ahead.radius).abs()).max())
    return ahead, error if math.isfinite(error) else math.inf


def _combined(weights: Sequence[float], slopes: Sequence[EquiangularState]) -> EquiangularState:
    """Σ_i w_i slope_i."""
    return EquiangularState(
        *(sum(w * part for w, part in zip(weights, parts, strict=True)) for parts in zip(*slopes, strict=True))  # type: ignore[arg-type]
    )
