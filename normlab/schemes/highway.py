"""Highway gates: a gated sum of the state and the branch's output, with one gate for each channel.

Bounds of (1 − t)⊙x + t⊙f, 0 < t < 1, with X = RMS(x) and F = RMS(f). The square is convex, so channel by channel
y² ≤ (1 − t)·x² + t·f², and

    RMS(y)² ≤ max(1 − t)·X² + max(t)·F².

With one t for all channels that is at most max(X, F)². With a vector it is not: every channel may keep the larger of
its two values, and RMS(y) may reach √(X² + F²); what never grows is the largest channel. Over many steps with one gate
the right side tends to F²·max(t)/min(t). The triangle inequality, RMS(y) ≤ max(1 − t)·X + max(t)·F, is sharper where
all t are alike; the smaller of the two is the certificate. For the gate that keeps the variance, √(1 − t²) in place of
1 − t, it is the triangle inequality alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.norms import widen
from normlab.roles import Role
from normlab.schemes.contract.blocks import Block
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.gates import GateProjection
from normlab.schemes.contract.law import Law, Motion, Value
from normlab.schemes.contract.learnt import first_steps, mean
from normlab.schemes.contract.parts import Step, Write
from normlab.schemes.contract.scales import factor
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.contract.site import Site

Keep = Literal["complement", "variance"]

_MUSE_SPARK = {"gain": "offset", "keep": "variance", "temperature": 0.3, "gate_bias": 0.0, "output_gain": False}

_LEAST_KEPT = 1e-3
"""Least value of 1 − t² under the root, as in the public code: its gradient is infinite at zero."""


@dataclass(frozen=True, kw_only=True)
class Highway(Scheme):
    """
    Highway: a learned gate for each channel takes from the skip what it gives to the branch.

    Formula    x ← (1 − t)⊙x + t⊙N_out(F(N_in(x))), t = σ(b/T), or σ((W·x + b)/T) with gate="dynamic"
               keep="variance": √(1 − t²) in place of 1 − t; x₀ = N(embedding)
    Placement  x ─┬─ N_in ─ F ─ N_out ─ ⊙t ─┐
                  └──────── ⊙(1 − t) ───────+─ x'
    Init       base std; b = −2: t = 0.12, W = 0; no decay on b, decay on W
    Source     Srivastava et al. 2015, arXiv 1505.00387; Muse Spark (keep="variance", T = 0.3, b = 0)
    Law        no channel exceeds the larger of x and f; RMS² ≤ max(1 − t)·RMS(x)² + max(t)·RMS(f)²
    Fails      the embedding fades as (1 − t)^l, at b = −2 to a half in 6 sublayers: lower b in deep networks
    """

    name = "highway"
    aliases = ("highway-gate", "highway-network")
    variants = MappingProxyType({"muse-spark": _MUSE_SPARK})
    zero_outputs = False
    depth_rule = "no constant is changed: gates start from one b at every depth, and the embedding fades with it"

    gate: Literal["static", "dynamic"] = "static"
    """A learned vector, or a learned function of the state."""
    keep: Keep = "complement"
    """What is kept of the state: 1 − t, or √(1 − t²), which keeps the variance if branch and state are independent."""
    gate_bias: float = -2.0
    """Initial value of b: −2 starts near the identity, 0 halfway."""
    temperature: float = 1.0
    """Divisor T of the gate's logits: below 1 they learn faster."""
    output_gain: bool = True
    """Give the norm of the branch's output a gain and a bias, if other norms have them."""
    entry_norm: bool = True
    """Normalise the embedding: what branches add has RMS 1."""

    def check(self) -> None:
        if self.temperature <= 0.0:
            raise NormLabError(f"highway: temperature must be positive, got {self.temperature}; try 1.0")

    def sublayer(self, site: Site) -> Step:
        plain = {} if self.output_gain else {"gain": "none", "bias": False}
        dynamic = site.dim if self.gate == "dynamic" else 0
        gate = Gate(site.dim, self.gate_bias, self.temperature, inputs=dynamic)
        return Step(
            GatedWrite(gate, self.keep, site.dt),
            read=self.new_norm(site.dim),
            shape=self.new_norm(site.dim, **plain),
        )

    def entry(self, bound: BoundScheme) -> nn.Module:
        return self.new_norm(bound.dim) if self.entry_norm else nn.Identity()

    def initial_std(self, role: Role, base: float, bound: BoundScheme) -> float:
        return 0.0 if role.role == "mix" else base

    def law(self, depth: int, blocks: Sequence[Block] = ()) -> Law:
        kept, taken = (float(part) for part in weights(torch.tensor(self._start, dtype=torch.float64), self.keep))
        static = [] if self.gate == "dynamic" else _learnt(blocks)
        step = Value("t", taken).learnt(taken for _, taken in static)
        fade = Value("1 − t", 1.0 - kept).learnt(1.0 - kept for kept, _ in static)

        def radial(m: Motion) -> torch.Tensor:
            # Both sublayers fade the state, and the second adds nothing; nor does attention where its output is zero.
            cosine = (m.radial / m.attention).masked_fill(m.attention == 0, 0.0)
            return step(m.time) * cosine - 2.0 * fade(m.time) * m.radius

        return Law(
            speed=lambda m: m.radius * m.attention / step(m.time),
            radial=radial,
            values=(step, fade),
            rms=lambda i: math.sqrt(kept ** (2 * i) + taken**2 * sum(kept ** (2 * j) for j in range(i))),
            forward="bounded",
            backward="the skip decays by 1 − t a sublayer",
            note="" if self.gate == "static" else "the law of W = 0; none is known for gates that depend on the state",
        )

    @property
    def _start(self) -> float:
        """The gate t at initialisation."""
        # σ as a tanh, which does not overflow.
        return 0.5 + 0.5 * math.tanh(self.gate_bias / self.temperature / 2.0)


