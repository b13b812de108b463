"""Workload of a run: steps, evaluations and other milestones, remaining work, expected memory and time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from normlab.train.config import TrainConfig
from normlab.train.distributed import Group
from normlab.train.hardware import describe
from normlab.utils.text import counted, duration, size

_FORWARD = 1 / 3
"""Cost of a forward pass relative to a training step on as many tokens: the backward pass costs twice as much."""
_USUAL_SHARE = 0.4
"""Fraction of the measured peak FLOP/s that a run usually reaches, for the first estimate of its time."""

_PROFILES = 4
"""Per-layer profiles during a run, besides the one before its first step."""


@dataclass(frozen=True)
class Milestones:
    """Steps after which a run does more than train."""

    evals: frozenset[int]
    profiles: frozenset[int]
    saves: frozenset[int]
    branches: frozenset[int]
    """Where the state is kept for runs with smaller budgets."""

    @classmethod
    def of(cls, config: TrainConfig) -> Milestones:
        """The milestones of a run; a trunk has those of its branches as well, up to the step where they branch off."""
        evals, profiles = milestones(config.evals, config.steps), milestones(_PROFILES, config.steps)
        for branch in map(config.branch, config.branches):
            of_branch = cls.of(branch)
            evals |= {step for step in of_branch.evals if step <= branch.branch_step}
            profiles |= {step for step in of_branch.profiles if step <= branch.branch_step}
        saves, branches = milestones(config.saves, config.steps), config.branch_steps
        return cls(*map(frozenset, (evals, profiles, saves, branches)))

    @property
    def all(self) -> frozenset[int]:
        return self.evals | self.profiles | self.saves | self.branches


@dataclass(frozen=True)
class Workload:
    """The training steps of a run and its evaluations."""

    steps: int
    tokens_a_step: int
    evals: tuple[int, ...]
    """Steps after which the model is evaluated; the last step is one of them."""
    tokens_an_eval: int
    """Tokens of an evaluation, padding included."""
    tokens_of_sets: int = 0
    """Tokens of the evaluation of further validation sets at the end, padding included."""

    @classmethod
    def of(cls, config: TrainConfig, data: Any) -> Workload:
        """The workload of a run on its data."""
        sets = config.task_object.validation_sets(data).values()
        main, *others = (_evaluated_tokens(config, part) for part in (data, *sets))
        evals = Milestones.of(config).evals | {config.steps}
        return cls(config.steps, config.batch * config.sequence, tuple(sorted(evals)), main, sum(others))

    def evaluation(self, after: int = 0) -> float:
        """Work of the evaluations after a step, in training tokens of the same cost."""
        tokens = self.tokens_an_eval * sum(step > after for step in self.evals) + self.tokens_of_sets
        return _FORWARD * tokens

    def left(self, after: int = 0) -> float:
        """All work after a step, in training tokens of the same cost."""
        return (self.steps - after) * self.tokens_a_step + self.evaluation(after)


def evaluation_batch(config: TrainConfig, data: Any, world: int = 1) -> int:
    """Samples of an evaluation batch in one process: those of a training batch, or several times as many.

    A small validation set is not padded to more than it needs: every size of a batch is compiled.
    """
    task, batch = config.task_object, max(1, config.batch // config.accumulate // world)
    larger = task.evaluated_at_once * batch
    return larger if task.evaluation_samples(config, data) >= larger * world else batch


def _evaluated_tokens(config: TrainConfig, data: Any) -> int:
    """Tokens of an evaluation in one process, padding included."""
    batch = evaluation_batch(config, data)
    return math.ceil(config.task_object.evaluation_samples(config, data) / batch) * batch * config.sequence


def milestones(count: int, steps: int) -> set[int]:
    """`count` evenly spaced steps, the last one included."""
    count = min(count, steps)
    return {steps * i // count for i in range(1, count + 1)}


def training_seconds(config: TrainConfig, ceiling: float, devices: int = 1) -> float:
    """First estimate of the time of a run's steps; `ceiling` is the peak FLOP/s of one device."""
    return config.tokens_in_all / _usual_speed(config, ceiling, devices)


def _usual_speed(config: TrainConfig, ceiling: float, devices: int) -> float:
    """Tokens a second that a run usually reaches."""
    return _USUAL_SHARE * ceiling * devices / config.model.flops_per_token(config.sequence)


def expectation(
    config: TrainConfig, group: Group, work: Workload, *, precision: str, compiles: bool, ceiling: float
) -> str:
    """Expected memory and time of a run in one line; `ceiling` is the peak FLOP/s of one device."""
    part = config.batch // (config.accumulate * group.world)
    eager = config.model.memory(part, config.sequence, precision=precision)
    memory = (eager.compiled() if compiles and group.device.type == "cuda" else eager).total
    speed = _usual_speed(config, ceiling, group.world)
    return (
        f"{config.model.num_params():,} parameters, {config.steps:,} steps of {config.batch} × {config.sequence} "
        f"tokens on {describe(group.device)} ({ceiling / 1e12:.3g} TFLOP/s in products); "
        f"expect about {size(memory)} and {duration(work.left() / speed)}, of which "
        f"{duration(work.evaluation() / speed)} for {counted(len(work.evals), 'evaluation')} "
        f"of {work.tokens_an_eval:,} tokens"
    )
