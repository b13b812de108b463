"""The live line of a run: loss, tokens a second, share of the hardware's peak, time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn

from normlab.utils.progress import ProgressDisplay
from normlab.utils.text import duration

_STEPS = 16
"""Steps that a speed is taken over."""


class StepClock:
    """Seconds of training, over all sessions of a run."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        return self._before + (0.0 if self._since is None else time.perf_counter() - self._since)

    @seconds.setter
    def seconds(self, value: float) -> None:
        self._before = value

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self._before, self._since = self.seconds, None


class Meter:
    """Speed over the last steps, and a line about it.

    Over several, for where the host lags it hears of a step now sooner and now later. The first step that a process
    takes compiles the model, and stands for itself.
    """

    def __init__(
        self,
        label: str,
        steps: int,
        tokens_a_step: int,
        flops_a_token: int,
        peak: float,
        *,
        progress: bool,
        left: Callable[[int], float] | None = None,
    ):
        """`left`: the work after a step in tokens, where there is more of it than the steps' own."""
        self._left = left or (lambda step: float((steps - step) * tokens_a_step))
        self._step = 0
        self.label, self.steps, self.tokens_a_step = label, steps, tokens_a_step
        self.flops_a_token, self.peak = flops_a_token, peak
        self._laps: deque[tuple[float, int]] = deque(maxlen=_STEPS + 1)
        self._is_compiled = False
        self.restart(0)
        self._live = ProgressDisplay(*_columns(), progress=progress)
        self.say, self.close = self._live.say, self._live.close
        if self._live.bar is not None:
            self._task = self._live.bar.add_task(label, total=steps, facts="", left="")

    def restart(self, step: int) -> None:
        """Count from here on: what came before was another process, or something else than training."""
        self._laps.clear()
        self._laps.append((time.perf_counter(), step))

    def speed(self, step: int) -> dict[str, float]:
        """Tokens a second over the last steps, and the share of the peak that this is."""
        now = time.perf_counter()
        begin, first = self._laps[0]
        rate = (step - first) * self.tokens_a_step / max(now - begin, 1e-9)
        if not self._is_compiled:
            self._laps.clear()
            self._is_compiled = True
        self._laps.append((now, step))
        return {"tokens_per_s": rate, "mfu": rate * self.flops_a_token / self.peak}

    def show(self, step: int, record: dict[str, Any], note: str = "") -> None:
        """Show a step, and after its numbers a note."""
        self._step = step
        left = f"{duration(self._left(step) / max(record['tokens_per_s'], 1e-9))} left"
        facts = f"loss {record['loss']:.4f}  {record['tokens_per_s']:,.0f} tok/s  {100 * record['mfu']:.0f} % of peak"
        facts += f"  {note}" if note else ""
        if self._live.bar is not None:
            self._live.bar.update(self._task, completed=step, facts=facts, left=left)
        elif self._live.is_due or step == self.steps:
            self.say(f"{self.label}  step {step}/{self.steps}  {facts}  {left}")

    def evaluating(self, share: float) -> None:
        """Show how far an evaluation is."""
        facts = f"evaluating: {100 * share:.0f} %"
        if self._live.bar is not None:
            self._live.bar.update(self._task, facts=facts)
        elif self._live.is_due:
            self.say(f"{self.label}  step {self._step}/{self.steps}  {facts}")


def _columns() -> tuple[ProgressColumn, ...]:
    texts = ("{task.description}", "{task.fields[facts]}", "{task.fields[left]}")
    label, facts, left = (TextColumn(text, markup=False) for text in texts)
    return label, BarColumn(), MofNCompleteColumn(), facts, left
