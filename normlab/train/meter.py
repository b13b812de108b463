"""The live line of a run: loss, tokens a second, share of the hardware's peak, time left."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_PLAIN_SECONDS = 30.0
"""Between two lines where nobody watches a terminal."""


class Clock:
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
    """Speed over the last stretch of steps, and a line about it: a bar on a terminal, else a line now and then."""

    def __init__(self, label: str, steps: int, tokens_a_step: int, flops_a_token: int, peak: float, *, shown: bool):
        self.label, self.steps, self.tokens_a_step = label, steps, tokens_a_step
        self.flops_a_token, self.peak = flops_a_token, peak
        self._begin = self._said = time.perf_counter()
        self._first = 0
        self._shown = shown
        self._bar = _bar() if shown and sys.stderr.isatty() else None
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(label, total=steps, facts="")

    def restart(self, step: int) -> None:
        """Count from here on: what came before was another process, or something else than training."""
        self._begin, self._first = time.perf_counter(), step

    def speed(self, step: int) -> dict[str, float]:
        """Tokens a second since the last call, and the share of the peak that this is."""
        now = time.perf_counter()
        rate = (step - self._first) * self.tokens_a_step / max(now - self._begin, 1e-9)
        self._begin, self._first = now, step
        return {"tokens_per_s": rate, "mfu": rate * self.flops_a_token / self.peak}

    def show(self, step: int, record: dict[str, Any]) -> None:
        if not self._shown:
            return
        facts = f"loss {record['loss']:.4f}  {record['tokens_per_s']:,.0f} tok/s  {100 * record['mfu']:.0f} % of peak"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, facts=facts)
        elif time.perf_counter() - self._said > _PLAIN_SECONDS or step == self.steps:
            self._said = time.perf_counter()
            left = (self.steps - step) * self.tokens_a_step / max(record["tokens_per_s"], 1e-9)
            print(f"{self.label}  step {step}/{self.steps}  {facts}  {left:.0f} s left", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self._shown:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar() -> Progress:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}", markup=False),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=False)
