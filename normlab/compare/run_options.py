"""RunOptions: how the runs of a comparison or ladder are executed. They decide no result. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from normlab.errors import NormLabError, unknown

Where = Literal["here", "ray"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of every command that executes many runs."""

    repeat_failed: bool = False
    """Repeat failed runs, from their last checkpoint."""
    retries: int = 2
    """Restarts of a run whose process was killed, from its last checkpoint.
    After that it counts as interrupted, not as failed, and the next call tries it again."""
    on: Where = "here"
    """Where to run: processes on this machine (here), or a Ray cluster that shares the folder and the data (ray)."""
    workers: int | None = None
    """Parallel runs; none: one per GPU, else one per core. Two per GPU pay only where compiling outlasts training."""
    whole_runs: bool = False
    """With --minutes: start no run that is not expected to end in time. For machines whose checkpoints are lost."""

    def check_run_options(self) -> None:
        """Raise for values that make no sense."""
        if self.retries < 0:
            raise NormLabError(f"retries must not be negative, got {self.retries}; 0 starts no run again")
        if self.on not in get_args(Where):
            raise unknown("place to run", self.on, get_args(Where))
        if self.workers is not None and self.workers < 1:
            raise NormLabError(f"workers must be at least 1, got {self.workers}; leave it out to use the whole machine")


@dataclass(frozen=True)
class RunSettings:
    """The options, with what the plan of the runs adds to them."""

    options: RunOptions
    device: str
    """Device of every run."""
    at_once: int
    """Most runs of the whole plan that could be under way together."""
