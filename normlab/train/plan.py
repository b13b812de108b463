"""The work of a run: training steps, evaluations between them, and an estimate of memory and time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from normlab.train.config import TrainConfig
from normlab.train.distributed import Group
from normlab.train.hardware import describe
from normlab.utils.text import counted, duration, size

_FORWARD = 1 / 3
"""Cost of a forward pass, as a share of a training step's on as many tokens: the backward pass costs two of them."""

_USUAL_SHARE = 0.4
"""Share of the matrix-product ceiling that a run is expected to reach."""


@dataclass(frozen=True)
class Course:
    """The steps of a run and its evaluations."""

    steps: int
    tokens_a_step: int
    evals: tuple[int, ...]
    """Steps after which the model is evaluated, the last one among them."""
    tokens_an_eval: int
    """Padding included: it is computed as well."""

    @classmethod
    def of(cls, config: TrainConfig, data: Any) -> Course:
        """The course of a run on its data."""
        steps, batch = config.steps, max(1, config.batch // config.accumulate)
        batches = math.ceil(config.task_object.evaluation_samples(config, data) / batch)
        evals = milestones(config.evals, steps) | {steps}
        return cls(steps, config.batch * config.sequence, tuple(sorted(evals)), batches * batch * config.sequence)

    def evaluation(self, after: int = 0) -> float:
        """Work of the evaluations after a step, in tokens of training that cost as much."""
        return _FORWARD * self.tokens_an_eval * sum(step > after for step in self.evals)

    def left(self, after: int = 0) -> float:
        """All work after a step, in tokens of training that cost as much."""
        return (self.steps - after) * self.tokens_a_step + self.evaluation(after)


def milestones(count: int, steps: int) -> set[int]:
    """`count` steps, evenly spread, the last of all among them."""
    return {max(1, steps * i // count) for i in range(1, count + 1)}


def expectation(
    config: TrainConfig, group: Group, course: Course, *, precision: str, compiles: bool, ceiling: float
) -> str:
    """Memory and time in one line; `ceiling` is one device's, in FLOPs a second."""
    part = config.batch // (config.accumulate * group.world)
    eager = config.model.memory(part, config.sequence, precision=precision)
    memory = (eager.compiled() if compiles and group.device.type == "cuda" else eager).total
    speed = _USUAL_SHARE * ceiling * group.world / config.model.flops_per_token(config.sequence)
    return (
        f"{config.model.num_params():,} parameters, {config.steps:,} steps of {config.batch} × {config.sequence} "
        f"tokens on {describe(group.device)} ({ceiling / 1e12:.3g} TFLOP/s in products); "
        f"expect about {size(memory)} and {duration(course.left() / speed)}, of which "
        f"{duration(course.evaluation() / speed)} for {counted(len(course.evals), 'evaluation')} "
        f"of {course.tokens_an_eval:,} tokens"
    )
