"""SimulateConfig: the options of a simulation, their allowed values and the names of the observables.

Does not import torch, because the command line shows these fields in its help.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from tyro.constructors import PrimitiveConstructorSpec

from normlab.errors import NormLabError, advice_for, unknown

Observable = Literal[
    "cosine", "variance", "order", "energy", "close", "clusters", "rank", "speed", "fastest", "radius", "smallest",
    "largest",
]  # fmt: skip
OBSERVABLES: tuple[Observable, ...] = get_args(Observable)
OBSERVABLE_LABELS: dict[Observable, str] = {
    "cosine": "how alike two tokens are (mean cosine)",
    "variance": "squared distance of tokens from their mean",
    "order": "length of the mean token (1: all alike)",
    "energy": "energy of the attraction (lower: closer together)",
    "close": "share of pairs that have met (cosine above 0.999)",
    "clusters": "number of clusters",
    "rank": "directions that the tokens use (effective rank)",
    "speed": "how fast tokens turn (radians a layer, mean)",
    "fastest": "how fast the fastest token turns (radians a layer)",
    "radius": "length of the hidden state (mean)",
    "smallest": "length of the shortest hidden state",
    "largest": "length of the longest hidden state",
}
"""Description of each observable, for axis titles and tables."""

StartName = Literal["uniform", "orthonormal", "clustered"]
"""Initial tokens: independent uniform points on the sphere, pairwise orthogonal, or close together."""
MethodName = Literal["rk4", "dopri", "network"]
ClockName = Literal["plain", "log"]
AttentionKind = Literal["softmax", "unnormalised"]
WeightsName = Literal["identity", "gaussian", "kaiming", "orthogonal", "symmetric"]
DtypeName = Literal["float32", "float64"]


def split_commas(text: str) -> list[str]:
    """Split at commas outside brackets: 'pre,peri(step=0.1,norm=layer)' has two parts."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign == "(") - (sign == ")")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts if part.strip()]


