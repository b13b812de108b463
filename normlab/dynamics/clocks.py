"""Clocks: other times in which the same orbit is integrated, so that long horizons cost few steps.

If t = t(τ), velocities are multiplied by t′(τ). In logarithmic time a tail t^−2 is an exponential, and a horizon of 10⁶
costs as many steps as one of 14.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Clock(Protocol):
    """A change of time."""

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
class Plain:
    """t = τ."""

    def time(self, tau: Tensor) -> Tensor:
        return tau

    def rate(self, tau: Tensor) -> Tensor:
        return tau.new_ones(tau.shape)

    def tau(self, time: float) -> float:
        return time


@dataclass(frozen=True)
class Logarithmic:
    """t = unit · (e^τ − 1): plain near zero, logarithmic beyond `unit`."""

    unit: float = 1.0

    def time(self, tau: Tensor) -> Tensor:
        return self.unit * tau.expm1()

    def rate(self, tau: Tensor) -> Tensor:
        return self.unit * tau.exp()

    def tau(self, time: float) -> float:
        return math.log1p(time / self.unit)
