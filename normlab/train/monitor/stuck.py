"""Stuck runs: a training loss that stays at the unigram entropy.

A run is stuck where both its mean training loss over the last 50 steps and an evaluation are above H − 0.1 nats. H is
the loss of guessing by frequency alone (`normlab/data/frequencies.py`). Runs are judged 300 steps after warm-up and at
their end; a shorter one at its end only. The mark stays where a run recovers later: it lost those steps.

Why both losses: the training loss includes auxiliary losses and, in a short run, the first steps. The evaluation is
also high where a model has memorised its training data.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normlab.train.setup import Setup

MARGIN = 0.1
"""Nats below the entropy that a run must reach."""

PATIENCE = 300
"""Steps after warm-up that a run has for it."""

WINDOW = 50
"""Steps that the training loss is averaged over."""

ADVICE = "only the frequencies of the targets were learnt; try another rate, a longer warm-up or more steps"


class StuckWatch:
    """Follows the training loss of a run, and marks the run as stuck."""

    def __init__(self, entropy: float, warmup: int, name: str):
        self.entropy, self.due, self.name = entropy, warmup + PATIENCE, name
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._at: int | None = None
        self._loss = math.nan

    @property
    def is_stuck(self) -> bool:
        """Whether the run was found stuck at any time."""
        return self._at is not None

    @property
    def at(self) -> int | None:
        """The last step at which the run was found stuck; None if it never was."""
        return self._at

    @property
    def limit(self) -> float:
        """The loss that a run must get below."""
        return self.entropy - MARGIN

    @property
    def loss(self) -> float:
        """Mean training loss of the last steps; infinite before the first."""
        return sum(self._losses) / len(self._losses) if self._losses else math.inf

    @property
    def is_doubtful(self) -> bool:
        """Whether the training loss alone suggests that the run is stuck: an evaluation decides."""
        return self.loss > self.limit

    def take(self, loss: float) -> None:
        """Add the training loss of a step."""
        self._losses.append(loss)

    def mark(self, step: int, evaluated: float) -> bool:
        """Mark the run if it is stuck at `step`, and return whether it is; `evaluated` is its evaluation loss."""
        # In this order an evaluation that is not finite does not count.
        loss = min(self.loss, evaluated)
        if loss > self.limit:
            self._at, self._loss = step, loss
        return loss > self.limit

    @property
    def note(self) -> str:
        """For the progress line, while a run that was found stuck still is."""
        return where(self.name, self.entropy, self.loss) if self.is_stuck and self.is_doubtful else ""

    def __str__(self) -> str:
        return f"{where(self.name, self.entropy, self._loss)}: loss {self._loss:.2f} after {self._at} steps"

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return {"losses": list(self._losses), "at": self._at, "loss": self._loss if self.is_stuck else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as after a restart. A checkpoint of version 0.1 has no such state: the window starts empty."""
        self._losses = deque(map(float, state.get("losses", ())), maxlen=WINDOW)
        self._at = state.get("at")
        self._loss = math.nan if state.get("loss") is None else float(state["loss"])


def look(run: Setup, evaluated: float) -> bool:
    """Mark and report a run that is stuck; `evaluated` is its evaluation loss. All ranks get the same answer."""
    found = run.watch.mark(run.step, evaluated)
    # At the end the result says so.
    if found and run.step < run.config.steps:
        run.journal.event(run.step, "stuck", str(run.watch), limit=run.watch.limit)
        run.meter.say(f"{run.watch}; {ADVICE}")
    return found


def has_recovered(entropy: float, loss: float, at: float | None, steps: float) -> bool:
    """Whether a run that was found stuck at step `at` no longer was after its last step."""
    # Rows of before 0.2 do not have the step.
    return at < steps if at is not None else loss <= entropy - MARGIN


def end_of_stuck(name: str, entropy: float, loss: float, at: int | None, steps: int) -> str:
    """How a run that is marked as stuck ended, in words; `loss` is that of its last evaluation."""
    if not has_recovered(entropy, loss, at, steps):
        return where(name, entropy, loss)
    when = f"at step {at}" if at is not None else f"{PATIENCE} steps after warm-up"
    return f"was stuck {when} (not {MARGIN} below {name}, {entropy:.2f}); its loss at the end is {loss:.2f}"


def where(name: str, entropy: float, loss: float) -> str:
    """Where a run is stuck, in words."""
    return f"stuck {'at' if loss < entropy + MARGIN else 'above'} {name} ({entropy:.2f})"