def _listed(of: Callable[[str], Any], example: str) -> PrimitiveConstructorSpec[tuple[Any, ...]]:
    """Parse one comma-separated command-line argument as a tuple, so that it does not consume later arguments."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=example,
        instance_from_str=lambda words: tuple(of(part) for part in split_commas(words[0])),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(map(str, value))],
    )


_Schemes = Annotated[tuple[str, ...], _listed(str, "SCHEME,SCHEME")]
_Numbers = Annotated[tuple[float, ...], _listed(float, "β,β")]
_Names = Annotated[tuple[Observable, ...], _listed(str, "NAME,NAME")]


@dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """Options of one simulation."""

    scheme: _Schemes = ("peri",)
    """Schemes to simulate side by side, with options if any;
    also schemes in files (highway.py:Highway) and laws without a block, such as sqrt."""
    tokens: int = 64
    """Number of tokens."""
    dim: int = 3
    """Dimension of a token."""
    beta: _Numbers = (1.0,)
    """Inverse temperatures β of the softmax; several are simulated at once."""
    seeds: int = 1
    """Number of seeds. Each seed has its own initial tokens and weights."""
    seed: int = 0
    """First seed."""
    start: StartName = "uniform"
    """Initial tokens: independent uniform points on the sphere, pairwise orthogonal, or close together."""
    radius: float = 1.0
    """Initial radius of every token, in units of the radius that the norms project to."""

    time: float = 10.0
    """End time. One unit of time is one layer."""
    depth: int | None = None
    """Number of blocks, for laws that depend on depth; none: the end time, rounded up."""
    method: MethodName = "rk4"
    """Integrator: rk4 with a fixed step, dopri (Dormand-Prince) with an adaptive step,
    or network, which runs the scheme's own blocks."""
    step: float = 0.05
    """Step size of rk4, in the time of the clock."""
    tolerance: float = 1e-8
    """Error tolerance of one step of dopri."""
    cut: int = 1
    """Blocks per layer, for the method network: every residual step is divided into this many."""
    clock: ClockName = "plain"
    """Time variable of the integrator: plain, or log for end times above 100."""

    weights: WeightsName = "identity"
    """How query, key and value matrices are drawn."""
    heads: int = 1
    """Number of attention heads."""
    redraw: bool = False
    """Draw new weights for every layer."""
    causal: bool = False
    """Causal mask: a token attends to itself and to earlier tokens."""
    kind: AttentionKind = "softmax"
    """Softmax attention, or exponential weights without the softmax normalisation."""
    mlp: int = 0
    """Hidden width of a random MLP whose output is added to that of attention; 0 for none."""

    looks: int = 100
    """Number of recorded states, evenly spaced in the time of the clock."""
    observables: _Names = OBSERVABLES
    """Observables to record."""
    bins: int = 40
    """Bins of the histogram of pairwise cosines; 0 for no histogram."""
    angle: float = 0.1
    """Largest angle between neighbouring tokens of one cluster, in radians."""
    shown: int = 96
    """Largest number of tokens whose paths are recorded for the page; 0 for none."""

    dtype: DtypeName = "float32"
    """Floating-point type."""
    device: str = "auto"
    """Device: cpu, cuda, or auto, which takes a GPU if there is one."""
    model: str | None = None
    """Model for the experiment real-model: a run folder, a Hugging Face id or a config.json."""
    data: str = "bigram"
    """Input of that model: random tokens, a bigram language, or a text file."""

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
                raise NormLabError(
                    f"simulate: {name} must be a whole number from {least} on, got {value}; {advice_for(self, name)}"
                )
        if self.tokens > _MOST_TOKENS:
            raise NormLabError(
                f"simulate: {self.tokens:,} tokens have too many pairs; expected at most {_MOST_TOKENS:,}; "
                f"{advice_for(self, 'tokens')}"
            )
        if not self.scheme or not self.beta:
            raise NormLabError("simulate: at least one scheme and one β are needed; try --scheme peri --beta 1")
        if self.start == "orthonormal" and self.tokens > self.dim:
            room = f"{self.tokens} tokens in dimension {self.dim}"
            raise NormLabError(f"simulate: {room} cannot be orthogonal; try --dim {self.tokens} or --tokens {self.dim}")

    def _check_numbers(self) -> None:
        for beta in self.beta:
            if not 0.0 <= beta < math.inf:
                raise NormLabError(f"simulate: β must be finite and not negative, got {beta:g}; try 1")
        for name in ("time", "step", "tolerance", "radius"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise NormLabError(
                    f"simulate: {name} must be positive and finite, got {value:g}; {advice_for(self, name)}"
                )
        if self.steps > _MOST_STEPS:
            raise NormLabError(
                f"simulate: {self.steps:.2g} steps to time {self.time:g} are more than {_MOST_STEPS:.0e}; "
                "try --clock log, or a smaller --time"
            )
        if not 0.0 < self.angle < math.pi:
            raise NormLabError(f"simulate: angle must lie in (0, π), got {self.angle:g}; try 0.1")

    @property
    def steps(self) -> float:
        """Steps of the integrator or of the network; 0 for an adaptive step, whose number is not known before."""
        if self.method == "network":
            return self.time * self.cut
        end = math.log1p(self.time) if self.clock == "log" else self.time
        return end / self.step if self.method == "rk4" else 0.0

    @property
    def layers(self) -> int:
        """Number of blocks that depth-dependent laws are evaluated for."""
        return self.depth or max(1, math.ceil(self.time))

    def replace(self, **changes: Any) -> SimulateConfig:
        """Return a copy with some fields changed; unknown names raise."""
        known = {spec.name for spec in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise unknown("option of a simulation", name, known)
        return dataclasses.replace(self, **changes)


_MOST_STEPS, _MOST_TOKENS = 1e9, 10_000_000
"""A step takes 100 µs at least: 1e9 of them take a day. Attention over 1e7 tokens has 1e14 scores a step."""
_LEAST = {
    "tokens": 2, "dim": 2, "seeds": 1, "seed": 0, "depth": 1, "cut": 1, "heads": 1, "mlp": 0, "looks": 2, "bins": 0,
    "shown": 0,
}  # fmt: skip
_CHOICES: dict[str, tuple[str, ...]] = {
    "start": get_args(StartName), "method": get_args(MethodName), "clock": get_args(ClockName),
    "weights": get_args(WeightsName), "kind": get_args(AttentionKind), "dtype": get_args(DtypeName),
}  # fmt: skip
