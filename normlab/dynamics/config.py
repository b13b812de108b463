"""What a simulation does: its systems, its weights, how it is integrated and what is looked at.

Importing this does not import torch: the command line shows these fields in its help.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from tyro.constructors import PrimitiveConstructorSpec

from normlab.dynamics.choices import OBSERVABLES, Clock, Dtype, Kind, Matrices, Method, Observable, Start
from normlab.errors import NormLabError, unknown


def split(text: str) -> list[str]:
    """Parts between commas, where a comma inside brackets belongs to a part: 'pre,peri(step=0.1,norm=layer)'."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign == "(") - (sign == ")")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts if part.strip()]


def _listed(of: Callable[[str], Any], example: str) -> PrimitiveConstructorSpec[tuple[Any, ...]]:
    """One word with commas on the command line, so that a list does not swallow what follows it."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=example,
        instance_from_str=lambda words: tuple(of(part) for part in split(words[0])),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(map(str, value))],
    )


_Schemes = Annotated[tuple[str, ...], _listed(str, "SCHEME,SCHEME")]
_Numbers = Annotated[tuple[float, ...], _listed(float, "β,β")]
_Names = Annotated[tuple[Observable, ...], _listed(str, "NAME,NAME")]


@dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """One simulation."""

    scheme: _Schemes = ("peri",)
    """Laws to follow, side by side: schemes with options, also in files (highway.py:Highway), or laws that no block
    has, such as sqrt."""
    tokens: int = 64
    """Tokens of a system."""
    dim: int = 3
    """Dimension of a token."""
    beta: _Numbers = (1.0,)
    """Inverse temperatures; several are simulated at once."""
    seeds: int = 1
    """Systems of each kind, each with tokens and weights of its own."""
    seed: int = 0
    """The first of the seeds."""
    start: Start = "uniform"
    """Tokens at time zero: independent on the sphere, pairwise orthogonal, or close together."""
    radius: float = 1.0
    """Of every token at time zero, in units of the sphere that the norms project on."""

    time: float = 10.0
    """Horizon, in layers."""
    depth: int | None = None
    """Blocks of the network whose law it is, where the law depends on it; none: those that the horizon takes."""
    method: Method = "rk4"
    """Runge-Kutta of fixed step, Dormand-Prince of controlled step, or the scheme's own blocks."""
    step: float = 0.05
    """Step of rk4, in the clock's time."""
    tolerance: float = 1e-8
    """Largest error of a step of dopri."""
    cut: int = 1
    """Blocks of the network that make up a layer."""
    clock: Clock = "plain"
    """Time to take steps in; log for horizons beyond a hundred."""

    weights: Matrices = "identity"
    """Query, key and value matrices."""
    heads: int = 1
    """Heads of attention."""
    redraw: bool = False
    """Draw the weights anew in every layer."""
    causal: bool = False
    """Tokens see those before them and themselves alone."""
    kind: Kind = "softmax"
    """Attention with or without the softmax's sum."""
    mlp: int = 0
    """Hidden width of a random MLP that is added to attention; 0 for none."""

    looks: int = 100
    """States that are looked at, evenly in the clock's time."""
    observables: _Names = OBSERVABLES
    """What is kept of each look."""
    bins: int = 40
    """Bins of the histogram of pairwise cosines; 0 for none."""
    angle: float = 0.1
    """Largest angle between neighbours in a cluster, in radians."""
    shown: int = 96
    """Most tokens whose paths are kept for the page; 0 for none."""

    dtype: Dtype = "float32"
    """Number format."""
    device: str = "auto"
    """Where to compute: cpu, cuda; auto: a GPU where there is one."""
    model: str | None = None
    """A run folder, a Hugging Face id or a config.json, for experiments that look at a network."""
    data: str = "bigram"
    """What such a network reads: random tokens, a bigram language, or a text file."""

    def __post_init__(self) -> None:
        for name, one in (("scheme", str), ("beta", int | float), ("observables", str)):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, one) else tuple(value))
        object.__setattr__(self, "beta", tuple(float(beta) for beta in self.beta))
        self._check_counts()
        self._check_numbers()
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise unknown(name, str(getattr(self, name)), choices)
        for name in self.observables:
            if name not in OBSERVABLES:
                raise unknown("observable", name, OBSERVABLES)

    def _check_counts(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise NormLabError(f"simulate: {name} must be a whole number from {least} on, got {value}")
        if not self.scheme or not self.beta:
            raise NormLabError("simulate: expected at least one scheme and one β")
        if self.start == "orthonormal" and self.tokens > self.dim:
            room = f"{self.tokens} tokens in dimension {self.dim}"
            raise NormLabError(f"simulate: {room} cannot be orthogonal; at most as many tokens as dimensions can")

    def _check_numbers(self) -> None:
        for beta in self.beta:
            if not 0.0 <= beta < math.inf:
                raise NormLabError(f"simulate: β must not be negative, got {beta:g}; try 1")
        for name in ("time", "step", "tolerance", "radius"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise NormLabError(f"simulate: {name} must be positive and finite, got {value:g}")
        if not 0.0 < self.angle < math.pi:
            raise NormLabError(f"simulate: angle must lie in (0, π), got {self.angle:g}; try 0.1")

    @property
    def layers(self) -> int:
        """Depth of the network whose law it is."""
        return self.depth or max(1, math.ceil(self.time))

    def replace(self, **changes: Any) -> SimulateConfig:
        """The same with some fields changed; unknown names raise."""
        known = {spec.name for spec in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise unknown("option of a simulation", name, known)
        return dataclasses.replace(self, **changes)


_LEAST = {
    "tokens": 2, "dim": 2, "seeds": 1, "seed": 0, "depth": 1, "cut": 1, "heads": 1, "mlp": 0, "looks": 2, "bins": 0,
    "shown": 0,
}  # fmt: skip
_CHOICES: dict[str, tuple[str, ...]] = {
    "start": get_args(Start), "method": get_args(Method), "clock": get_args(Clock), "weights": get_args(Matrices),
    "kind": get_args(Kind), "dtype": get_args(Dtype),
}  # fmt: skip
