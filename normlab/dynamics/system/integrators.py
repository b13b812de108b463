"""Integrators that stay on the sphere: Runge-Kutta with every stage projected, of fixed or of controlled step.

A field that looks at directions alone extends to all of space, and the exact orbit of the extension never leaves the
sphere: projecting the stages therefore costs no order. Steps are taken in the time of a clock; systems of a batch have
steps of their own where the step is controlled.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from normlab.dynamics.system.clocks import Clock, Plain
from normlab.dynamics.system.flow import Flow, ParticleState, Velocity, dot, length
from normlab.dynamics.system.threads import suited
from normlab.errors import NormLabError

_SMALLEST = 1e-12
"""Step, in units of the horizon, at which a controlled integration gives up."""


_STEADY = 2.785
"""Step times rate of decay up to which the classical Runge-Kutta method is stable."""
_SHAKEN = 0.01
"""Turn of a token in a step, in radians, below which nothing is said: what is nearly at rest is nearly all rounding."""


class Method(ABC):
    """A way to follow a flow."""

    clock: Clock

    def orbit(self, flow: Flow, start: ParticleState, times: Sequence[float]) -> Iterator[ParticleState]:
        """The state at each of the times, which rise."""
        state, walk = start, ClockedFlow(flow, self.clock, start.time.dtype)
        for time in times:
            for goal in walk.stops(float(state.time[0]), time):
                with suited(state.theta):
                    state = self.reach(walk, state, goal)
                check(state)
                if goal in flow.law.switches and flow.law.resets_radius:
                    state = state._replace(radius=torch.ones_like(state.radius))
            yield state

    @abstractmethod
    def reach(self, walk: ClockedFlow, state: ParticleState, goal: float) -> ParticleState:
        """The state at the time `goal`, with no switch of the law on the way."""


@dataclass
class ClockedFlow:
    """A flow in the time of a clock, between two switches of its law."""

    flow: Flow
    clock: Clock
    dtype: torch.dtype
    """Of times."""
    begin: float = -math.inf
    below: float = math.inf
    """Where the flow holds; what is asked for at its end is the limit from below."""
    step: Tensor | None = None
    """The step that each system would take next, where it is controlled."""

    def stops(self, begin: float, end: float) -> Iterator[float]:
        """Where to stop on the way from `begin` to `end`: at every switch, and at the end."""
        for stop in (*self.flow.switches(begin, end), end):
            # In the state's own precision: rounded up, it would be the next layer's.
            last, first = (torch.tensor(time, dtype=self.dtype) for time in (stop, begin))
            self.begin, self.below = begin, float(torch.nextafter(last, first))
            yield stop
            begin = stop

    def velocity(self, state: ParticleState, tau: Tensor) -> Velocity:
        """The velocity in the clock's time."""
        velocity = self.flow(state._replace(time=state.time.clamp(self.begin, self.below)))
        rate = self.clock.rate(tau)
        return Velocity(velocity.theta.mul_(rate.reshape(-1, 1, 1)), velocity.radius * rate.unsqueeze(-1))

    def ahead(self, state: ParticleState, tau: Tensor, step: Tensor, velocity: Velocity) -> ParticleState:
        """Where a velocity leads."""
        theta = torch.addcmul(state.theta, step.reshape(-1, 1, 1), velocity.theta)
        radius = torch.addcmul(state.radius, step.unsqueeze(-1), velocity.radius)
        return state.moved(theta, radius, self.clock.time(tau + step))


@dataclass(frozen=True, kw_only=True)
class RungeKutta4(Method):
    """The classical method, of fourth order."""

    step: float = 0.05
    clock: Clock = field(default_factory=Plain)

    def __post_init__(self) -> None:
        if not self.step > 0:
            raise NormLabError(f"a step is positive, got {self.step}; try 0.05")

    def reach(self, walk: ClockedFlow, state: ParticleState, goal: float) -> ParticleState:
        begin, end = self.clock.tau(float(state.time[0])), self.clock.tau(goal)
        count = math.ceil((end - begin) / self.step - 1e-9)
        step = torch.full_like(state.time, (end - begin) / max(count, 1))
        for k in range(count):
            state = self._advance(walk, state, begin + k * step, step)
        return state._replace(time=torch.full_like(state.time, goal))

    def _advance(self, walk: ClockedFlow, state: ParticleState, tau: Tensor, step: Tensor) -> ParticleState:
        half = step / 2
        first = walk.velocity(state, tau)
        second = walk.velocity(walk.ahead(state, tau, half, first), tau + half)
        third = walk.velocity(walk.ahead(state, tau, half, second), tau + half)
        fourth = walk.velocity(walk.ahead(state, tau, step, third), tau + step)
        _check_steady(step, state, first, second, third)
        mean = _combine((1 / 6, 1 / 3, 1 / 3, 1 / 6), (first, second, third, fourth))
        return walk.ahead(state, tau, step, mean)


def _check_steady(step: Tensor, state: ParticleState, first: Velocity, second: Velocity, third: Velocity) -> None:
    """How far apart the stages lie says what a step makes of a deviation: beyond a limit tokens shake for ever."""
    off, bent = ((b.theta - a.theta).flatten(1) for a, b in ((first, second), (second, third)))
    decay, turned = -2 * dot(bent, off), step * length(second.theta).amax(-1)
    if bool(((decay > _STEADY * dot(off, off)) & (turned > _SHAKEN)).any()):
        raise NormLabError(
            f"rk4: a step is too long for this law at time {float(state.time.max()):g}, and tokens shake; "
            "try the method dopri, or a smaller step"
        )


