"""A short training burst of one model, profiled at its first step and at the step after the last.

Both profiles are of real steps, optimiser included. A loss or gradient that is not finite ends the burst at that step:
the last profile is then that of the batch and the weights that made it, so that it can name the module.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from normlab.checks.isolation import fresh_model, quiet_numbers
from normlab.checks.judge.verdict import plain
from normlab.checks.structure.gradients import GradientTrace
from normlab.errors import NormLabError
from normlab.models.estimate import count_parameters
from normlab.probes.blocks import find_stacks
from normlab.probes.probe import Probe, probe
from normlab.probes.profile import Number, Profile
from normlab.targets.target import Target

T = TypeVar("T")
Inspect = Callable[[nn.Module, Profile], None]

BETAS = (0.9, 0.95)

_AUTO_LR, _AUTO_SHARE = 1e-3, 8e-3
"""Adam's first steps move every weight by about the rate: 1e-3 is this share of Xavier's 1/√64."""


@dataclass(frozen=True, kw_only=True)
class Burst:
    """Profiles and losses of a burst, by stack; the stack with most blocks comes first."""

    before: dict[str, Profile]
    after: dict[str, Profile]
    """Profiles after the training steps; empty if the first step failed."""
    losses: list[Number]
    """Loss of every step in nats per token; None if it was not finite."""
    lr: float
    seconds: float
    """Duration of the training steps, without building and inspecting the model."""
    parameters: int
    gradients: GradientTrace = field(default_factory=GradientTrace)
    """Which parameters received a gradient."""


def burst(
    target: Target,
    *,
    depth: int | None = None,
    width: int | None = None,
    seed: int = 0,
    steps: int = 30,
    lr: float | Literal["auto"] = "auto",
    inspect: Inspect | None = None,
) -> Burst:
    """Build the target, train it for `steps` steps, and profile it before and after.

    `inspect(model, profile)` is called after either one, with the profile of the stack with most blocks.
    """
    with quiet_numbers(), fresh_model(target, depth=depth, width=width, seed=seed) as model:
        rate = auto_lr(target, model) if lr == "auto" else lr
        course, watch = _Course(target, model, rate, seed), _Stopwatch()
        before = watch.time(lambda: course.look(0))
        if inspect is not None:
            inspect(model, _largest(before))
        after = watch.time(lambda: course.go_on(steps))
        if after and inspect is not None:
            inspect(model, _largest(after))
        count = count_parameters(model)
    return Burst(
        before=before, after=after, losses=course.losses, lr=rate, seconds=watch.seconds, parameters=count,
        gradients=course.gradients,
    )  # fmt: skip


def train(
    target: Target, *, depth: int | None = None, seed: int = 0, steps: int, lr: float, highest: float = math.inf
) -> list[Number]:
    """Train without profiles and return the losses; stops at a loss that is not finite or above `highest`.

    A gradient that is not finite ends it, too: the step was not taken, so there is no loss (None) of the next.
    """
    with quiet_numbers(), fresh_model(target, depth=depth, seed=seed) as model:
        course = _Course(target, model, lr, seed)
        for _ in range(steps):
            loss = course.step()
            if course.broken or float(loss) > highest:
                break
    broke_behind_the_loss = course.broken and course.losses[-1] is not None
    return [*course.losses, None] if broke_behind_the_loss else course.losses


class _Stopwatch:
    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = work()
        self.seconds += time.perf_counter() - start
        return result


class _Course:
    """A model in training, with its batches and optimiser."""

    def __init__(self, target: Target, model: nn.Module, lr: float, seed: int):
        self.target, self.model, self.seed = target, model, seed
        self.losses: list[Number] = []
        self.broken = False
        self.gradients = GradientTrace()
        self._optimiser = adamw(target, model, lr)
        self._batches = target.batches(seed)
        self._batch: Any = None

    def look(self, step: int) -> dict[str, Profile]:
        """Take a step and profile it."""
        with self._probe(step) as seen:
            loss = self.step()
            seen.record(loss=loss)
        return seen.profiles

    def go_on(self, steps: int) -> dict[str, Profile]:
        """Take the steps after the first; profile step `steps`, or the one that broke the model."""
        if self.broken:
            return {}
        for step in range(1, steps):
            self.step()
            if self.broken:
                return self._look_again(step)
        return self.look(steps)

    def step(self) -> torch.Tensor:
        """The loss of the next batch; the optimiser acts on it unless it, or a gradient, is not finite."""
        self._batch = next(self._batches)
        loss = self._backward()
        value, largest = float(loss), self.gradients.take(self.model)
        self.losses.append(plain(value))
        self.broken = not (math.isfinite(value) and math.isfinite(largest))
        if not self.broken:
            self._optimiser.step()
            self.target.after_step(self.model)
        return loss

    def _look_again(self, step: int) -> dict[str, Profile]:
        """Profile the batch that broke the model, whose weights have not been updated."""
        with self._probe(step) as seen:
            seen.record(loss=self._backward())
        return seen.profiles

    def _backward(self) -> torch.Tensor:
        self._optimiser.zero_grad()
        loss = self.target.loss(self.model, self._batch)
        loss.backward()
        return loss.detach()

    def _probe(self, step: int) -> AbstractContextManager[Probe]:
        return probe(self.model, blocks=self.target.blocks, step=step, seed=self.seed, want_gradients=True)


def auto_lr(target: Target, model: nn.Module | None = None) -> float:
    """Automatic learning rate: the relative update of the blocks' matrices is that of schemes; at most 1e-3.

    A burst has no time for a warm-up: 1e-3 moves matrices that start at 0.02 by a twentieth a step, and breaks designs
    that are known to train. Schemes are built alike, whatever they make of their weights: they get one rate.
    Without a model one is built, where one is needed.
    """
    if target.kind == "scheme":
        return _AUTO_LR
    model = target.build() if model is None else model
    blocks = [block for stack in find_stacks(model, target.blocks) for block in stack.blocks]
    matrices = [p.detach() for block in blocks for p in block.parameters() if p.ndim >= 2 and p.numel()]
    sizes = [matrix.float().square().mean().sqrt() for matrix in matrices]
    size = float(torch.stack(sizes).median()) if sizes else 1.0
    return min(_AUTO_SHARE * size, _AUTO_LR) if size > 0.0 else _AUTO_LR


def adamw(target: Target, model: nn.Module, lr: float) -> Optimizer:
    """AdamW without weight decay, in the groups that the target asks for."""
    groups = target.param_groups(model, lr, 0.0)
    if not any(group["params"] for group in groups):
        raise NormLabError(f"{target.name} has no parameter that can be trained; unfreeze some of its blocks")
    fused = all(p.device.type in ("cuda", "cpu") for group in groups for p in group["params"])
    return AdamW(groups, lr=lr, betas=BETAS, weight_decay=0.0, fused=fused)


def _largest(profiles: dict[str, Profile]) -> Profile:
    return next(iter(profiles.values()))
