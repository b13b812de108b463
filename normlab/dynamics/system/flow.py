"""Flow: the velocity of all tokens, θ̇_j = P A_j / s_j and ṙ_j, with s and ṙ from a scheme's law.

P is the projection on the tangent space at θ_j. A token with P A_j = 0 does not move, whatever s is. One layer is one
unit of time: with different weights in every layer the flow changes at integer times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from normlab.dynamics.system.attention import ParticleAttention
from normlab.errors import NormLabError
from normlab.schemes.contract.law import Law, Motion

Drift = Callable[[Tensor], Tensor]
"""An MLP that is added to attention's output: a function of the tokens."""

LayerAttention = ParticleAttention | Callable[[int], ParticleAttention]
"""One attention for all layers, or a function from a layer's index to its attention."""

_SHORT = 8
"""Width up to which a sum over the last dimension is faster as a matrix product on a CPU."""


class ParticleState(NamedTuple):
    """Tokens x = r θ of a batch of systems, and their time."""

    theta: Tensor
    """Directions, unit vectors (S, n, d)."""
    radius: Tensor
    """Radii (S, n)."""
    time: Tensor
    """Times (S,)."""

    def moved(self, theta: Tensor, radius: Tensor, time: Tensor) -> ParticleState:
        """A new state; `theta` is normalised to the unit sphere in place."""
        return ParticleState(theta.mul_(length(theta).reciprocal().unsqueeze(-1)), radius, time)


class Velocity(NamedTuple):
    """Time derivative of a state."""

    theta: Tensor
    radius: Tensor


@dataclass(frozen=True)
class Flow:
    """The ODE of one scheme: calling it with a state returns the velocity."""

    law: Law
    attention: LayerAttention
    drift: Drift | None = None

    def __post_init__(self) -> None:
        if self.law.speed is None:
            raise NormLabError("this scheme states no speed; a flow needs one (its network can still be run)")

    def __call__(self, state: ParticleState) -> Velocity:
        pull = self.branch_output(state)
        radial = dot(pull, state.theta)
        tangent = torch.addcmul(pull, radial.unsqueeze(-1), state.theta, value=-1)
        across = length(tangent)
        motion = Motion(
            time=state.time.unsqueeze(-1).expand_as(state.radius),
            radius=state.radius,
            attention=torch.hypot(radial, across),
            radial=radial,
            tangent=across,
        )
        return Velocity(self._turn(tangent, motion), _still(self.law.radial(motion), motion))

    def branch_output(self, state: ParticleState) -> Tensor:
        """A_j: output of attention, plus that of the MLP if there is one."""
        read = state.theta * state.radius.unsqueeze(-1) if self.law.reads_state else state.theta
        temperature = self.law.temperature(state.time)
        pull = attention_at(self.attention, state.time)(read, temperature)
        if self.drift is None:
            return pull
        # The law counts the length of what a branch reads in s and ṙ; an MLP is not linear in it.
        size = temperature.to(read).sqrt().reshape(-1, 1, 1)
        return pull + self.drift(read * size) / size

    def switches(self, begin: float, end: float) -> list[float]:
        """Times between `begin` and `end` at which the flow is discontinuous; an integrator stops there."""
        whole = [] if isinstance(self.attention, ParticleAttention) else range(math.floor(begin) + 1, math.ceil(end))
        return sorted({float(time) for time in (*self.law.switches, *whole) if begin < time < end})

    def speeds(self, state: ParticleState) -> Tensor:
        """‖θ̇_j‖."""
        return length(self(state).theta)

    def _turn(self, tangent: Tensor, motion: Motion) -> Tensor:
        assert self.law.speed is not None
        divisor = self.law.speed(motion)
        return tangent.mul_(divisor.masked_fill(motion.tangent == 0, 1.0).reciprocal().unsqueeze(-1))


def attention_at(attention: LayerAttention, time: Tensor) -> ParticleAttention:
    """The attention of the layer at a time; all systems of a batch are in the same layer."""
    return attention if isinstance(attention, ParticleAttention) else attention(math.floor(float(time.min())))


def dot(x: Tensor, y: Tensor) -> Tensor:
    """⟨x, y⟩ along the last dimension."""
    product = x * y
    return product @ product.new_ones(x.shape[-1]) if x.shape[-1] <= _SHORT else product.sum(-1)


def length(x: Tensor) -> Tensor:
    """‖x‖ along the last dimension."""
    return dot(x, x).sqrt() if x.shape[-1] <= _SHORT else torch.linalg.vector_norm(x, dim=-1)


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖ along the last dimension."""
    return x / length(x).unsqueeze(-1)


def _still(change: Tensor, motion: Motion) -> Tensor:
    """Zero change where A = 0 and a law that divides by ‖A‖ returns 0/0."""
    return change.masked_fill((motion.attention == 0) & change.isnan(), 0.0)
