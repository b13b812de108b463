"""Laws: what theory says a scheme does.

Two theories meet here. Attention dynamics (arXiv 2510.22026) sees tokens as particles x_j = r_j θ_j on a sphere: every
placement is the same angular flow with its own speed divisor s_j, plus a law for the radius. Growth theory (arXiv
2510.09904 and the moment computation at initialisation) says how the size of the state and of its gradient depends on
depth. A scheme states both; the simulator integrates the first, the stability check draws the second over what it
measures. What a scheme's parts prove without data (its certificate) is not stated but computed: see `Block.rms_bound`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch

Growth = Literal["bounded", "random walk", "linear", "exponential"]
"""How the RMS of the state depends on depth: constant, ∝ √depth, ∝ depth, or faster than any power."""


@dataclass(frozen=True)
class Motion:
    """What a law may look at: all tokens at one time. Radii are in units of the sphere that the norm projects on."""

    time: torch.Tensor
    radius: torch.Tensor
    """r_j."""
    attention: torch.Tensor
    """‖A_j‖, the length of the attention output."""
    radial: torch.Tensor
    """⟨θ_j, A_j⟩, its part along the token."""
    tangent: torch.Tensor
    """‖P A_j‖, its part across."""


_ROUNDING = 4 * torch.finfo(torch.float32).eps
"""A parameter this near to its initial value has not moved: 0.05 is no number of fp32."""


@dataclass(frozen=True)
class Value:
    """A constant of a law that training changes: its initial value, or block k's own from time k to k + 1."""

    name: str
    initial: float
    blocks: tuple[float, ...] = ()

    def learnt(self, found: Iterable[float]) -> Value:
        """The constant as trained blocks have it."""
        near = _ROUNDING * abs(self.initial)
        return replace(self, blocks=tuple(self.initial if abs(x - self.initial) <= near else x for x in found))

    @property
    def moved(self) -> bool:
        """Whether any block has another value than the initial one."""
        return any(value != self.initial for value in self.blocks)

    @property
    def switches(self) -> set[float]:
        """Times at which the value changes."""
        return {float(k) for k in range(1, len(self.blocks)) if self.blocks[k] != self.blocks[k - 1]}

    def __call__(self, time: torch.Tensor) -> torch.Tensor | float:
        """The value at each of the times."""
        if not self.moved:
            return self.initial
        return time.new_tensor(self.blocks)[time.floor().long().clamp(0, len(self.blocks) - 1)]


def squared_radius(radius: Value) -> Callable[[torch.Tensor], torch.Tensor]:
    """Factor on β where attention reads a state of this radius: its square."""
    return lambda time: radius(time) ** 2 * torch.ones_like(time)


def _still(motion: Motion) -> torch.Tensor:
    return torch.zeros_like(motion.radius)


def _unchanged(time: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(time)


@dataclass(frozen=True, kw_only=True)
class Law:
    """The law of one scheme at one depth."""

    speed: Callable[[Motion], torch.Tensor] | None
    """s_j in θ̇_j = P A_j / s_j; None where no continuous law is known."""

    radial: Callable[[Motion], torch.Tensor] = _still
    """ṙ_j."""

    temperature: Callable[[torch.Tensor], torch.Tensor] = _unchanged
    """Factor on β at a time: below one where the scheme shrinks queries and keys with depth."""

    switches: tuple[float, ...] = ()
    """Times at which the law changes; at such a time the new one holds."""

    resets_radius: bool = False
    """True where the radius is put back to one at a switch: from there on a norm stands on the main path."""

    mlp: Literal["nothing", "identity"] = "nothing"
    """What stands in for the MLP in the network that this law describes."""

    reads_state: bool = False
    """True where attention reads the state itself, radius included, and not its direction."""

    rms: Callable[[int], float] | None
    """RMS of the state after i sublayers over that of the entry, at initialisation: unit-RMS entry, independent
    branches that return the RMS they are given. None where it is not known."""

    forward: Growth
    """Growth of the state at worst, with weights and gains of one size in all blocks: branches that all pull the same
    way. Weights that grow with depth make it faster where the scheme's parts have no bound (`Block.rms_bound`)."""

    backward: str
    """What happens to the gradient on its way down, in a few words."""

    note: str = ""
    """What a reader of the law must know: assumptions, limits."""

    values: tuple[Value, ...] = ()
    """Constants that training changes; the law switches where one of them does."""

    def __post_init__(self) -> None:
        times = {*self.switches, *(time for value in self.values for time in value.switches)}
        object.__setattr__(self, "switches", tuple(sorted(times)))


def on_sphere(i: int) -> float:
    """RMS law of every scheme that renormalises its state."""
    return 1.0
