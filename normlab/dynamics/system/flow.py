"""The velocity of all tokens: θ̇_j = P A_j / s_j and ṙ_j, with s and ṙ from a scheme's law.

P is the projection on the tangent space at θ_j. A token on which nothing pulls stands still, whatever it is divided by.
A layer takes one unit of time: with weights of its own in every layer the flow changes at whole times.
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
"""What an MLP adds to attention's output, from the tokens that it reads."""

Layers = ParticleAttention | Callable[[int], ParticleAttention]
"""One attention for all time, or that of each layer."""

_SHORT = 8
"""Width up to which a sum over the last dimension is faster as a product on a CPU."""


class ParticleState(NamedTuple):
    """Tokens x = r θ at a time, system by system."""

    theta: Tensor
    """(S, n, d), unit vectors."""
    radius: Tensor
    """(S, n)."""
    time: Tensor
    """(S,)."""

    def moved(self, theta: Tensor, radius: Tensor, time: Tensor) -> ParticleState:
        """A state like this one; tokens are put back on the sphere, in place."""
        return ParticleState(theta.mul_(length(theta).reciprocal().unsqueeze(-1)), radius, time)


class Velocity(NamedTuple):
    """How a state changes."""

    theta: Tensor
    radius: Tensor


@dataclass(frozen=True)
class Flow:
    """The continuous-time network of one scheme."""

    law: Law
    attention: Layers
    drift: Drift | None = None

    def __post_init__(self) -> None:
        if self.law.speed is None:
            raise NormLabError("this scheme states no speed; a flow needs one (its network can still be run)")

    def __call__(self, state: ParticleState) -> Velocity:
        pull = self.pull(state)
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

    def pull(self, state: ParticleState) -> Tensor:
        """A_j: what attention, and the MLP if there is one, propose."""
        read = state.theta * state.radius.unsqueeze(-1) if self.law.reads_state else state.theta
        pull = at_layer(self.attention, state.time)(read, self.law.temperature(state.time))
        return pull if self.drift is None else pull + self.drift(read)

    def switches(self, begin: float, end: float) -> list[float]:
        """Times at which something changes at once; an integrator stops there."""
        whole = [] if isinstance(self.attention, ParticleAttention) else range(math.floor(begin) + 1, math.ceil(end))
        return sorted({float(time) for time in (*self.law.switches, *whole) if begin < time < end})

    def speeds(self, state: ParticleState) -> Tensor:
        """‖θ̇_j‖."""
        return length(self(state).theta)

    def _turn(self, tangent: Tensor, motion: Motion) -> Tensor:
        assert self.law.speed is not None
        divisor = self.law.speed(motion)
        return tangent.mul_(divisor.masked_fill(motion.tangent == 0, 1.0).reciprocal().unsqueeze(-1))


def at_layer(attention: Layers, time: Tensor) -> ParticleAttention:
    """The attention that holds at a time; all systems of a batch are in the same layer."""
    return attention if isinstance(attention, ParticleAttention) else attention(math.floor(float(time.min())))


def dot(x: Tensor, y: Tensor) -> Tensor:
    """⟨x, y⟩ along the last dimension."""
    product = x * y
    return product @ product.new_ones(x.shape[-1]) if x.shape[-1] <= _SHORT else product.sum(-1)


def length(x: Tensor) -> Tensor:
    """‖x‖ along the last dimension."""
    return dot(x, x).sqrt() if x.shape[-1] <= _SHORT else torch.linalg.vector_norm(x, dim=-1)


def unit(x: Tensor) -> Tensor:
    """x on the unit sphere."""
    return x / length(x).unsqueeze(-1)


def _still(change: Tensor, motion: Motion) -> Tensor:
    """No pull, no change: laws that divide by ‖A‖ say 0/0 there."""
    return change.masked_fill(motion.attention == 0, 0.0)
