"""ODE integrators on the sphere: Runge-Kutta 4 with a fixed step, Dormand-Prince with an adaptive step.

Every stage is projected to the sphere. This does not reduce the order: the velocity field depends on directions alone,
so it extends to all of space, and exact solutions of the extension stay on the sphere. Steps are taken in the time of
a clock. With an adaptive step every system of a batch has its own step size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from normlab.dynamics.system.clocks import Clock, PlainClock
from normlab.dynamics.system.flow import Flow, ParticleState, Velocity, dot, length
from normlab.dynamics.system.small_systems import limit_threads
from normlab.errors import NormLabError

_SMALLEST = 1e-12
"""Smallest adaptive step, relative to the end time; below it the integration fails."""


_STEADY = 2.785
"""Stability limit of classical Runge-Kutta: largest product of step and decay rate."""
_SHAKEN = 0.01
"""Rotation of a token in one step, in radians, below which stability is not checked: it is mostly rounding error."""


class Integrator(ABC):
    """Base class of integrators."""

    clock: Clock

    def orbit(self, flow: Flow, start: ParticleState, times: Sequence[float]) -> Iterator[ParticleState]:
        """Yield the state at each of the times, in increasing order."""
        state, walk = start, ClockedFlow(flow, self.clock, start.time.dtype)
        # Not the state's own time: rounded up, it would lie beyond a switch that was not passed yet.
        now = float(start.time[0])
        for time in times:
            for goal in walk.stops(now, time):
                with limit_threads(state.theta):
                    state = self.integrate_to(walk, state, goal)
                check_state(state)
                if goal in flow.law.switches and flow.law.resets_radius:
                    state = state._replace(radius=torch.ones_like(state.radius))
            now = time
            yield state

    @abstractmethod
    def integrate_to(self, walk: ClockedFlow, state: ParticleState, goal: float) -> ParticleState:
        """Return the state at the time `goal`; the flow is continuous until then."""


@dataclass
class ClockedFlow:
    """A flow in the time of a clock, between two discontinuities."""

    flow: Flow
    clock: Clock
    dtype: torch.dtype
    """Type of time tensors."""
    begin: float = -math.inf
    below: float = math.inf
    """Interval of continuity; at its end the limit from below is taken."""
    step: Tensor | None = None
    """Next step size of each system, for adaptive integrators."""

    def stops(self, begin: float, end: float) -> Iterator[float]:
        """Yield the times at which to stop between `begin` and `end`: every discontinuity, and the end."""
        for stop in (*self.flow.switches(begin, end), end):
            # In the precision of the state: rounded up, the time would belong to the next layer.
            last, first = (torch.tensor(time, dtype=self.dtype) for time in (stop, begin))
            self.begin, self.below = begin, float(torch.nextafter(last, first))
            yield stop
            begin = stop

    def velocity(self, state: ParticleState, tau: Tensor) -> Velocity:
        """Velocity with respect to the time of the clock."""
        velocity = self.flow(state._replace(time=state.time.clamp(self.begin, self.below)))
        rate = self.clock.rate(tau)
        return Velocity(velocity.theta.mul_(rate.reshape(-1, 1, 1)), velocity.radius * rate.unsqueeze(-1))

    def advance(self, state: ParticleState, tau: Tensor, step: Tensor, velocity: Velocity) -> ParticleState:
        """Explicit Euler step along a velocity."""
        theta = torch.addcmul(state.theta, step.reshape(-1, 1, 1), velocity.theta)
        radius = torch.addcmul(state.radius, step.unsqueeze(-1), velocity.radius)
        return state.moved(theta, radius, self.clock.time(tau + step))


@dataclass(frozen=True, kw_only=True)
class RungeKutta4(Integrator):
    """Classical Runge-Kutta method of order four with a fixed step."""

    step: float = 0.05
    clock: Clock = field(default_factory=PlainClock)

    def __post_init__(self) -> None:
        if not self.step > 0:
            raise NormLabError(f"a step is positive, got {self.step}; try 0.05")

    def integrate_to(self, walk: ClockedFlow, state: ParticleState, goal: float) -> ParticleState:
        begin, end = self.clock.tau(float(state.time[0])), self.clock.tau(goal)
        count = math.ceil((end - begin) / self.step - 1e-9)
        step = torch.full_like(state.time, (end - begin) / max(count, 1))
        for k in range(count):
            state = self._advance(walk, state, begin + k * step, step)
        return state._replace(time=torch.full_like(state.time, goal))

    def _advance(self, walk: ClockedFlow, state: ParticleState, tau: Tensor, step: Tensor) -> ParticleState:
        half = step / 2
        first = walk.velocity(state, tau)
        second = walk.velocity(walk.advance(state, tau, half, first), tau + half)
        third = walk.velocity(walk.advance(state, tau, half, second), tau + half)
        fourth = walk.velocity(walk.advance(state, tau, step, third), tau + step)
        _check_stability(step, state, first, second, third)
        mean = _combine((1 / 6, 1 / 3, 1 / 3, 1 / 6), (first, second, third, fourth))
        return walk.advance(state, tau, step, mean)


def _check_stability(step: Tensor, state: ParticleState, first: Velocity, second: Velocity, third: Velocity) -> None:
    """Raise if the step is beyond the stability limit, estimated from the differences of the stages."""
    off, bent = ((b.theta - a.theta).flatten(1) for a, b in ((first, second), (second, third)))
    decay, turned = -2 * dot(bent, off), step * length(second.theta).amax(-1)
    if bool(((decay > _STEADY * dot(off, off)) & (turned > _SHAKEN)).any()):
        raise NormLabError(
            f"rk4: a step is too long for this law at time {float(state.time.max()):g}, and tokens shake; "
            "try the method dopri, or a smaller step"
        )


# Butcher tableau of Dormand-Prince 5(4): nodes, rows of the stages, and error weights of all seven stages.
NODES = (1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)
STAGES = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)


@dataclass(frozen=True, kw_only=True)
class DormandPrince(Integrator):
    """Dormand-Prince 5(4) with an adaptive step; each system of a batch has its own step size."""

    tolerance: float = 1e-8
    """Error tolerance of one step: of a token's direction, and of its radius relative to the radius."""
    clock: Clock = field(default_factory=PlainClock)
    most_steps: int = 1_000_000

    def __post_init__(self) -> None:
        if not self.tolerance > 0:
            raise NormLabError(f"a tolerance is positive, got {self.tolerance}; try 1e-8")

    def integrate_to(self, walk: ClockedFlow, state: ParticleState, goal: float) -> ParticleState:
        """Step until every system reaches the goal; systems that arrived take steps of size zero."""
        tau = torch.full_like(state.time, self.clock.tau(float(state.time[0])))
        end = self.clock.tau(goal)
        slope = walk.velocity(state, tau)
        step = self._first_step(slope) if walk.step is None else walk.step
        for _ in range(self.most_steps):
            left = (end - tau).clamp_min(0.0)
            if not bool((left > 0).any()):
                walk.step = step
                return state._replace(time=torch.full_like(state.time, goal))
            self._check_step((tau + step - tau)[left > 0], state, end)
            arrives = step >= left
            # The part of the step that τ takes in its precision: late times would lag behind the state otherwise.
            taken = torch.where(arrives, left, tau + step - tau)
            ahead, ahead_slope, error = self.try_step(walk, state, tau, taken, slope)
            good = error <= 1.0
            state, slope = ParticleState(*_choose(good, ahead, state)), Velocity(*_choose(good, ahead_slope, slope))
            tau = torch.where(good, torch.where(arrives, end, tau + taken), tau)
            # A step shortened to arrive at the goal does not reduce the next one.
            grown = taken * step_factor(error)
            step = torch.where(arrives & good, torch.maximum(step, grown), grown)
        raise NormLabError(f"{self.most_steps} steps did not reach the horizon; a shorter one, or a larger tolerance?")

    def _first_step(self, slope: Velocity) -> Tensor:
        """Initial step size: fifth power of the rotation about equal to the tolerance."""
        return 0.1 * self.tolerance**0.2 / length(slope.theta).amax(-1).clamp_min(1e-3)

    def _check_step(self, step: Tensor, state: ParticleState, end: float) -> None:
        if bool((step < _SMALLEST * max(end, 1.0)).any()):
            raise NormLabError(
                f"the step shrank to nothing at time {float(state.time.min()):g}; "
                "the law is not smooth there, or the tolerance is below what this precision can hold"
            )

    def try_step(
        self, walk: ClockedFlow, state: ParticleState, tau: Tensor, step: Tensor, slope: Velocity
    ) -> tuple[ParticleState, Velocity, Tensor]:
        """Return the state after one step of each system, the velocity there, and the error over the tolerance."""
        slopes, ahead = [slope], state
        for node, row in zip(NODES, STAGES, strict=True):
            ahead = walk.advance(state, tau, node * step, _combine([weight / node for weight in row], slopes))
            slopes.append(walk.velocity(ahead, tau + node * step))
        wrong = _combine(ERROR, slopes)
        turned = length(wrong.theta).amax(-1)
        grown = (wrong.radius / ahead.radius.abs().clamp_min(torch.finfo(tau.dtype).tiny)).abs().amax(-1)
        error = step * torch.maximum(turned, grown) / self.tolerance
        # A step with an error that is not finite is rejected.
        return ahead, slopes[-1], torch.where(error.isfinite(), error, torch.full_like(error, 1e30))


