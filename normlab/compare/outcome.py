"""Exit code and closing messages of `normlab compare`: runs left, failed and interrupted."""

from __future__ import annotations

import os
from dataclasses import dataclass

from normlab.compare.config import CompareConfig
from normlab.compare.store import Store
from normlab.utils.text import counted


@dataclass(frozen=True)
class Outcome:
    """Summary of a comparison's rows at the end of a call."""

    runnable: int
    """Runs that can start and have not ended."""
    left: int
    """Runs that have not ended, including those that depend on others."""
    is_open: bool
    """Whether `left` is a lower bound, because a learning-rate search has not ended."""
    failed: int
    """Failed runs, not counting failures within a successful learning-rate search."""
    interrupted: int

    @property
    def exit_code(self) -> int:
        """130: stopped before the end. 1: runs failed or were interrupted. 0: success."""
        return 130 if self.runnable else 1 if self.failed or self.interrupted else 0

    @property
    def lines(self) -> list[str]:
        """Messages; empty on success."""
        bound = "at least " if self.is_open else ""
        told = [
            (self.failed, f"{counted(self.failed, 'run')} failed; --repeat-failed tries again"),
            (self.interrupted, f"{counted(self.interrupted, 'run')} interrupted: killed more than --retries times"),
            (self.left, f"{bound}{counted(self.left, 'run')} left: the same command goes on"),
        ]
        return [line for number, line in told if number]


def outcome(config: CompareConfig, folder: str | os.PathLike[str]) -> Outcome:
    """Summarise how the runs of a comparison have ended so far."""
    plan, rows = config.plan(), Store(folder).rows()
    of_plan = {run.name for run in plan.known_runs(rows)}
    own = [row for row in rows if row["run"] in of_plan]
    interrupted = {row["run"] for row in own if row["state"] == "interrupted"}
    # Failures during a learning-rate search are expected, unless they leave a scheme without a rate.
    found = {scheme for scheme, lr in plan.rates(rows).items() if lr is not None and config.bracket is not None}
    # A run that was stopped because it was stuck is not a failure.
    lost = [row for row in own if row["state"] == "failed" and not row.get("stuck")]
    failed = [row for row in lost if row["role"] == "judge" or row["scheme"] not in found]
    due = sum(run.name not in interrupted for run in plan.runnable(rows))
    return Outcome(due, plan.left(rows), plan.is_open(rows), len(failed), len(interrupted))
