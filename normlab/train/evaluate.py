"""Evaluation on the validation data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from normlab.data import IGNORED
from normlab.train.config import TrainConfig
from normlab.train.distributed import Group
from normlab.train.plan import evaluation_batch

Scores = dict[str, float]
"""Result of an evaluation by name: loss, and the other measures of the task."""


@torch.no_grad()
def evaluate(
    measure: Callable[..., torch.Tensor],
    data: Any,
    config: TrainConfig,
    group: Group,
    *,
    progress: Callable[[float], None] | None = None,
) -> Scores:
    """The task's scores on the validation data, or on as much of it as the configuration allows.

    `progress` is called with the fraction done.
    """
    task, batch = config.task_object, evaluation_batch(config, data, group.world)
    places = {"rank": group.rank, "world": group.world, "device": group.device}
    sums, count = torch.zeros(1, dtype=torch.float64, device=group.device), 0.0
    batches = max(1, math.ceil(task.evaluation_samples(config, data) / (batch * group.world)))
    for done, part in enumerate(task.evaluation(config, data, batch=batch, **places), start=1):
        here = (part.targets != IGNORED).sum()
        means = torch.atleast_1d(measure(part.inputs, part.targets, **part.options)).double()
        # A rank may have no target left; its mean, NaN, must not enter the sum.
        sums = sums + torch.where(here > 0, means * here, 0.0)
        count = count + here.double()
        if progress is not None:
            progress(done / batches)
    total = group.all_mean(float(count))
    return task.scores([group.all_mean(value) / total for value in sums.tolist()], data)


def evaluate_sets(
    measure: Callable[..., torch.Tensor], data: Any, config: TrainConfig, group: Group, **options: Any
) -> Scores:
    """The task's scores on its further validation sets: `loss_NAME` and the like."""
    sets = config.task_object.validation_sets(data)
    found = {name: evaluate(measure, part, config, group, **options) for name, part in sets.items()}
    return {f"{field}_{name}": value for name, scores in found.items() for field, value in scores.items()}
