"""Progress line of a training run: loss, tokens per second, fraction of the GPU's peak (MFU), time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn

from normlab.utils.progress import ProgressDisplay
from normlab.utils.text import duration

_STEPS = 16
"""Steps that the speed is averaged over."""


class StepClock:
    """Training time in seconds, over all processes that worked on a run."""

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
    """Training speed over the last steps, and the progress line.

    The speed is averaged over several steps, since a host that lags behind the GPU sees steps end at uneven times. The
    first step of a process compiles the model and is not averaged with the others.
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
        shows_peak: bool = True,
    ):
        """`left`: remaining work after a step, in tokens; by default that of the remaining steps.

        `shows_peak`: show the fraction of the hardware's peak, which is a fixed number for a GPU only.
        """
        self._shows_peak = shows_peak
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
        """Measure the speed from here on, after an evaluation, a checkpoint or a restart."""
        self._laps.clear()
        self._laps.append((time.perf_counter(), step))

    def speed(self, step: int) -> dict[str, float]:
        """Tokens per second over the last steps, and the fraction of the hardware's peak (MFU)."""
        now = time.perf_counter()
        begin, first = self._laps[0]
        rate = (step - first) * self.tokens_a_step / max(now - begin, 1e-9)
        if not self._is_compiled:
            self._laps.clear()
            self._is_compiled = True
        self._laps.append((now, step))
        return {"tokens_per_s": rate, "mfu": rate * self.flops_a_token / self.peak}

    def show(self, step: int, record: dict[str, Any], note: str = "") -> None:
        """Show a step's loss and speed, and a note."""
        self._step = step
        left = f"{duration(self._left(step) / max(record['tokens_per_s'], 1e-9))} left"
        facts = f"loss {record['loss']:.4f}  {record['tokens_per_s']:,.0f} tok/s"
        facts += f"  {100 * record['mfu']:.0f} % of peak" if self._shows_peak else ""
        facts += f"  {note}" if note else ""
        if self._live.bar is not None:
            self._live.bar.update(self._task, completed=step, facts=facts, left=left)
        elif self._live.is_due or step == self.steps:
            self.say(f"{self.label}  step {step}/{self.steps}  {facts}  {left}")

    def evaluating(self, share: float) -> None:
        """Show the progress of an evaluation; `share` is the fraction done."""
        facts = f"evaluating: {100 * share:.0f} %"
        if self._live.bar is not None:
            self._live.bar.update(self._task, facts=facts)
        elif self._live.is_due:
            self.say(f"{self.label}  step {self._step}/{self.steps}  {facts}")


def _columns() -> tuple[ProgressColumn, ...]:
    texts = ("{task.description}", "{task.fields[facts]}", "{task.fields[left]}")
    label, facts, left = (TextColumn(text, markup=False) for text in texts)
    return label, BarColumn(), MofNCompleteColumn(), facts, left