# Dormand and Prince's fifth-order pair: the rows of the stages, and the error as a combination of all seven.
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
class DormandPrince(Method):
    """Fifth order with an error estimate: each system of a batch takes steps of its own size."""

    tolerance: float = 1e-8
    """Largest error of a token's direction, and of its radius relative to it, in one step."""
    clock: Clock = field(default_factory=Plain)
    most_steps: int = 1_000_000

    def __post_init__(self) -> None:
        if not self.tolerance > 0:
            raise NormLabError(f"a tolerance is positive, got {self.tolerance}; try 1e-8")

    def reach(self, walk: ClockedFlow, state: ParticleState, goal: float) -> ParticleState:
        """Steps until every system stands at the goal; those that are there wait with a step of zero."""
        tau = torch.full_like(state.time, self.clock.tau(float(state.time[0])))
        end = self.clock.tau(goal)
        slope = walk.velocity(state, tau)
        step = self._first_step(slope) if walk.step is None else walk.step
        for _ in range(self.most_steps):
            left = (end - tau).clamp_min(0.0)
            if not bool((left > 0).any()):
                walk.step = step
                return state._replace(time=torch.full_like(state.time, goal))
            self._check_step(step[left > 0], state, end)
            arrives = step >= left
            taken = torch.where(arrives, left, step)
            ahead, ahead_slope, error = self.attempt(walk, state, tau, taken, slope)
            good = error <= 1.0
            state, slope = ParticleState(*_choose(good, ahead, state)), Velocity(*_choose(good, ahead_slope, slope))
            tau = torch.where(good, torch.where(arrives, end, tau + taken), tau)
            # A step that was cut short to arrive says nothing against the longer one.
            grown = taken * factor(error)
            step = torch.where(arrives & good, torch.maximum(step, grown), grown)
        raise NormLabError(f"{self.most_steps} steps did not reach the horizon; a shorter one, or a larger tolerance?")

    def _first_step(self, slope: Velocity) -> Tensor:
        """A step whose fifth power of turning is about the tolerance."""
        return 0.1 * self.tolerance**0.2 / length(slope.theta).amax(-1).clamp_min(1e-3)

    def _check_step(self, step: Tensor, state: ParticleState, end: float) -> None:
        if bool((step < _SMALLEST * max(end, 1.0)).any()):
            raise NormLabError(
                f"the step shrank to nothing at time {float(state.time.min()):g}; "
                "the law is not smooth there, or the tolerance is below what this precision can hold"
            )

    def attempt(
        self, walk: ClockedFlow, state: ParticleState, tau: Tensor, step: Tensor, slope: Velocity
    ) -> tuple[ParticleState, Velocity, Tensor]:
        """One step of each system, the slope at its end, and its error in units of the tolerance."""
        slopes, ahead = [slope], state
        for node, row in zip(NODES, STAGES, strict=True):
            ahead = walk.ahead(state, tau, node * step, _combine([weight / node for weight in row], slopes))
            slopes.append(walk.velocity(ahead, tau + node * step))
        wrong = _combine(ERROR, slopes)
        turned = length(wrong.theta).amax(-1)
        grown = (wrong.radius / ahead.radius.abs().clamp_min(torch.finfo(tau.dtype).tiny)).abs().amax(-1)
        error = step * torch.maximum(turned, grown) / self.tolerance
        # What is not finite is no step to take, however it compares.
        return ahead, slopes[-1], torch.where(error.isfinite(), error, torch.full_like(error, 1e30))


def factor(error: Tensor) -> Tensor:
    """By how much the next step may differ from this one."""
    return (0.9 * error.clamp_min(1e-10).pow(-0.2)).clamp(0.2, 5.0)


def _combine(weights: Sequence[float], slopes: Sequence[Velocity]) -> Velocity:
    pairs = [(weight, slope) for weight, slope in zip(weights, slopes, strict=True) if weight]
    theta, radius = pairs[0][0] * pairs[0][1].theta, pairs[0][0] * pairs[0][1].radius
    for weight, slope in pairs[1:]:
        theta, radius = theta.add_(slope.theta, alpha=weight), radius.add_(slope.radius, alpha=weight)
    return Velocity(theta, radius)


def _choose(good: Tensor, new: Sequence[Tensor], old: Sequence[Tensor]) -> list[Tensor]:
    """System by system the new or the old."""
    return [torch.where(good.reshape(-1, *[1] * (a.ndim - 1)), a, b) for a, b in zip(new, old, strict=True)]


def check(state: ParticleState) -> None:
    """Radii are positive and numbers are numbers, or the run ends and says so."""
    if not bool(state.theta.isfinite().all() and state.radius.isfinite().all()):
        raise NormLabError(f"the flow is not finite at time {float(state.time.max()):g}; does the law divide by zero?")
    if not bool((state.radius > 0).all()):
        raise NormLabError(
            f"a radius reached zero at time {float(state.time.max()):g}: the direction of that token is lost; "
            "start with larger radii, or a smaller residual step"
        )
