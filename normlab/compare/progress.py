"""Progress display of a comparison or ladder: a bar for all runs and a line per run; plain lines without a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.text import Text

from normlab.compare.plan import PlannedRun, Work
from normlab.compare.run_one import Job, last_step
from normlab.train.metrics import LOSS, Metric
from normlab.train.monitor.stuck import end_of_stuck
from normlab.utils.progress import ProgressDisplay

_LEAST_SHARE = 0.005
"""Share of the remaining work after which its time can be estimated."""


class ComparisonProgress:
    """Progress display that reads the progress of runs from their metrics files."""

    def __init__(self, *, progress: bool, metric: Metric = LOSS):
        self._metric = metric
        self._live = ProgressDisplay(*_columns(), progress=progress)
        self._bar = self._live.bar
        self.say, self.close = self._live.say, self._live.close
        self._lines: dict[str, Any] = {}
        self._began = time.perf_counter()
        self._first: float | None = None
        if self._bar is not None:
            self._all = self._bar.add_task("all runs", total=None, facts="", left="")

    def update(self, work: Work, running: Sequence[Job]) -> None:
        """Update the display: the progress of the plan, and the runs under way."""
        if not self._live.progress:
            return
        last = {job: last_step(job.folder) or {} for job in running}
        done = work.done + sum(job.run.work_until(step.get("step", 0)) for job, step in last.items())
        facts, left = str(work), self._left(done, work.whole)
        left = left and ("at least " if work.is_open else "") + left
        if self._bar is not None:
            self._bar.update(self._all, completed=done, total=work.whole, facts=facts, left=left)
            self._show_runs(last)
        elif self._live.is_due:
            shares = ", ".join(f"{job.run}: step {step.get('step', 0)}" for job, step in last.items())
            self.say(f"{facts} have ended; {left or 'time left not known yet'}; {shares}")

    def ended(self, run: PlannedRun, row: dict[str, Any]) -> None:
        """Print a line for a run that has ended."""
        self.say(f"{run}: {self._outcome(row)}")

    def _outcome(self, row: dict[str, Any]) -> str:
        if row["state"] != "done":
            return f"{row['state']}: {row['reason']}"
        found = f"{self._metric.field} {row['value']:.4f}"
        if not row.get("stuck"):
            return found
        facts = (row["unigram_entropy"], row["loss"], row.get("stuck_at"), row["steps"])
        return f"{found}, {end_of_stuck(self._metric.guess, *facts)}"

    def _left(self, done: float, total: float) -> str:
        """Time left, from the speed since this call began; earlier runs are not part of it."""
        if self._first is None:
            self._first = done
        gained = done - self._first
        # The first steps are slower than the rest: compilation, and starting processes.
        if gained <= _LEAST_SHARE * (total - self._first):
            return ""
        seconds = (time.perf_counter() - self._began) * (total - done) / gained
        return f"{seconds / 60:.0f} min left" if seconds > 90 else f"{seconds:.0f} s left"

    def _show_runs(self, last: dict[Job, dict[str, Any]]) -> None:
        assert self._bar is not None
        names = {job.run.name: job for job in last}
        for name in [name for name in self._lines if name not in names]:
            self._bar.remove_task(self._lines.pop(name))
        for name, job in names.items():
            if name not in self._lines:
                self._lines[name] = self._bar.add_task(
                    str(job.run), total=job.run.config.steps, facts="starting", left=""
                )
            if step := last[job]:
                speed = f"{step.get('tokens_per_s') or 0.0:,.0f} tok/s"
                facts = f"step {step['step']}  loss {_number(step.get('loss'))}  {speed}"
                self._bar.update(self._lines[name], completed=step["step"], facts=facts)


class _Left(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["left"])


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _columns() -> tuple[ProgressColumn, ...]:
    names, facts = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[facts]}"))
    return names, BarColumn(bar_width=24), facts, _Left()
