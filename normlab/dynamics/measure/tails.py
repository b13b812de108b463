"""Predict the late-time decay of the variance (the tail) from a scheme's law, without a simulation.

With V = 1 and tokens close together, A_j = θ_j + O(distance), and its tangential part pulls every token to the mean:
d ln Var/dt = −2/s, where s and ṙ are the law's in the collapsed state. A scalar ODE for the radius thus gives the tail
of any law: exponential if s is constant, a power of t if s grows like t, a stretched exponential in between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from normlab.dynamics.measure.fits import FORMULAS, RateForm
from normlab.schemes.contract.law import Law, Motion

_FAR = 9.0
"""Decades of time after which a law is assumed to have reached its limit."""
_STEP = 0.02


@dataclass(frozen=True, kw_only=True)
class Tail:
    """Predicted tail: Var → C e^{−a t}, C e^{−a t^q} or C t^{−a}."""

    form: RateForm
    rate: float
    """−a, with the sign of `Rate.value`."""
    growth: float
    """Exponent p of the radius, r ∝ t^p."""

    def __str__(self) -> str:
        return FORMULAS[self.form].replace("a", f"{self.rate:g}")


def predict_tail(law: Law) -> Tail | None:
    """Return the tail of a law, or None if there is no prediction: for laws whose attention reads radii (its weights
    do not become uniform), laws that come to rest, and other powers of t.
    """
    if law.reads_state or law.speed is None:
        return None
    path = _radii(law)
    (t0, s0, r0), (t1, s1, r1) = path[len(path) * 8 // 9], path[-1]
    span = math.log(t1 / t0)
    if not all(0 < value < math.inf for value in (s0, s1, r0, r1)):
        return None
    power = -math.log(s1 / s0) / span
    growth = math.log(r1 / r0) / span
    for form, expected, rate in (
        ("exponential", 0.0, -2 / s1),
        ("stretched", -0.5, -4 * math.sqrt(t1) / s1),
        ("power", -1.0, -2 * t1 / s1),
    ):
        if abs(power - expected) < 0.01:
            return Tail(form=form, rate=rate, growth=round(growth, 3))  # type: ignore[arg-type]
    return None


def collapsed_motion(law: Law, time: Tensor, radius: Tensor) -> Motion:
    """Inputs of a law when all tokens have collapsed to one point."""
    ones = torch.ones_like(radius)
    return Motion(time=time, radius=radius, attention=ones, radial=ones, tangent=torch.zeros_like(radius))


def _radii(law: Law) -> list[tuple[float, float, float]]:
    """(t, s, r) of collapsed tokens over time, by the midpoint rule in logarithmic time."""
    assert law.speed is not None
    radius, found = torch.ones((), dtype=torch.float64), []
    taus = torch.arange(0.0, _FAR * math.log(10), _STEP, dtype=torch.float64)
    for tau in taus:
        before, middle, after = tau.expm1(), (tau + _STEP / 2).expm1(), (tau + _STEP).expm1()
        half = radius + (middle - before) * law.radial(collapsed_motion(law, before, radius))
        radius = radius + (after - before) * law.radial(collapsed_motion(law, middle, half))
        found.append((float(after), float(law.speed(collapsed_motion(law, after, radius))), float(radius)))
    return found


def settling_time(law: Law, tail: Tail, within: float) -> float:
    """Time after which the local exponent of a power-law tail is within a relative error of its limit."""
    path = _radii(law)
    off = [time for time, s, _ in path if abs(2 * time / s + tail.rate) > within * abs(tail.rate)]
    return off[-1] if off else path[0][0]
