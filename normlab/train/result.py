"""Result of a training run, as `train` returns it and as status.json stores it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normlab.train.monitor.stuck import ADVICE, end_of_stuck, has_recovered
from normlab.train.tasks import Task


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Result of a training run."""

    state: str
    """done, stopped, failed, or stuck (ended by --stop-hopeless)."""
    reason: str | None
    """Why the run did not reach its last step."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Last evaluation by name: loss in nats, and the other measures of the task; empty before the first."""
    steps: int
    tokens: int
    seconds: float
    """Training time, over all processes that worked on the run."""
    tokens_per_s: float
    peak_bytes: int | None
    device: str
    gpu: str | None = None
    """UUID of the GPU."""
    first_loss: float | None = None
    """Loss before the first step, on the first validation samples, in nats per target."""
    unigram_entropy: float | None = None
    """Loss of predicting by frequency alone, in nats per target: of tokens (unigram entropy) or of classes."""
    stuck: bool | None = None
    """Whether the loss was above unigram_entropy − 0.1 at 300 steps after warm-up, or at the end; None: not known."""
    stuck_at: int | None = None
    """The last step at which the run was found stuck; before the last step, it has recovered since."""
    diverged: int | None = None
    """Step at which the run was given up as diverged; None: it was not."""

    @property
    def loss(self) -> float | None:
        """Loss of the last evaluation, in nats per target."""
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
    """The lines that `normlab train` prints at the end: scores, whether the run is stuck, folder and reason."""
    lines = [f"{result.state}: {task.describe(result.scores)}"] if result.scores else []
    if result.stuck and result.unigram_entropy is not None and not result.reason:
        facts = (result.unigram_entropy, result.scores["loss"], result.stuck_at, result.steps)
        advice = "" if has_recovered(*facts) else f": {ADVICE}"
        lines.append(f"{end_of_stuck(task.metric.guess, *facts)}{advice}")
    lines.append(f"run in {folder}" + (f": {result.reason}" if result.reason else ""))
    if result.state == "stopped":
        lines.append(f"to go on: normlab train --resume {folder}")
    return "\n".join(lines)