def step_factor(error: Tensor) -> Tensor:
    """Factor from this step size to the next, by the error over the tolerance."""
    return (0.9 * error.clamp_min(1e-10).pow(-0.2)).clamp(0.2, 5.0)


def _combine(weights: Sequence[float], slopes: Sequence[Velocity]) -> Velocity:
    pairs = [(weight, slope) for weight, slope in zip(weights, slopes, strict=True) if weight]
    theta, radius = pairs[0][0] * pairs[0][1].theta, pairs[0][0] * pairs[0][1].radius
    for weight, slope in pairs[1:]:
        theta, radius = theta.add_(slope.theta, alpha=weight), radius.add_(slope.radius, alpha=weight)
    return Velocity(theta, radius)


def _choose(good: Tensor, new: Sequence[Tensor], old: Sequence[Tensor]) -> list[Tensor]:
    """Per system: `new` where `good`, else `old`."""
    return [torch.where(good.reshape(-1, *[1] * (a.ndim - 1)), a, b) for a, b in zip(new, old, strict=True)]


def check_state(state: ParticleState) -> None:
    """Raise if the state is not finite or a radius is not positive."""
    if not bool(state.theta.isfinite().all() and state.radius.isfinite().all()):
        raise NormLabError(
            f"the flow is not finite at time {float(state.time.max()):g}; "
            "does the law divide by zero, or e^β overflow without a softmax?"
        )
    if not bool((state.radius > 0).all()):
        raise NormLabError(
            f"a radius reached zero at time {float(state.time.max()):g}: the direction of that token is lost; "
            "start with larger radii, or a smaller residual step"
        )
