"""`Law`: the theoretical predictions of a scheme, for the simulator and the stability check.

Attention dynamics (arXiv 2510.22026) treats tokens as particles x_j = r_j θ_j on a sphere: every norm placement gives
the same angular flow with its own speed divisor s_j, plus an equation for the radius. Growth theory (arXiv 2510.09904
and the moment computation at initialisation) predicts how the RMS of the state and of its gradient depends on depth. A
scheme states both. The simulator integrates the first; the stability check compares the second with measurements.
Bounds that hold for any input (certificates) are not stated here but computed: see `Block.rms_bound`.
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
    """The state of all tokens at one time, the argument of a law. Radii are in units of the norm's sphere."""

    time: torch.Tensor
    """Depth in blocks."""
    radius: torch.Tensor
    """r_j."""
    attention: torch.Tensor
    """‖A_j‖, the length of the attention output."""
    radial: torch.Tensor
    """⟨θ_j, A_j⟩, its part along the token."""
    tangent: torch.Tensor
    """‖P A_j‖, its part across."""


_ROUNDING = 4 * torch.finfo(torch.float32).eps
"""Relative distance below which a parameter counts as unchanged: 0.05, say, is not exact in fp32."""


@dataclass(frozen=True)
class Value:
    """A constant of a law that is learned: its initial value, or one value per block (block k: time k to k + 1)."""

    name: str
    initial: float
    blocks: tuple[float, ...] = ()

    def learnt(self, found: Iterable[float]) -> Value:
        """The same constant with the values found in trained blocks."""
        near = _ROUNDING * abs(self.initial)
        return replace(self, blocks=tuple(self.initial if abs(x - self.initial) <= near else x for x in found))

    @property
    def moved(self) -> bool:
        """Whether any block's value differs from the initial one."""
        return any(value != self.initial for value in self.blocks)

    @property
    def switches(self) -> set[float]:
        """Times at which the value changes."""
        return {float(k) for k in range(1, len(self.blocks)) if self.blocks[k] != self.blocks[k - 1]}

    def __call__(self, time: torch.Tensor) -> torch.Tensor | float:
        """The value at each time."""
        if not self.moved:
            return self.initial
        return time.new_tensor(self.blocks)[time.floor().long().clamp(0, len(self.blocks) - 1)]


def squared_radius(radius: Value) -> Callable[[torch.Tensor], torch.Tensor]:
    """A law's `temperature` if attention reads a state of this radius: β is multiplied by the radius squared."""
    return lambda time: radius(time) ** 2 * torch.ones_like(time)


def _still(motion: Motion) -> torch.Tensor:
    return torch.zeros_like(motion.radius)


def _unchanged(time: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(time)


@dataclass(frozen=True, kw_only=True)
class Law:
    """Theoretical predictions for one scheme at one depth."""

    speed: Callable[[Motion], torch.Tensor] | None
    """s_j in θ̇_j = P A_j / s_j; None if no continuous-time law is known."""

    radial: Callable[[Motion], torch.Tensor] = _still
    """ṙ_j."""

    temperature: Callable[[torch.Tensor], torch.Tensor] = _unchanged
    """Factor on the inverse temperature β at a time: the squared length of what a branch reads, below 1 if the scheme
    shrinks it with depth. `speed` and `radial` are for an output of attention that is divided by this length."""

    switches: tuple[float, ...] = ()
    """Times at which the law changes; the new law holds from that time on."""

    resets_radius: bool = False
    """True if the radius is reset to 1 at a switch, because a norm is on the main path from there on."""

    mlp: Literal["nothing", "identity"] = "nothing"
    """What replaces the MLP in the network that this law describes."""

    reads_state: bool = False
    """True if attention reads the state itself, radius included, and not its direction."""

    rms: Callable[[int], float] | None
    """RMS of the state after i sublayers relative to that at the entry, at initialisation: unit-RMS entry, independent
    branches that preserve the RMS of their input. None if unknown."""

    forward: Growth
    """Worst-case growth of the state, for branches that all point the same way and weights of the same size in every
    block. Weights that grow with depth make it faster, unless the scheme's parts are bounded (`Block.rms_bound`)."""

    backward: str
    """How the gradient depends on depth in the backward pass, in a few words."""

    note: str = ""
    """Assumptions and limits of the law."""

    values: tuple[Value, ...] = ()
    """Learned constants; the law switches at the times when one of them changes."""

    def __post_init__(self) -> None:
        times = {*self.switches, *(time for value in self.values for time in value.switches)}
        object.__setattr__(self, "switches", tuple(sorted(times)))


def on_sphere(i: int) -> float:
    """RMS law of every scheme that renormalises its state: constant."""
    return 1.0