def weights(t: torch.Tensor, keep: Keep) -> tuple[torch.Tensor, torch.Tensor]:
    """(what is kept of the state, what is taken of the update) for a gate t."""
    if keep == "complement":
        return 1.0 - t, t
    return ((1.0 - t) * (1.0 + t)).clamp(min=_LEAST_KEPT).sqrt(), t


def _learnt(blocks: Iterable[Block]) -> list[tuple[float, float]]:
    """For each block, the mean of what attention's step keeps and takes."""
    found = [weights(step.write.gate.value(), step.write.keep) for step in first_steps(blocks)]
    return [(mean(kept), mean(taken)) for kept, taken in found]


class Gate(nn.Module):
    """t = σ((W·x + b)/T) for every channel; without W if `inputs` is 0."""

    def __init__(self, dim: int, start: float, temperature: float, *, inputs: int = 0):
        super().__init__()
        self.start, self.temperature = start, temperature
        self.logit = nn.Parameter(torch.empty(dim, dtype=torch.float32))
        self.project = GateProjection(inputs, dim) if inputs else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.logit, self.start)

    def value(self, state: torch.Tensor | None = None) -> torch.Tensor:
        """The gate for a state; without one, that of W = 0."""
        logit = widen(self.logit)
        if self.project is not None and state is not None:
            logit = logit + self.project(state)
        return torch.sigmoid(logit / self.temperature)

    def extra_repr(self) -> str:
        return f"{self.logit.numel()}, start={self.start:.4g}, temperature={self.temperature:.4g}"


class GatedWrite(Write):
    """(1 − t)⊙x + t⊙f, or √(1 − t²)⊙x + t⊙f; a refined step goes the part dt of the way."""

    def __init__(self, gate: Gate, keep: Keep, dt: float):
        super().__init__()
        self.gate, self.part, self.dt = gate, dt, factor(dt)
        self.keep: Keep = keep

    def forward(self, state: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        kept, taken = weights(self.gate.value(state), self.keep)
        if self.part != 1.0:
            kept, taken = 1.0 - self.dt(1.0 - kept), self.dt(taken)
        return (kept * widen(state) + taken * widen(update)).to(state.dtype)

    def rms_bound(self, state: float, update: float) -> float:
        """See the module's docstring. Over all states a dynamic gate may take any value."""
        keep, take = self._largest()
        triangle = keep * state + take * update
        if self.keep == "variance":
            return triangle
        return min(triangle, math.hypot(math.sqrt(keep) * state, math.sqrt(take) * update))

    def _largest(self) -> tuple[float, float]:
        """The largest factors on state and update."""
        if self.gate.project is not None:
            return 1.0, self.part
        kept, taken = weights(self.gate.value().detach(), self.keep)
        return 1.0 - self.part * (1.0 - float(kept.max())), self.part * float(taken.max())
