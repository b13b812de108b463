"""The first loss of a run, before its first step, against what random logits would cost.

Formula    expected = ln V + ½ · width · std²,  far above = expected + 0.5

V answers that are equally likely cost ln V nats. Features of unit RMS under a random head with entries of standard
deviation std make logits of variance width · std², which cost half of that more. A first loss far above says that the
logits are large before anything is learnt. The usual reason is a tied head: the state at the exit still is the
embedding of the token just read, so that token gets nearly all probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from normlab.data import Batch
from normlab.models.transformer import Transformer
from normlab.probes.untouched import eager_mode, untouched
from normlab.train.distributed import reshard, whole
from normlab.train.tasks import Task

if TYPE_CHECKING:
    from normlab.train.setup import Setup

MARGIN = 0.5
"""Nats above the expected first loss from which on it is far above."""

_ECHOES = 0.05
"""Mean probability of the token just read from which on it is to blame."""


@dataclass(frozen=True)
class Start:
    """How a model starts."""

    loss: float
    """Mean cross-entropy in nats."""
    answers: int
    spread: float
    """What random logits of the head's size cost, in nats: half their variance."""
    echo: float | None
    """Mean probability of the token just read; None where that is never the answer."""
    tied: bool
    """Whether the head is the embedding's matrix."""

    @property
    def is_far_above(self) -> bool:
        return self.loss > math.log(self.answers) + self.spread + MARGIN

    def __str__(self) -> str:
        chance = f"ln {self.answers} = {math.log(self.answers):.2f}, and random logits add {self.spread:.2f}"
        return f"the first loss, {self.loss:.2f}, is far above that of chance ({chance}): {self._cause}"

    @property
    def _cause(self) -> str:
        if self.echo is None or self.echo < _ECHOES:
            return "the logits start too large; try a smaller --init-std, or a scheme that ends in a norm"
        cause = f"the mean probability of the token just read is {self.echo:.2f}"
        if self.tied:
            return f"{cause}, because the head shares the embedding's matrix; try a head of its own: --tied False"
        return f"{cause}; try a smaller --init-std"


def first_loss(run: Setup, batch: Batch) -> float | None:
    """The loss before the first step, None where it is not finite; one far above that of chance is said so."""
    with run.autocast():
        found = measure_start(run.model, run.task, batch)
    if found.is_far_above:
        run.journal.event(run.step, "start", str(found))
        run.meter.say(str(found))
    return found.loss if math.isfinite(found.loss) else None


def measure_start(model: Transformer, task: Task, batch: Batch) -> Start:
    """Measure how a model starts on a batch. All ranks call it; nothing of it remains."""
    with untouched(model), eager_mode(), torch.no_grad():
        measured = task.measure(model)(batch.inputs, batch.targets, **batch.options)
        found = Start(
            loss=float(torch.atleast_1d(measured)[0]),
            answers=model.config.answers,
            spread=float(whole(model.logit_variance())) / 2.0,
            echo=task.echo(model, batch),
            tied=model.head.weight is None,
        )
    reshard(model)
    return found
