"""Session: execute the planned runs of a folder in parallel, store their rows, resume between and within runs.

`compare` and the ladder use it. What differs between them is the plan (`RunPlan`: which runs can start, given the rows
so far) and what a subclass adds to a run's row or does between runs.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

from normlab.compare.executor import RunExecutor
from normlab.compare.plan import PlannedRun, Work
from normlab.compare.pool import Pool
from normlab.compare.progress import ComparisonProgress
from normlab.compare.run_one import Job
from normlab.compare.run_options import RunSettings
from normlab.compare.store import Row, Store
from normlab.errors import NormLabError
from normlab.models.config import TransformerConfig
from normlab.train.config import TrainConfig
from normlab.train.metrics import Metric
from normlab.train.monitor.interrupt import Interrupt
from normlab.train.storage.folder import RunFolder
from normlab.train.storage.sinks import check_sinks
from normlab.utils.files import file_error
from normlab.utils.locks import hold
from normlab.utils.results_folder import refuse_other_results

_LOOK_SECONDS = 0.25
"""Seconds between two polls of the clock and of the runs."""


class RunPlan(Protocol):
    """A plan of runs, as a function of the rows of those that have ended."""

    def runnable(self, rows: Sequence[Row]) -> Sequence[PlannedRun]:
        """Runs that have not ended and wait for no other run, in the order in which they should start."""
        ...

    def dependents(self, run: PlannedRun) -> Sequence[PlannedRun]:
        """Runs that need what this one leaves on disk."""
        ...

    def work(self, rows: Sequence[Row]) -> Work:
        """Runs and work in all and ended."""
        ...


class Session:
    """One call of `compare` or `ladder`: the rows so far, and the current runs."""

    def __init__(
        self,
        plan: RunPlan,
        settings: RunSettings,
        folder: Path,
        fingerprint: str,
        *,
        metric: Metric,
        progress: bool,
        stamp: Mapping[str, Any] | None = None,
        executor: RunExecutor | None = None,
    ):
        """`fingerprint` is that of the data, the same for all runs; `stamp` is added to every row.

        `executor` has the processes; without one the session has its own, and ends them.
        """
        self.plan, self.settings, self.folder, self.fingerprint = plan, settings, folder, fingerprint
        self.metric, self.progress, self.stamp = metric, progress, stamp or {}
        self.store = Store(folder)
        # Interrupted runs are always repeated, failed ones only if the user asks for it.
        taken = ("done",) if settings.options.repeat_failed else ("done", "failed")
        self.rows = [row for row in self.store.rows() if row["state"] in taken]
        self.kills: Counter[str] = Counter()
        """Number of times each run's process was killed in this call."""
        self.fault: NormLabError | None = None
        """An error that affects all runs; the current ones are saved before it is raised."""
        self._executor, self._is_owner = executor or RunExecutor(), executor is None
        self._end = float("inf")

    # -- what a subclass may add --------------------------------------------------------------------------------------

    def job(self, run: PlannedRun) -> Job:
        """The run as a worker receives it."""
        return Job(run, self.folder / "runs" / run.name, self.fingerprint)

    def start_step(self, run: PlannedRun) -> int:
        """Step that a run would begin from now."""
        return RunFolder(self.job(run).folder).saved_step

    def facts(self, run: PlannedRun) -> Mapping[str, Any]:
        """Fields to add to the row of a run, besides the stamp."""
        return {}

    def before_runs(self, view: ComparisonProgress) -> None:
        """Called before runs are chosen to start."""

    def after_run(self, row: Row) -> None:
        """Called when the row of a run has been stored."""

    # -- the session --------------------------------------------------------------------------------------------------

    def execute(self, minutes: float | None) -> str | None:
        """Execute runs until none is left or it is time to stop; return the signal that stopped it, if any."""
        self._end = time.monotonic() + 60.0 * minutes if minutes is not None else float("inf")
        interrupt = Interrupt(progress=False)
        with ExitStack() as stack:
            view = ComparisonProgress(progress=self.progress, metric=self.metric)
            stack.enter_context(closing(view))
            self.before_runs(view)
            if not self.plan.runnable(self.rows):
                return None
            if self._is_owner:
                stack.enter_context(closing(self._executor))
            pool = self._executor.pool(self.settings)
            # After the pool has been created: Ray would replace these signal handlers.
            stack.enter_context(interrupt.heard())
            self._loop(pool, view, lambda: interrupt.reason is not None or time.monotonic() > self._end)
            self._say_how_it_ended(view)
        if self.fault is not None:
            raise self.fault
        return interrupt.reason

    def _loop(self, pool: Pool, view: ComparisonProgress, must_stop: Callable[[], bool]) -> None:
        stopping = False
        while True:
            if self.fault or must_stop():
                if not stopping:
                    view.say("stopping: the runs under way are being saved")
                stopping = True
                pool.stop()
            else:
                self.before_runs(view)
                self._start_due(pool)
            if not pool.running:
                return
            self._take_in(pool, view)

    def _start_due(self, pool: Pool) -> None:
        under_way = {job.run.name for job in pool.running}
        given_up = {name for name, kills in self.kills.items() if kills > self.settings.options.retries}
        waiting = [run for run in self.plan.runnable(self.rows) if run.name not in under_way | given_up]
        while pool.is_free and (waiting := [run for run in waiting if self._fits(run)]):
            run = waiting.pop(pool.choose(waiting))
            job = self.job(run)
            self._executor.durations.begin(run, self.start_step(run))
            pool.start(job)

    def _fits(self, run: PlannedRun) -> bool:
        """Whether a run may start. Without `whole_runs` one that ends too late is saved and goes on in another call.

        Runs that depend on it must fit as well: another machine would have to repeat it for them.
        """
        durations = self._executor.durations
        expected = durations.expected(run, self.start_step(run))
        expected += sum(durations.expected(one, one.first_step) for one in self.plan.dependents(run))
        return not (time.monotonic() + expected > self._end and self.settings.options.whole_runs)

    def _take_in(self, pool: Pool, view: ComparisonProgress) -> None:
        view.update(self.plan.work(self.rows), pool.running)
        for job, answer in pool.wait(_LOOK_SECONDS):
            if isinstance(answer, NormLabError):
                self.fault = self.fault or answer
            # A stopped run has no row and remains runnable.
            elif answer is not None:
                self._take_row(job.run, {**answer, **self.facts(job.run), **self.stamp}, view)

    def _take_row(self, run: PlannedRun, row: Row, view: ComparisonProgress) -> None:
        if row["state"] == "interrupted":
            self._count_kill(run, row, view)
            return
        self._executor.durations.end(run, row.get("steps") or 0)
        self.store.append(row)
        self.rows.append(row)
        view.ended(run, row)
        self.after_run(row)

    def _count_kill(self, run: PlannedRun, row: Row, view: ComparisonProgress) -> None:
        """Schedule a run whose process was killed again, or give it up for this call."""
        self.kills[row["run"]] += 1
        kills, retries = self.kills[row["run"]], self.settings.options.retries
        if kills > retries:
            self.store.append(row)
            view.ended(run, row)
        else:
            view.say(f"{run}: {row['reason']}; starting again from its last checkpoint ({kills} of {retries})")

    def _say_how_it_ended(self, view: ComparisonProgress) -> None:
        work = self.plan.work(self.rows)
        view.update(work, [])
        if work.ended < work.runs:
            view.say(f"stopped: {work} have ended; the same command goes on from here")


