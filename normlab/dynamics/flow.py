"""The velocity of all tokens: θ̇_j = P A_j / s_j and ṙ_j, with s and ṙ from a scheme's law.

P is the projection on the tangent space at θ_j. A token on which nothing pulls stands still, whatever it is divided by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from normlab.dynamics.attention import Attention
from normlab.errors import NormLabError
from normlab.schemes.law import Law, Motion

Drift = Callable[[Tensor], Tensor]
"""What an MLP adds to attention's output, from the tokens that it reads."""


class State(NamedTuple):
    """Tokens x = r θ at a time, system by system."""

    theta: Tensor
    """(S, n, d), unit vectors."""
    radius: Tensor
    """(S, n)."""
    time: Tensor
    """(S,)."""

    def moved(self, theta: Tensor, radius: Tensor, time: Tensor) -> State:
        """A state like this one; tokens are put back on the sphere."""
        return State(unit(theta), radius, time)


class Velocity(NamedTuple):
    """How a state changes."""

    theta: Tensor
    radius: Tensor


@dataclass(frozen=True)
class Flow:
    """The continuous-time network of one scheme."""

    law: Law
    attention: Attention
    drift: Drift | None = None

    def __post_init__(self) -> None:
        if self.law.speed is None:
            raise NormLabError("this scheme states no speed; a flow needs one (its network can still be run)")

    def __call__(self, state: State) -> Velocity:
        pull = self.pull(state)
        radial = (pull * state.theta).sum(-1)
        tangent = pull - radial.unsqueeze(-1) * state.theta
        motion = Motion(
            time=state.time.unsqueeze(-1).expand_as(state.radius),
            radius=state.radius,
            attention=torch.linalg.vector_norm(pull, dim=-1),
            radial=radial,
            tangent=torch.linalg.vector_norm(tangent, dim=-1),
        )
        return Velocity(self._turn(tangent, motion), _still(self.law.radial(motion), motion))

    def pull(self, state: State) -> Tensor:
        """A_j: what attention, and the MLP if there is one, propose."""
        read = state.theta * state.radius.unsqueeze(-1) if self.law.reads_state else state.theta
        pull = self.attention(read, self.law.temperature(state.time))
        return pull if self.drift is None else pull + self.drift(read)

    def switches(self, begin: float, end: float) -> list[float]:
        """Times at which something changes at once; an integrator stops there."""
        return [time for time in self.law.switches if begin < time < end]

    def speeds(self, state: State) -> Tensor:
        """‖θ̇_j‖."""
        return torch.linalg.vector_norm(self(state).theta, dim=-1)

    def _turn(self, tangent: Tensor, motion: Motion) -> Tensor:
        assert self.law.speed is not None
        divisor = self.law.speed(motion)
        divisor = torch.where(motion.tangent == 0, torch.ones_like(divisor), divisor)
        return tangent / divisor.unsqueeze(-1)


def unit(x: Tensor) -> Tensor:
    """x on the unit sphere."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def _still(change: Tensor, motion: Motion) -> Tensor:
    """No pull, no change: laws that divide by ‖A‖ say 0/0 there."""
    return torch.where(motion.attention == 0, torch.zeros_like(change), change)
