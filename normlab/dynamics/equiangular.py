"""The symmetric case: all pairs of tokens have the same cosine ρ and the same radius, with Q = K = V = 1.

Two scalar equations then hold the whole orbit of any law, and are the oracle that the full system is held against:

    ρ̇ = 2 e^{βρ} (1 − ρ)(1 + (n − 1)ρ) / (s Z),   Z = e^β + (n − 1) e^{βρ},   ṙ by the law
    ⟨θ,A⟩ = (e^β + (n − 1) ρ e^{βρ}) / Z
    ‖A‖²  = (e^{2β} + 2(n − 1) ρ e^{β(1+ρ)} + (n − 1)(1 + (n − 2)ρ) e^{2βρ}) / Z²
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from normlab.errors import NormLabError
from normlab.schemes.law import Law, Motion


@dataclass(frozen=True)
class Equiangular:
    """n tokens at inverse temperature β under one law; exponentials are taken relative to e^β, which cancels."""

    law: Law
    tokens: int
    beta: float

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise NormLabError(f"it takes two tokens to have an angle, got {self.tokens}")
        if self.law.reads_state:
            raise NormLabError("the symmetric case is known for laws that read directions; this one reads the state")

    def motion(self, time: Tensor, rho: Tensor, radius: Tensor) -> Motion:
        """What a law looks at, in the symmetric state."""
        beta = self.beta * self.law.temperature(time)
        others, weight = self.tokens - 1, torch.exp(beta * (rho - 1))
        total = 1 + others * weight
        radial = (1 + others * rho * weight) / total
        square = 1 + 2 * others * rho * weight + others * (1 + (self.tokens - 2) * rho) * weight.square()
        # P A = (e^{βρ}/Z) Σ_k (θ_k − ρ θ_j) over the others.
        tangent = weight / total * (others * (1 - rho) * (1 + others * rho)).clamp_min(0).sqrt()
        return Motion(time=time, radius=radius, attention=square.sqrt() / total, radial=radial, tangent=tangent)

    def __call__(self, time: Tensor, rho: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
        """(ρ̇, ṙ)."""
        motion = self.motion(time, rho, radius)
        assert self.law.speed is not None
        weight = torch.exp(self.beta * self.law.temperature(time) * (rho - 1))
        others = self.tokens - 1
        turn = 2 * weight * (1 - rho) * (1 + others * rho) / (1 + others * weight)
        return turn / self.law.speed(motion), self.law.radial(motion)

    def orbit(self, times: Tensor, *, rho: float = 0.0, radius: float = 1.0, tolerance: float = 1e-10) -> Tensor:
        """(time, 2): ρ and r at each time, by scipy."""
        from scipy.integrate import solve_ivp

        def slope(time: float, state: object) -> list[float]:
            rho_now, radius_now = torch.as_tensor(state, dtype=torch.float64)
            return [float(x) for x in self(torch.tensor(time, dtype=torch.float64), rho_now, radius_now)]

        span = (0.0, float(times[-1]))
        found = solve_ivp(
            slope, span, [rho, radius], method="DOP853", t_eval=times.tolist(), rtol=tolerance, atol=tolerance
        )
        return torch.as_tensor(found.y.T)
