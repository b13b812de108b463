"""Small systems of tokens, and the full system by scipy: written from the equations, not from the code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp

from normlab.dynamics.system import laws
from normlab.dynamics.system.attention import ParticleAttention
from normlab.dynamics.system.flow import Flow, ParticleState, unit
from normlab.dynamics.system.integrators import DormandPrince

TABLE = ("post", "pre", "mix", "peri", "ngpt(alpha=1.0)", "sqrt")
"""The rows of the paper's table; nGPT with its own α as well, where that matters."""


def start(tokens: Any, radius: float = 1.0) -> ParticleState:
    """Tokens (n, d) or (S, n, d) at time zero."""
    theta = unit(torch.as_tensor(tokens))
    theta = theta.unsqueeze(0) if theta.ndim == 2 else theta
    return ParticleState(theta, theta.new_full(theta.shape[:2], radius), theta.new_zeros(len(theta)))


def uniform(n: int, d: int, *, systems: int = 1, seed: int = 0, radius: float = 1.0) -> ParticleState:
    draw = torch.Generator(device="cpu").manual_seed(seed)
    return start(torch.randn(systems, n, d, generator=draw, dtype=torch.float64, device="cpu"), radius)


def clustered(n: int, d: int, spread: float = 0.1, *, radius: float = 1.0) -> ParticleState:
    noise = uniform(n, d, seed=1).theta
    return start(torch.eye(d, dtype=torch.float64)[0] + spread * noise, radius)


def flow(spec: Any, beta: float = 1.0, *, depth: int = 4, **attention: Any) -> Flow:
    return Flow(
        laws.find_law(spec, depth), ParticleAttention(beta=torch.tensor([beta], dtype=torch.float64), **attention)
    )


def follow(
    system: Flow, begin: ParticleState, *times: float, tolerance: float = 1e-11, **options: Any
) -> list[ParticleState]:
    return list(DormandPrince(tolerance=tolerance, **options).orbit(system, begin, times))


def variance(state: ParticleState) -> float:
    """Mean ‖θ − θ̄‖² of the first system."""
    return float((state.theta[0] - state.theta[0].mean(0)).square().sum(-1).mean())


Divisor = Callable[..., tuple[np.ndarray, np.ndarray]]
"""(t, r, ‖A‖, ⟨θ,A⟩) → (s, ṙ)."""

ORACLES: dict[str, Divisor] = {
    "post": lambda t, r, size, radial: (np.ones_like(r), 0 * r),
    "pre": lambda t, r, size, radial: (r, radial),
    # A quarter of four blocks.
    "mix": lambda t, r, size, radial: (np.ones_like(r), 0 * r) if t < 1 else (r, radial),
    "peri": lambda t, r, size, radial: (r * size, radial / size),
    "ngpt(alpha=1.0)": lambda t, r, size, radial: (size, 0 * r),
    "ngpt": lambda t, r, size, radial: (size / 0.05, 0 * r),
    "sqrt": lambda t, r, size, radial: (np.full_like(r, np.sqrt(t + 1)), 0 * r),
}


def by_scipy(
    oracle: Divisor, begin: ParticleState, beta: float, time: float, *, pauses: Sequence[float] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """(θ, r) of the first system at a time, in the ambient space and with numpy alone."""
    theta, radius = begin.theta[0].numpy(), begin.radius[0].numpy()
    n, d = theta.shape

    def slope(t: float, y: np.ndarray) -> np.ndarray:
        theta, radius = y[: n * d].reshape(n, d), y[n * d :]
        scores = beta * theta @ theta.T
        weights = np.exp(scores - scores.max(1, keepdims=True))
        pull = weights / weights.sum(1, keepdims=True) @ theta
        radial = (pull * theta).sum(1)
        s, growth = oracle(min(t, below), radius, np.linalg.norm(pull, axis=1), radial)
        turn = (pull - radial[:, None] * theta) / s[:, None]
        return np.concatenate([turn.ravel(), growth])

    y, now = np.concatenate([theta.ravel(), radius]), 0.0
    for stop in (*pauses, time):
        below = np.nextafter(stop, now)
        y = solve_ivp(slope, (now, stop), y, method="DOP853", rtol=1e-12, atol=1e-13).y[:, -1]
        now = stop
    return y[: n * d].reshape(n, d), y[n * d :]
