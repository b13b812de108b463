"""Loss-spike and NaN detection: judge every training step, and stop, skip or roll back.

Formula    spike if loss > median + k · scale,  scale = max(1.4826 · MAD, 1 % of max(|median|, 1 nat))
           over the last `window` fine losses, as soon as there are `least` of them

The median and the median absolute deviation (MAD; times 1.4826 it estimates a normal standard deviation) do not move
when a few losses are wild. The floor keeps a flat stretch from making every ripple a spike and, where a model has
learnt its data by heart, every batch that is harder than the others. A spike never enters the window. Gradient norms
are watched for being finite alone: large ones are what clipping is for.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal, get_args

from normlab.errors import NormLabError, unknown

Policy = Literal["stop", "skip", "rollback", "none"]
Kind = Literal["fine", "spike", "nonfinite"]
Action = Literal["go", "stop", "skip", "rollback"]

_FLOOR = 0.01
_LEAST_LEVEL = 1.0
"""Nats that a smaller median counts as: near zero 1 % of it would be nothing. Losses of text are above."""


@dataclass(frozen=True)
class StepVerdict:
    """What a step was, what to do now, and why, in words for the log."""

    kind: Kind
    action: Action
    detail: str = ""

    @property
    def is_fine(self) -> bool:
        return self.kind == "fine"


class Guard:
    """Judges every step before its update is applied, by policy: stop the run, skip the step, or roll back.

    `limit` bad steps in a row stop the run under any policy: then neither skipping nor rolling back has helped. But
    spikes that skipping does not end within `patience` steps are in the weights and not in the data: the losses so far
    are then forgotten, and the run goes on from the new level. Policy "none" names spikes in the same way, but every
    step is taken; only a loss or gradient that is not finite ends the run.
    """

    def __init__(
        self,
        policy: Policy = "stop",
        *,
        spike: float = 10.0,
        window: int = 128,
        least: int = 16,
        limit: int = 10,
        patience: int = 3,
    ):
        if policy not in get_args(Policy):
            raise unknown("policy", str(policy), get_args(Policy))
        if not spike > 0.0:
            raise NormLabError(f"guard: spike must be positive, got {spike}; try 10")
        if not 1 <= least <= window:
            raise NormLabError(f"guard: least must lie in [1, {window}], the window, got {least}")
        if limit < 1:
            raise NormLabError(f"guard: limit must be at least 1, got {limit}")
        if patience < 1:
            raise NormLabError(f"guard: patience must be at least 1, got {patience}")
        self.policy: Policy = policy
        self.spike, self.least, self.limit, self.patience = spike, least, limit, patience
        self.losses: deque[float] = deque(maxlen=window)
        self.strikes = self.spikes = 0
        """Bad steps in a row, and how many of the last ones were spikes."""

    def judge(self, loss: float, grad_norm: float, *, threshold: float | None = None) -> StepVerdict:
        """The verdict on a step, from its loss and the norm of its gradient before clipping.

        `threshold` is the one that the device has judged the step by; the current one if left out.
        """
        kind, detail = self._look(loss, grad_norm, self.threshold() if threshold is None else threshold)
        if kind == "fine":
            # Neither loss nor gradient: the step had no target, as where no token of it is masked. It is no measure.
            if loss or grad_norm:
                self.losses.append(loss)
            self.strikes = self.spikes = 0
            return StepVerdict("fine", "go")
        self.strikes += 1
        self.spikes = self.spikes + 1 if kind == "spike" else 0
        if self.policy in ("skip", "none") and self.spikes >= self.patience:
            detail += f"; {self.spikes} in a row, so it is taken for the new level"
            self.losses.clear()
            self.strikes = self.spikes = 0
            return StepVerdict(kind, "go" if self.policy == "none" else "skip", detail)
        if self.policy == "none":
            return StepVerdict(kind, "go" if kind == "spike" else "stop", detail)
        if self.policy != "stop" and self.strikes >= self.limit:
            return StepVerdict(kind, "stop", f"{detail}; {self.strikes} bad steps in a row")
        return StepVerdict(kind, self.policy, detail)

    def _look(self, loss: float, grad_norm: float, threshold: float) -> tuple[Kind, str]:
        if not math.isfinite(loss):
            return "nonfinite", f"loss is {loss}"
        if not math.isfinite(grad_norm):
            return "nonfinite", f"gradient norm is {grad_norm} at loss {loss:.4g}"
        if loss > threshold:
            return "spike", f"loss {loss:.4g} exceeds {threshold:.4g}; gradient norm {grad_norm:.4g}"
        return "fine", ""

    def threshold(self) -> float:
        """The loss above which a step is a spike; infinite before `least` losses are known."""
        if len(self.losses) < self.least:
            return math.inf
        median = statistics.median(self.losses)
        deviation = statistics.median(abs(loss - median) for loss in self.losses)
        return median + self.spike * max(1.4826 * deviation, _FLOOR * max(abs(median), _LEAST_LEVEL))

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return {"losses": list(self.losses), "strikes": self.strikes, "spikes": self.spikes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.rewind(state)
        self.strikes, self.spikes = int(state["strikes"]), int(state["spikes"])

    def rewind(self, state: dict[str, Any]) -> None:
        """Go back to the losses of a checkpoint, but remember the bad steps, lest a run roll back for ever."""
        self.losses = deque(map(float, state["losses"]), maxlen=self.losses.maxlen)
