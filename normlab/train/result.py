"""How a run ended, as `train` returns it and as status.json keeps it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normlab.train.monitor.stuck import ADVICE, where
from normlab.train.tasks import Task


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended."""

    state: str
    """done, stopped, failed, or stuck where --stop-hopeless ended it."""
    reason: str | None
    """Why it did not come to its end."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Last evaluation, by name: the loss in nats, and what else the task measures; empty before the first."""
    steps: int
    tokens: int
    seconds: float
    """Of training, over all its sessions."""
    tokens_per_s: float
    peak_bytes: int | None
    device: str
    gpu: str | None = None
    """Which of the GPUs of that name."""
    first_loss: float | None = None
    """Before the first step, on the first samples of the evaluation, in nats a target."""
    unigram_entropy: float | None = None
    """Loss of guessing by frequency alone, in nats a target: the entropy of single tokens, or of the classes."""
    stuck: bool | None = None
    """Whether the loss was above that − 0.1 three hundred steps after warm-up, or at the end; None: not known."""
    diverged: int | None = None
    """The step at which loss or gradient stayed bad and the run was given up; None where it was not."""

    @property
    def loss(self) -> float | None:
        """Of the last evaluation, in nats a target."""
        return self.scores.get("loss")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the scores among the others."""
        plain = dataclasses.asdict(self)
        return plain | {"loss": None, **plain.pop("scores")}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainResult:
        own = {f.name for f in dataclasses.fields(cls)}
        scores = {name: value for name, value in values.items() if name not in own and value is not None}
        return cls(**{name: value for name, value in values.items() if name in own}, scores=scores)


def ending(result: TrainResult, task: Task, folder: Path) -> str:
    """What `normlab train` prints at the end: scores, whether the run is stuck, folder and reason, a line each."""
    lines = [f"{result.state}: {task.describe(result.scores)}"] if result.scores else []
    if result.stuck and result.unigram_entropy is not None and not result.reason:
        lines.append(f"{where(task.metric.guess, result.unigram_entropy, result.scores['loss'])}: {ADVICE}")
    return "\n".join([*lines, f"run in {folder}" + (f": {result.reason}" if result.reason else "")])
