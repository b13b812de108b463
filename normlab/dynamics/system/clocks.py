"""Clocks: changes of the time variable of an integrator, so that late end times take few steps.

With t = t(τ), velocities are multiplied by t′(τ). In logarithmic time a tail t^−2 becomes an exponential, and an end
time of 10⁶ takes as many steps as 14. If the divisor s is the same for all tokens, the trajectory is Post-Norm's in
the time ∫ dt/s: see `CommonSpeedClock`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from normlab.errors import NormLabError
from normlab.schemes.contract.law import Law, Motion


class Clock(Protocol):
    """A change of the time variable, t = t(τ)."""

    def time(self, tau: Tensor) -> Tensor:
        """t(τ)."""
        ...

    def rate(self, tau: Tensor) -> Tensor:
        """t′(τ)."""
        ...

    def tau(self, time: float) -> float:
        """τ(t)."""
        ...


@dataclass(frozen=True)
class PlainClock:
    """t = τ."""

    def time(self, tau: Tensor) -> Tensor:
        return tau

    def rate(self, tau: Tensor) -> Tensor:
        return tau.new_ones(tau.shape)

    def tau(self, time: float) -> float:
        return time


@dataclass(frozen=True)
class LogClock:
    """t = unit · (e^τ − 1): linear near zero, logarithmic beyond `unit`."""

    unit: float = 1.0

    def time(self, tau: Tensor) -> Tensor:
        return self.unit * tau.expm1()

    def rate(self, tau: Tensor) -> Tensor:
        return self.unit * tau.exp()

    def tau(self, time: float) -> float:
        return math.log1p(time / self.unit)

    def __post_init__(self) -> None:
        if not self.unit > 0:
            raise NormLabError(f"a clock's unit is positive, got {self.unit}; try 1")


_KNOTS = 4096
"""Knots of the table of t(τ); the interpolation error falls with the fourth power of their number."""


@dataclass(frozen=True)
class CommonSpeedClock:
    """τ = ∫ dt/s(t), for a law whose s is the same for all tokens: in this time it equals Post-Norm."""

    law: Law
    horizon: float
    """Largest t of the table."""
    longest: float = 1.0
    """Largest ‖A‖ that occurs: 1 for the mean of unit vectors. A clamp that nothing reaches makes no difference."""

    def __post_init__(self) -> None:
        if not self.horizon > 0:
            raise NormLabError(f"a horizon is positive, got {self.horizon}; try 10")
        if self.law.speed is None or self.law.reads_state or not self._is_common():
            raise NormLabError(
                "this law's speed is not common to all tokens, so no change of time makes it Post-Norm's"
            )

    def time(self, tau: Tensor) -> Tensor:
        times, taus = self._table
        wanted = tau.double().cpu().contiguous()
        left = (torch.searchsorted(taus, wanted, right=True) - 1).clamp(0, _KNOTS - 2)
        found = _hermite(wanted, taus[left], taus[left + 1], times[left], times[left + 1], self._speed)
        return found.to(tau)

    def rate(self, tau: Tensor) -> Tensor:
        return self._speed(self.time(tau))

    def tau(self, time: float) -> float:
        return float(self._until(torch.tensor([float(time)], dtype=torch.float64)))

    def _is_common(self) -> bool:
        """Whether s depends on time alone and β is constant, tried with a small and the largest ‖A‖."""
        times = torch.expm1(torch.linspace(0.0, math.log1p(self.horizon), 64, dtype=torch.float64)[:-1])
        tokens = ((1.0, 0.2, 0.1, 0.17), (3.0, self.longest, 0.0, self.longest))
        one, another = (self._speed(times, *looks) for looks in tokens)
        return torch.equal(one, another) and torch.equal(self.law.temperature(times), torch.ones_like(times))

    def _speed(
        self, time: Tensor, radius: float = 1.0, attention: float = 1.0, radial: float = 1.0, tangent: float = 0.0
    ) -> Tensor:
        assert self.law.speed is not None
        looks = (torch.full_like(time, value) for value in (radius, attention, radial, tangent))
        return self.law.speed(Motion(time, *looks))

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        times = torch.expm1(torch.linspace(0.0, math.log1p(self.horizon), _KNOTS, dtype=torch.float64))
        return times, self._until(times)

    def _until(self, times: Tensor) -> Tensor:
        """∫₀ᵗ du/s(u), by Gauss-Legendre quadrature in log(1 + u)."""
        nodes, weights = (torch.from_numpy(array) for array in np.polynomial.legendre.leggauss(48))
        half = times.log1p().unsqueeze(-1) / 2
        u = torch.expm1(half * (1 + nodes))
        return (half * weights * (1 + u) / self._speed(u)).sum(-1)


def _hermite(tau: Tensor, tau0: Tensor, tau1: Tensor, t0: Tensor, t1: Tensor, slope) -> Tensor:
    """Cubic Hermite interpolation with the values t and the slopes t′ = s(t) at both ends."""
    width = tau1 - tau0
    x = (tau - tau0) / width
    ends = (1 + 2 * x) * (1 - x) ** 2 * t0 + x**2 * (3 - 2 * x) * t1
    return ends + width * x * (1 - x) * ((1 - x) * slope(t0) - x * slope(t1))
