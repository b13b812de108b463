"""Experiment metastability: on the circle at low temperature, clusters of tokens persist exponentially long.

Two clusters at a distance Δ approach each other at a speed of order e^{−β(1 − cos Δ)}, so clusters merge one by one,
each merge much later than the one before: a staircase in the logarithm of time. Tokens that have met are replaced by
one particle with their total weight. In logarithmic time the integrator reaches any end time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from normlab.dynamics.config import SimulateConfig
from normlab.dynamics.experiments.result import Findings, PredictionVerdict, judge_prediction
from normlab.dynamics.measure.tails import collapsed_motion
from normlab.dynamics.progress import ProgressCallback
from normlab.dynamics.system import laws
from normlab.dynamics.system.attention import ParticleAttention
from normlab.dynamics.system.clocks import LogClock
from normlab.dynamics.system.flow import Flow, ParticleState, Velocity
from normlab.dynamics.system.integrators import ClockedFlow, DormandPrince, step_factor
from normlab.dynamics.system.systems import initial_state
from normlab.dynamics.view.figures import Figure, make_curve
from normlab.errors import NormLabError
from normlab.schemes.contract.law import Law, Motion

_MET = 1e-6
"""Angle below which two particles are merged."""
_LATE = 1e3
"""Earlier merges are not judged: clusters are still forming, and more than two interact at once."""
_LIMIT = 0.1
"""Tolerance of log₁₀ of a merge time: a factor of 1.26 in a time between 10³ and 10³⁰."""


@dataclass(frozen=True)
class CircleFlow(Flow):
    """The flow on the circle for weighted particles, computed from angles: precise for tiny gaps and forces."""

    mass: Tensor = field(kw_only=True)

    def __call__(self, state: ParticleState) -> Velocity:
        assert isinstance(self.attention, ParticleAttention)
        assert self.law.speed is not None
        angle = torch.atan2(state.theta[..., 1], state.theta[..., 0])
        gaps = angle.unsqueeze(-2) - angle.unsqueeze(-1)
        beta = (self.attention.beta * self.law.temperature(state.time)).reshape(-1, 1, 1)
        weights = self.mass * torch.exp(-2 * beta * (gaps / 2).sin().square())
        weights = weights / weights.sum(-1, keepdim=True)
        across, along = (weights * gaps.sin()).sum(-1), (weights * gaps.cos()).sum(-1)
        motion = Motion(
            time=state.time.unsqueeze(-1).expand_as(state.radius),
            radius=state.radius,
            attention=torch.hypot(across, along),
            radial=along,
            tangent=across.abs(),
        )
        tangent = torch.stack([-state.theta[..., 1], state.theta[..., 0]], dim=-1)
        return Velocity((across / self.law.speed(motion)).unsqueeze(-1) * tangent, self.law.radial(motion))


@dataclass(frozen=True)
class ClusterSnapshot:
    """Angles and weights of the particles right after a merge, or at the start."""

    time: float
    angles: np.ndarray
    masses: np.ndarray

    @property
    def count(self) -> int:
        return len(self.angles)


def run(config: SimulateConfig, tell: ProgressCallback) -> Findings:
    """Simulate one system, merge by merge."""
    if config.dim != 2:
        raise NormLabError(f"metastability is for the circle: dim must be 2, got {config.dim}; leave it out")
    spec, beta = config.scheme[0], config.beta[0]
    law = laws.find_law(spec, config.layers)
    stands = list(_snapshots(config, law, tell))
    times = [max(stand.time, 0.1) for stand in stands]
    rows = [(stand.time, stand.count, _next_merge(stand, beta)) for stand in stands[1:]]
    x = [value for time in times[1:] for value in (time, time)]
    y = [value for a, b in pairwise(stands) for value in (a.count, b.count)]
    return Findings(
        figures=(
            Figure(
                title="Clusters that are left",
                x_label="time",
                y_label="clusters",
                x_log=True,
                curves=(make_curve(spec, [times[0], *x, config.time], [stands[0].count, *y, stands[-1].count]),),
            ),
        ),
        columns=("time of a merge", "clusters left", "next merge by the pair law"),
        rows=tuple(rows),
        verdicts=tuple(_judge(spec, law, stands, beta)),
        notes=(
            f"{config.tokens} tokens on the circle, β = {beta:g}, end time {config.time:g}; tokens less than {_MET:g} "
            "apart are merged; the pair law treats two neighbouring clusters as if alone, and holds where s = 1",
        ),
    )


def _snapshots(config: SimulateConfig, law: Law, tell: ProgressCallback) -> Iterator[ClusterSnapshot]:
    """Yield the particles at the start and after every merge up to the end time."""
    state = initial_state(config.replace(dtype="float64", device="cpu"), (config.seed,))
    order = torch.atan2(state.theta[0, :, 1], state.theta[0, :, 0]).argsort()
    state = state._replace(theta=state.theta[:, order])
    attention = ParticleAttention(beta=torch.tensor([config.beta[0]], dtype=torch.float64))
    flow = CircleFlow(law, attention, mass=torch.ones(config.tokens, dtype=torch.float64))
    method = DormandPrince(tolerance=config.tolerance, clock=LogClock())
    end, tau = method.clock.tau(config.time), torch.zeros(1, dtype=torch.float64)
    step = torch.full_like(tau, 1e-3)
    yield _snapshot(state, flow)
    while float(tau) < end and len(flow.mass) > 1:
        walk = ClockedFlow(flow, method.clock, torch.float64)
        taken = step.clamp_max(end - float(tau))
        ahead, _, error = method.try_step(walk, state, tau, taken, walk.velocity(state, tau))
        step = taken * step_factor(error)
        if float(error) > 1.0:
            continue
        tau, state = tau + taken, ahead
        tell("metastability", float(tau) / end)
        merged = _merged(state, flow)
        if merged is not None:
            state, flow = merged
            yield _snapshot(state, flow)


def _merged(state: ParticleState, flow: CircleFlow) -> tuple[ParticleState, CircleFlow] | None:
    """Replace neighbours that have met by one particle at their centre of mass; None if none have met."""
    following = state.theta.roll(-1, 1)
    apart = torch.linalg.vector_norm(following - state.theta, dim=-1)[0]
    if not bool((apart < _MET).any()):
        return None
    # A group starts after a wide gap; the circle is cut open at one such gap.
    first = int((apart.roll(1) >= _MET).nonzero()[0]) if bool((apart >= _MET).any()) else 0
    theta, radius = state.theta.roll(-first, 1), state.radius.roll(-first, 1)
    mass, wide = flow.mass.roll(-first), apart.roll(1).roll(-first) >= _MET
    wide[0] = True
    group = wide.cumsum(0) - 1
    total = mass.new_zeros(int(group[-1]) + 1).index_add(0, group, mass)
    share = (mass / total[group]).unsqueeze(-1)
    centre = theta.new_zeros(len(total), 2).index_add(0, group, share * theta[0])
    sizes = radius.new_zeros(len(total)).index_add(0, group, share[:, 0] * radius[0])
    moved = state.moved(centre.unsqueeze(0), sizes.unsqueeze(0), state.time)
    return moved, CircleFlow(flow.law, flow.attention, mass=total)


def _snapshot(state: ParticleState, flow: CircleFlow) -> ClusterSnapshot:
    angles = torch.atan2(state.theta[0, :, 1], state.theta[0, :, 0]).numpy()
    return ClusterSnapshot(time=float(state.time), angles=angles.copy(), masses=flow.mass.numpy().copy())


def _next_merge(stand: ClusterSnapshot, beta: float) -> float | None:
    """Predicted time of the next merge, treating every pair of neighbours as if it were alone."""
    if stand.count < 2:
        return None
    gaps = np.mod(np.roll(stand.angles, -1) - stand.angles, 2 * math.pi)
    times = [
        _pair_time(float(gap), float(a), float(b), beta)
        for gap, a, b in zip(gaps, stand.masses, np.roll(stand.masses, -1), strict=True)
    ]
    return stand.time + min(times)


def _pair_time(gap: float, first: float, second: float, beta: float) -> float:
    """∫ dΔ / speed for two clusters alone: each moves by sin Δ times its softmax weight on the other."""
    if gap >= math.pi:
        return math.inf
    # Nearly all of the time is spent within 1/(βΔ) of the initial gap: the grid is geometric around it.
    x = gap - np.concatenate([[0.0], np.geomspace(1e-6, 1.0, 4000) * (gap - _MET)])
    pull = np.exp(-2 * beta * np.sin(x / 2) ** 2)
    speed = np.sin(x) * (second * pull / (first + second * pull) + first * pull / (second + first * pull))
    with np.errstate(divide="ignore", over="ignore"):
        slowness = 1 / speed
        return float(np.sum((x[:-1] - x[1:]) * (slowness[:-1] + slowness[1:]) / 2))


def _judge(spec: str, law: Law, stands: list[ClusterSnapshot], beta: float) -> list[PredictionVerdict]:
    """Compare late merges with the pair law, for laws with s = 1 at all times."""
    assert law.speed is not None
    moments = torch.tensor([0.0, 10.0, 1e6], dtype=torch.float64)
    if not bool((law.speed(collapsed_motion(law, moments, torch.ones_like(moments))) == 1).all()):
        return []
    verdicts = []
    for before, after in pairwise(stands):
        predicted = _next_merge(before, beta)
        if before.time >= _LATE and predicted is not None:
            measured = math.log10(after.time)
            quantity = f"log₁₀ of the time at which {after.count} are left"
            verdicts.append(judge_prediction(spec, quantity, measured, math.log10(predicted), _LIMIT))
    return verdicts
