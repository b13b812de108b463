"""`compare`: run all training runs of a comparison and rank the schemes; resumable between and within runs."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from normlab.compare.config import CompareConfig
from normlab.compare.description import write_description
from normlab.compare.plan import Plan, PlannedRun
from normlab.compare.pool import Pool
from normlab.compare.progress import ComparisonProgress
from normlab.compare.ray_pool import RayPool
from normlab.compare.run_one import Job
from normlab.compare.statistics import SchemeResult, rank_schemes
from normlab.compare.store import Row, Store
from normlab.compare.workers import ProcessPool, worker_slots
from normlab.errors import NormLabError
from normlab.train.interrupt import Interrupt
from normlab.utils.files import file_error
from normlab.utils.locks import hold

_LOOK_SECONDS = 0.25
"""Seconds between two polls of the clock and of the runs."""


def compare(
    config: CompareConfig,
    folder: str | os.PathLike[str],
    *,
    minutes: float | None = None,
    progress: bool = True,
    command: Sequence[str] = (),
    stamp: Mapping[str, Any] | None = None,
) -> list[SchemeResult]:
    """Run what `folder` does not contain yet, and return the ranking of the schemes.

    The same call resumes a comparison that was stopped or killed; more schemes, rates or seeds extend it. After
    `minutes` the current runs are saved, and the ranking is that of the finished ones (`left` counts the others).
    Ctrl-C and SIGTERM do the same and raise KeyboardInterrupt. A run whose process is killed is restarted from its
    checkpoint, at most `config.retries` times. `command` is stored for the report; `stamp` (a study's name and the hash
    of its rule) is added to every row.
    """
    _check(minutes)
    for model in config.models.values():
        model.check_start()
    # Worker processes may have another working directory.
    path = Path(folder).absolute()
    _make(path)
    with hold(path / "lock"):
        data = config.base.task_object.open(config.base, progress=progress)
        write_description(path, config, data, command)
        session = _Session(config, path, data.fingerprint, progress=progress, stamp=stamp or {})
        asked = session.work(minutes)
        rows = Store(path).rows()
    if asked is not None:
        raise KeyboardInterrupt(asked)
    return _standings(config, rows)


def left(config: CompareConfig, folder: str | os.PathLike[str]) -> int:
    """Number of runs of a comparison that have not ended."""
    return config.plan().left(Store(folder).rows())


class _Session:
    """One call of `compare`: the rows so far, and the current runs."""

    def __init__(
        self, config: CompareConfig, folder: Path, fingerprint: str, *, progress: bool, stamp: Mapping[str, Any]
    ):
        self.plan, self.folder, self.fingerprint = Plan(config), folder, fingerprint
        self.store = Store(folder)
        # Interrupted runs are always repeated, failed ones only if the user asks for it.
        taken = ("done",) if config.repeat_failed else ("done", "failed")
        self.rows = [row for row in self.store.rows() if row["state"] in taken]
        self.progress, self.stamp = progress, stamp
        self.kills: Counter[str] = Counter()
        """Number of times each run's process was killed in this call."""
        self.fault: NormLabError | None = None
        """An error that affects all runs; the current ones are saved before it is raised."""

    def work(self, minutes: float | None) -> str | None:
        """Execute runs until none is left or it is time to stop; return the signal that stopped it, if any."""
        if not self.plan.runnable(self.rows):
            return None
        end = time.monotonic() + 60.0 * minutes if minutes is not None else float("inf")
        interrupt = Interrupt(progress=False)
        with ExitStack() as stack:
            pool = stack.enter_context(closing(_pool(self.plan.config)))
            # After the pool has been created: Ray would replace these signal handlers.
            stack.enter_context(interrupt.heard())
            base = self.plan.config.base
            view = stack.enter_context(
                closing(ComparisonProgress(base.steps, progress=self.progress, metric=base.task_object.metric))
            )
            self._loop(pool, view, lambda: interrupt.reason is not None or time.monotonic() > end)
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
                self._start_due(pool)
            if not pool.running:
                return
            self._take_in(pool, view)

    def _start_due(self, pool: Pool) -> None:
        under_way = {job.run.name for job in pool.running}
        given_up = {name for name, kills in self.kills.items() if kills > self.plan.config.retries}
        waiting = [run for run in self.plan.runnable(self.rows) if run.name not in under_way | given_up]
        for run in waiting:
            if not pool.is_free:
                return
            pool.start(self._job(run))

    def _take_in(self, pool: Pool, view: ComparisonProgress) -> None:
        self._show(view, pool.running)
        for _, answer in pool.wait(_LOOK_SECONDS):
            if isinstance(answer, NormLabError):
                self.fault = self.fault or answer
            # A stopped run has no row and remains runnable.
            elif answer is not None:
                self._take_row({**answer, **self.stamp}, view)

    def _take_row(self, row: Row, view: ComparisonProgress) -> None:
        if row["state"] == "interrupted":
            self._count_kill(row, view)
            return
        self.store.append(row)
        self.rows.append(row)
        view.ended(row)

    def _count_kill(self, row: Row, view: ComparisonProgress) -> None:
        """Schedule a run whose process was killed again, or give it up for this call."""
        self.kills[row["run"]] += 1
        kills, retries = self.kills[row["run"]], self.plan.config.retries
        if kills > retries:
            self.store.append(row)
            view.ended(row)
        else:
            what = f"{row['label']}, rate {row['lr']:g}, seed {row['seed']} ({row['role']}): {row['reason']}"
            view.say(f"{what}; starting again from its last checkpoint ({kills} of {retries})")

    def _show(self, view: ComparisonProgress, running: Sequence[Job]) -> tuple[int, str]:
        """Update the display; return the number of runs left, and the progress as text."""
        size, missing, is_open = self.plan.size(self.rows), self.plan.left(self.rows), self.plan.is_open(self.rows)
        view.update(size - missing, size, running, at_least=is_open)
        return missing, f"{size - missing} of {'at least ' if is_open else ''}{size} runs"

    def _say_how_it_ended(self, view: ComparisonProgress) -> None:
        missing, words = self._show(view, [])
        if missing:
            view.say(f"stopped: {words} have ended; the same command goes on from here")

    def _job(self, run: PlannedRun) -> Job:
        return Job(run, self.folder / "runs" / run.name, self.fingerprint)


def _pool(config: CompareConfig) -> Pool:
    return RayPool(config) if config.on == "ray" else ProcessPool(worker_slots(config))


def _standings(config: CompareConfig, rows: Sequence[Row]) -> list[SchemeResult]:
    baseline = config.baseline_name
    if not any(row["scheme"] == baseline for row in rows):
        return []
    return rank_schemes(rows, baseline, config.level)


def _check(minutes: float | None) -> None:
    if minutes is not None and not minutes > 0.0:
        raise NormLabError(f"minutes must be positive, got {minutes}; leave it out to go on to the end")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise NormLabError("a comparison starts its processes itself; call it without torchrun")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise file_error("make", error, folder) from error