def check_call(minutes: float | None) -> None:
    """Raise for a time limit that is none, and under torchrun."""
    if minutes is not None and not minutes > 0.0:
        raise NormLabError(f"minutes must be positive, got {minutes}; leave it out to go on to the end")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise NormLabError("many runs start their processes themselves; call this without torchrun")


def check_runs(base: TrainConfig, models: Iterable[TransformerConfig]) -> None:
    """Raise for what would fail in every run: a model that cannot start, a sink that is not installed."""
    check_sinks(base.sinks)
    for model in models:
        model.check_start()


def make_folder(folder: str | os.PathLike[str], described_by: str) -> Path:
    """Make the folder of many runs; return its absolute path, since workers may have another working directory.

    A folder that another command has described is refused.
    """
    path = Path(folder).absolute()
    refuse_other_results(path, described_by)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise file_error("make", error, path) from error
    return path


@contextmanager
def hold_folder(folder: str | os.PathLike[str], described_by: str) -> Iterator[Path]:
    """Context manager: make the folder of many runs and lock it; a new folder that is still empty after an error goes.

    So a call that is refused (no text in the data, too few tokens) leaves nothing behind.
    """
    is_new = not Path(folder).exists()
    path = make_folder(folder, described_by)
    with hold(path / "lock"):
        try:
            yield path
        except BaseException:
            if is_new and [entry.name for entry in path.iterdir()] == ["lock"]:
                shutil.rmtree(path, ignore_errors=True)
            raise
