"""SimulateConfig: the options of a simulation, their allowed values and the names of the observables.

Does not import torch, because the command line shows these fields in its help.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, get_args

from normlab.errors import NormLabError, advice_for, unknown
from normlab.utils.comma_lists import comma_list

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


_Schemes = Annotated[tuple[str, ...], comma_list(str, "SCHEME,SCHEME")]
_Numbers = Annotated[tuple[float, ...], comma_list(float, "β,β")]
_Names = Annotated[tuple[Observable, ...], comma_list(str, "NAME,NAME")]


@dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """Options of one simulation."""

    scheme: _Schemes = ("peri",)
    """Schemes to simulate side by side, with options if any;
    also schemes in files (highway.py:Highway), laws without a block, such as sqrt, and all for every law."""
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
    """Number of recorded states after the first, evenly spaced in the time of the clock;
    the method network has at most one for each block."""
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
        self._unify()
        self._check_counts()
        self._check_numbers()
        self._check_sizes()
        self._check_time()
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise unknown(name, str(getattr(self, name)), choices)
        for name in self.observables:
            if name not in OBSERVABLES:
                raise unknown("observable", name, OBSERVABLES)

    def _unify(self) -> None:
        """Turn single values into tuples, and numbers of other libraries into Python's."""
        for name, one in (("scheme", str), ("beta", str | Real), ("observables", str)):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, one) else tuple(value))
        if not all(isinstance(beta, Real) for beta in self.beta):
            raise NormLabError(f"simulate: β must be a number, or several, got {self.beta[0]!r}; try 1")
        object.__setattr__(self, "beta", tuple(map(float, self.beta)))
        for name in _LEAST:
            value = getattr(self, name)
            if isinstance(value, Integral) and not isinstance(value, bool):
                object.__setattr__(self, name, int(value))

    def _check_counts(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise NormLabError(
                    f"simulate: {name} must be a whole number from {least} on, got {value}; {advice_for(self, name)}"
                )
        for name in ("redraw", "causal"):
            if not isinstance(getattr(self, name), bool):
                raise NormLabError(f"simulate: {name} must be true or false, got {getattr(self, name)!r}")
        if not self.scheme or not self.beta:
            raise NormLabError("simulate: at least one scheme and one β are needed; try --scheme peri --beta 1")
        if self.start == "orthonormal" and self.tokens > self.dim:
            room = f"{self.tokens} tokens in dimension {self.dim}"
            raise NormLabError(f"simulate: {room} cannot be orthogonal; try --dim {self.tokens} or --tokens {self.dim}")

    def _check_numbers(self) -> None:
        for beta in self.beta:
            if not 0.0 <= beta < math.inf:
                raise NormLabError(f"simulate: β must be finite and not negative, got {beta:g}; try 1")
        for name in ("time", "step", "tolerance", "radius", "angle"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0.0 < float(value) < math.inf:
                raise NormLabError(
                    f"simulate: {name} must be positive and finite, got {value}; {advice_for(self, name)}"
                )
        if self.tolerance >= 1.0:
            raise NormLabError(f"simulate: tolerance must be below 1 (a radian), got {self.tolerance:g}; try 1e-8")
        if not 1 / _FARTHEST <= self.radius <= _FARTHEST:
            raise NormLabError(
                f"simulate: radius must lie in [{1 / _FARTHEST:g}, {_FARTHEST:g}], got {self.radius:g}; try 1"
            )
        if self.angle >= math.pi:
            raise NormLabError(f"simulate: angle must lie in (0, π), got {self.angle:g}; try 0.1")
        least = _LEAST_ANGLE.get(self.dtype, 0.0)
        if self.angle < least and "clusters" in self.observables:
            other = " or --dtype float64" if self.dtype == "float32" else ""
            raise NormLabError(
                f"simulate: {self.dtype} cannot tell clusters at an angle of {self.angle:g}; "
                f"try --angle {least:g}{other}"
            )

    def _check_sizes(self) -> None:
        if self.tokens > _MOST_TOKENS:
            raise NormLabError(
                f"simulate: {self.tokens:,} tokens have too many pairs; expected at most {_MOST_TOKENS:,}; "
                f"{advice_for(self, 'tokens')}"
            )
        if self.seed + self.seeds > _MOST_SEED:
            raise NormLabError(f"simulate: seeds must stay below {_MOST_SEED:.2g}, got {self.seed}; try --seed 0")
        each = self.seeds * len(self.observables) + self.bins + min(self.shown, self.tokens) * self.dim
        for what, count, try_ in (
            ("numbers in a matrix", self.dim * max(self.dim, self.mlp), "a smaller --dim or --mlp"),
            ("coordinates of tokens", self.tokens * self.dim, "fewer --tokens, or a smaller --dim"),
            ("recorded numbers", (self.looks + 1) * len(self.beta) * each, "fewer --looks, --seeds, --bins or --shown"),
        ):
            if count > _MOST_NUMBERS:
                raise NormLabError(f"simulate: {count:.2g} {what} are more than {_MOST_NUMBERS:.0e}; try {try_}")

    def _check_time(self) -> None:
        if self.steps > _MOST_STEPS:
            shorter = "" if self.method == "network" or self.redraw else "--clock log, or "
            raise NormLabError(
                f"simulate: {self.steps:.2g} steps to time {self.time:g} are more than {_MOST_STEPS:.0e}; "
                f"try {shorter}a smaller --time"
            )
        if self.dtype == "float32" and self.time > _LARGEST_FLOAT32:
            raise NormLabError(f"simulate: time {self.time:g} does not fit into float32; try --dtype float64")
        if self.method == "network":
            self._check_blocks()

    def _check_blocks(self) -> None:
        """Raise unless the network ends after a whole number of blocks that it has."""
        blocks = self.time * self.cut
        if abs(blocks - round(blocks)) > 1e-9 * blocks or round(blocks) < 1:
            nearest = max(1, round(blocks)) / self.cut
            raise NormLabError(f"simulate: no block of the network ends at time {self.time:g}; try --time {nearest:g}")
        if self.depth is not None and self.depth < self.time:
            raise NormLabError(
                f"simulate: a network of depth {self.depth} ends before time {self.time:g}; try --time {self.depth}"
            )

    @property
    def steps(self) -> float:
        """Least number of steps of the integrator or of the network. That of an adaptive step is not known before."""
        if self.method == "network":
            return self.time * self.cut
        # A step ends where the weights change.
        layers = self.time if self.redraw and self.weights != "identity" else 0.0
        end = math.log1p(self.time) if self.clock == "log" else self.time
        return max(layers, end / self.step if self.method == "rk4" else 0.0)

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
_MOST_NUMBERS = 1e9
"""Numbers of one array: 4 GB in float32."""
_MOST_SEED = 2**63
_FARTHEST = 1e6
"""Largest radius, and inverse of the smallest: squares of radii are far from the limits of float32."""
_LARGEST_FLOAT32 = 3.4e38
_LEAST_ANGLE = {"float32": 1e-2, "float64": 1e-6}
"""Clusters are told by cosines: at the angle a their rounding error of a few ε moves the limit by a few ε/a, which is
a hundredth of it at 1e-2 in float32."""
_LEAST = {
    "tokens": 2, "dim": 2, "seeds": 1, "seed": 0, "depth": 1, "cut": 1, "heads": 1, "mlp": 0, "looks": 2, "bins": 0,
    "shown": 0,
}  # fmt: skip
_CHOICES: dict[str, tuple[str, ...]] = {
    "start": get_args(StartName), "method": get_args(MethodName), "clock": get_args(ClockName),
    "weights": get_args(WeightsName), "kind": get_args(AttentionKind), "dtype": get_args(DtypeName),
}  # fmt: skip
