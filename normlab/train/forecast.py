"""What a run will take, said before it starts."""

from __future__ import annotations

from normlab.train.config import TrainConfig
from normlab.train.distributed import Group
from normlab.train.hardware import describe
from normlab.train.plan import Course
from normlab.utils.text import counted, duration, size

_USUAL_SHARE = 0.4
"""Of the matrix-product ceiling that a run reaches, for the first guess at its time."""


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
