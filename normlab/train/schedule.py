"""Learning-rate schedules with warm-up: cosine, linear, warmup-stable-decay (wsd, wsd-linear), constant.

A schedule gives the fraction of the peak rate at steps 0 to total − 1. Warm-up is linear, without a step at rate 0:
step 0 gets 1/warmup, step warmup − 1 gets 1. After that, with p going from 0 to 1 at the last step:

    cosine     final + (1 − final) (1 + cos πp) / 2
    linear     final + (1 − final) (1 − p)
    wsd        1, then final + (1 − final) (1 − √p) over the last `decay_fraction` of all steps (arXiv 2405.18392)
    wsd-linear 1, then final + (1 − final) (1 − p) over the same steps
    constant   1

Before its decay a wsd schedule does not depend on the number of steps: runs of several lengths can share that part.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

from normlab.errors import NormLabError, unknown

if TYPE_CHECKING:
    from normlab.train.config import TrainConfig

Kind = Literal["cosine", "linear", "wsd", "wsd-linear", "constant"]

_STABLE = ("wsd", "wsd-linear")
"""Schedules with a constant rate before the decay."""


def multiplier(step: int, *, total: int, kind: Kind, warmup: int, final: float, decay_fraction: float = 0.2) -> float:
    """The learning rate at `step` as a fraction of the peak; after the last step it stays constant.

    A warm-up as long as the run leaves no step for the decay: the run then ends at 1. `constant` ignores `final`.
    """
    check(total=total, kind=kind, warmup=warmup, final=final, decay_fraction=decay_fraction)
    if step < 0:
        raise NormLabError(f"schedule: step must not be negative, got {step}")
    if step < warmup:
        return (step + 1) / warmup
    decay = _decay_steps(total, decay_fraction) if kind in _STABLE else total - max(warmup, 1)
    return final + (1.0 - final) * _shape(kind, _progress(step, total, decay))


def check(*, total: int, kind: str, warmup: int, final: float, decay_fraction: float = 0.2) -> None:
    """Raise for an invalid schedule, so that a run can be refused before it starts."""
    if kind not in get_args(Kind):
        raise unknown("schedule", str(kind), get_args(Kind))
    if total < 1:
        raise NormLabError(f"schedule: expected at least 1 step, got {total}; raise the budget, or lower batch")
    if not 0 <= warmup <= total:
        raise NormLabError(
            f"schedule: warmup must lie in [0, {total}], the steps of the run, got {warmup}; try {total // 20}"
        )
    if not 0.0 <= final <= 1.0:
        raise NormLabError(f"schedule: final must lie in [0, 1], a share of the full rate, got {final}; try 0.1")
    if not 0.0 < decay_fraction <= 1.0:
        raise NormLabError(f"schedule: decay must lie in (0, 1], a share of the steps, got {decay_fraction}; try 0.2")
    if kind in _STABLE and warmup + _decay_steps(total, decay_fraction) > total:
        raise NormLabError(
            f"schedule: {warmup} steps of warm-up and {_decay_steps(total, decay_fraction)} of decay do not fit into "
            f"{total}; lower warmup or decay"
        )


def check_warmup(warmup: float, steps: int) -> None:
    """Raise unless `warmup` is a share of the steps, or a whole number of them above 1."""
    is_share, is_count = 0.0 <= warmup <= 1.0, warmup > 1.0 and float(warmup).is_integer()
    if not (is_share or is_count):
        raise NormLabError(
            f"warmup must lie in [0, 1], a share of the steps, or be a whole number of steps above 1, got {warmup:g}; "
            f"try 0.05 or 100"
        )
    if is_count and warmup > steps:
        raise NormLabError(f"warmup is {warmup:g} steps and the run has {steps:,}; lower warmup")


def check_branches(config: TrainConfig) -> None:
    """Raise for a trunk whose branches would not be the runs that had their budgets from the start."""
    if config.branches and config.trouble == "rollback":
        raise NormLabError(
            "trouble rollback goes back to the newest checkpoint, so the run depends on its checkpoints and has no "
            "branches; try skip"
        )
    own = getattr(config, config.budget)
    for budget in config.branches:
        if not 0 < budget < own:
            raise NormLabError(
                f"a branch has fewer {config.budget} than its trunk, {own:,}; got {budget:,}; try {max(1, own // 2):,}"
            )
        try:
            branch = config.branch(budget)
        except NormLabError as error:
            raise NormLabError(f"a branch of {budget:,} {config.budget} cannot be: {error}") from None
        if branch.warmup_steps != config.warmup_steps:
            raise NormLabError(
                f"warmup {config.warmup:g} is a share of the steps, so the branches would need another one than the "
                f"trunk; give it in steps, e.g. {max(2, config.warmup_steps)}"
            )
        branch.branch_step  # noqa: B018  # raises for a schedule that decays from its start


def decay_start(*, total: int, kind: str, decay_fraction: float) -> int:
    """The first step of the decay of a wsd schedule: the rate of all steps before it does not depend on `total`."""
    if kind not in _STABLE:
        raise NormLabError(f"schedule {kind} has no constant rate before its decay; try schedule wsd")
    return total - _decay_steps(total, decay_fraction)


def _decay_steps(total: int, fraction: float) -> int:
    """Steps of the decay phase at the end of a run; never the first step of all."""
    return min(max(round(fraction * total), 1), total - 1)


def _progress(step: int, total: int, decay: int) -> float:
    """Progress through the last `decay` steps: exactly 0 before them, exactly 1 at the last."""
    passed = min(step, total - 1) - (total - 1 - decay)
    return max(passed, 0) / decay if decay else 0.0


def _shape(kind: str, p: float) -> float:
    if kind == "cosine":
        return (1.0 + math.cos(math.pi * p)) / 2.0
    return {"linear": 1.0 - p, "wsd": 1.0 - math.sqrt(p), "wsd-linear": 1.0 - p, "constant": 1.0}[kind]
