"""What a run will take, said before it starts."""

from __future__ import annotations

from normlab.train.config import TrainConfig
from normlab.train.distributed import Group
from normlab.train.hardware import describe

_USUAL_SHARE = 0.4
"""Of the matrix-product ceiling that a run reaches, for the first guess at its time."""


def expectation(config: TrainConfig, group: Group, *, precision: str, compiles: bool, ceiling: float) -> str:
    """Memory and time in one line; `ceiling` is one device's, in FLOPs a second."""
    part = config.batch // (config.accumulate * group.world)
    eager = config.model.memory(part, config.sequence, precision=precision)
    memory = (eager.compiled() if compiles and group.device.type == "cuda" else eager).total
    work = config.model.flops_per_token(config.sequence) * config.steps * config.batch * config.sequence
    seconds = work / (_USUAL_SHARE * ceiling * group.world)
    return (
        f"{config.model.num_params():,} parameters, {config.steps:,} steps of {config.batch} × {config.sequence} "
        f"tokens on {describe(group.device)} ({ceiling / 1e12:.3g} TFLOP/s in products); "
        f"expect about {size(memory)} and {duration(seconds)}"
    )


def size(count: int) -> str:
    """Bytes as a person says them."""
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
