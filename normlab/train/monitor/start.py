"""First loss of a run, before its first step: a warning where it is far above that of a guess.

Formula    limit = ln V + ½ · width · std² + 0.5

See `normlab.probes.start`, which measures it. A first loss above the limit means that the logits are large before
anything is learnt. The usual reason is a tied head: the state at the exit still is the embedding of the token just
read, so that token gets nearly all probability.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from normlab.data import Batch
from normlab.models.transformer import Transformer
from normlab.probes.sharded import reshard
from normlab.probes.start import Start, echoes, start_of_run
from normlab.probes.untouched import eager_mode, untouched
from normlab.train.tasks import Task

if TYPE_CHECKING:
    from normlab.train.setup import Setup

MARGIN = 0.5
"""Nats above the loss of random logits that a first loss may have."""

_ECHOES = 0.05
"""Mean probability of the token just read from which on it is the cause."""


def first_loss(run: Setup, batch: Batch) -> float | None:
    """The loss before the first step, None where it is not finite; one that is too high is warned of."""
    with run.autocast():
        found = measure_start(run.model, run.task, batch)
    if found.is_far_above(MARGIN):
        run.journal.event(run.step, "start", warning(found))
        run.meter.say(warning(found))
    return found.loss if math.isfinite(found.loss) else None


def measure_start(model: Transformer, task: Task, batch: Batch) -> Start:
    """The start of a model on a batch of its task. All ranks call it; the model is restored afterwards."""
    with untouched(model), eager_mode(), torch.no_grad():
        measured = task.measure(model)(batch.inputs, batch.targets, **batch.options)
        found = start_of_run(model, torch.atleast_1d(measured)[0], task.echo(model, batch))
    reshard(model)
    return found


def warning(start: Start) -> str:
    """One line on a first loss that is too high: how high, why, and what to try."""
    chance = f"ln {start.vocabulary} = {start.guess:.2f}, and random logits add {start.random:.2f}"
    return f"the first loss, {start.loss:.2f}, is far above that of chance ({chance}): {_cause(start)}"


def _cause(start: Start) -> str:
    if math.isnan(start.read) or not echoes(start, _ECHOES):
        return "the logits start too large; try a smaller --init-std, or a scheme that ends in a norm"
    cause = f"the mean probability of the token just read is {start.read:.2f}"
    if start.tied:
        return f"{cause}, because the head shares the embedding's matrix; try a head of its own: --tied False"
    return f"{cause}; try a smaller --init-std"
