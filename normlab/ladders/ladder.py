"""`ladder`: train all runs of a ladder and answer whether gaps survive scale; resumable between and within runs.

The order: learning rates at the smallest size, their test at a middle size, all sizes but the largest, the forecast of
the largest, and then its runs, which carry the hash of the forecast. A scheme that is added later takes the same way.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from normlab.compare.plan import PlannedRun, ended_runs
from normlab.compare.progress import ComparisonProgress
from normlab.compare.run_one import Job, lost_run_row
from normlab.compare.session import Session, check_call, check_runs, hold_folder, make_folder
from normlab.compare.store import Row, Store
from normlab.errors import NormLabError
from normlab.ladders.config import LadderConfig
from normlab.ladders.description import design_of, write_description
from normlab.ladders.forecast import hash_by_scheme, read_forecasts, write_forecast
from normlab.ladders.forecast_checks import missing_forecasts, refuse_lost_forecast
from normlab.ladders.make_forecast import make_forecast
from normlab.ladders.plan import LadderPlan, has_trained
from normlab.ladders.results import read_report
from normlab.ladders.run import LadderRun
from normlab.ladders.statistics.answer import LadderAnswer
from normlab.ladders.stored_rows import run_state
from normlab.train.storage.folder import RunFolder
from normlab.train.tasks import Data
from normlab.utils.results_folder import LADDER


def ladder(
    config: LadderConfig,
    folder: str | os.PathLike[str],
    *,
    minutes: float | None = None,
    progress: bool = True,
    command: Sequence[str] = (),
) -> LadderAnswer:
    """Train schemes at several model sizes and token budgets, and estimate whether their gaps survive scale.

    Runs what `folder` does not contain yet, and returns what the finished runs say. `config` is a
    `normlab.ladders.LadderConfig`.

    The same call resumes a ladder that was stopped or killed; more schemes or seeds extend it. After `minutes`, those
    that the data take included, the current runs are saved. Ctrl-C and SIGTERM do the same and raise KeyboardInterrupt.
    While no run of the baseline has ended but those that find rates, the answer has no schemes. `command` is stored for
    the report.
    """
    run_ladder(config, folder, minutes=minutes, progress=progress, command=command)
    return read_report(make_folder(folder, LADDER)).answer


def run_ladder(
    config: LadderConfig,
    folder: str | os.PathLike[str],
    *,
    minutes: float | None = None,
    progress: bool = True,
    command: Sequence[str] = (),
    stamp: Mapping[str, Any] | None = None,
) -> None:
    """Run a ladder without computing its answer; `stamp` is added to every row."""
    check_call(minutes)
    began = time.monotonic()
    with hold_folder(folder, LADDER) as path:
        data, config = open_data(config, progress=progress)
        stored, forecasts = Store(path).rows(), read_forecasts(path)
        refuse_lost_forecast(stored, forecasts, path)
        plan = LadderPlan(config, hash_by_scheme(forecasts, stored))

        def describe() -> None:
            write_description(path, config, data, design_of(plan, Store(path).rows(), data, command))

        describe()
        session = LadderSession(plan, path, data, progress=progress, stamp=stamp, describe=describe)
        asked = session.execute(None if minutes is None else minutes - (time.monotonic() - began) / 60.0)
        # Again: the rates found and the runs lost are known now.
        describe()
    if asked is not None:
        raise KeyboardInterrupt(asked)


def open_data(config: LadderConfig, *, progress: bool) -> tuple[Any, LadderConfig]:
    """The data of a ladder, and its configuration with their vocabulary; raises if they are too few."""
    check_runs(config.base, (model for models in config.models.values() for model in models.values()))
    data = config.base.task_object.open(config.base, progress=progress)
    config = config.for_data(data)
    _check_epochs(config, data)
    return data, config


def _check_epochs(config: LadderConfig, data: Data) -> None:
    unique = data.facts()["train"]["tokens"]
    most = max(budget for rung in config.rungs for budget in rung.budgets)
    if most > config.epochs * unique:
        raise NormLabError(
            f"{most:,} tokens are {most / unique:.1f} passes over the {unique:,} training tokens, more than "
            f"{config.epochs:g}; name more data, smaller budgets, or --epochs {math.ceil(most / unique * 100) / 100:g}"
        )


class LadderSession(Session):
    """One call of `ladder`: writes the forecast when it is due, and starts branches from their trunks' checkpoints."""

    plan: LadderPlan

    def __init__(
        self,
        plan: LadderPlan,
        folder: Path,
        data: Data,
        *,
        progress: bool,
        stamp: Mapping[str, Any] | None = None,
        describe: Callable[[], None] | None = None,
    ):
        """`describe` writes ladder.json anew; it is called after every run that a learning rate depends on."""
        config = plan.config
        self._describe = describe
        super().__init__(
            plan, config.run_settings, folder, data.fingerprint, metric=config.base.task_object.metric,
            progress=progress, stamp=stamp,
        )  # fmt: skip

    def execute(self, minutes: float | None) -> str | None:
        self.give_up_lost_branches()
        self._refuse_early_runs()
        return super().execute(minutes)

    def _refuse_early_runs(self) -> None:
        """Raise if a run that must wait for its forecast has begun: going on, it would have the date of today."""
        waiting = set(self.plan.without_forecast)
        for run in self.plan.known_runs(self.rows):
            if run.rung.is_held_out and run.scheme in waiting and self._folder(run).is_dir():
                raise NormLabError(
                    f"{self._folder(run)} began before a forecast of {run.scheme} at {run.rung.size} was written; "
                    "remove that folder, or restore the forecast"
                )

    def job(self, run: PlannedRun) -> Job:
        assert isinstance(run, LadderRun)
        return Job(run, self._folder(run), self.fingerprint, branch_from=self._start(run))

    def _start(self, run: LadderRun) -> Path | None:
        """Folder of the trunk whose checkpoint a branch starts from.

        Where only the results of a ladder were copied there is none: the branch is then trained from its first step,
        as the run that was planned with its budget, which gives the same result for more compute.
        """
        if run.trunk is None:
            return None
        trunk = RunFolder(self._folder(run.trunk))
        return trunk.path if (trunk.branches / f"step-{run.first_step:08d}").is_dir() else None

    def start_step(self, run: PlannedRun) -> int:
        assert isinstance(run, LadderRun)
        planted = run.first_step if self._start(run) is not None else 0
        return max(planted, super().start_step(run))

    def facts(self, run: PlannedRun) -> Mapping[str, Any]:
        assert isinstance(run, LadderRun)
        is_forecast = run.role == "judge" and run.rung.is_held_out
        return {**run.facts(), **({"forecast": self.plan.forecasts.get(run.scheme)} if is_forecast else {})}

    def before_runs(self, view: ComparisonProgress) -> None:
        due = self.plan.without_forecast
        if not due or not self.plan.fitted_have_ended(self.rows):
            return
        made = make_forecast(self.plan, self.rows, due)
        path = write_forecast(self.folder, made)
        self.plan.forecasts |= dict.fromkeys(due, made.hash)
        view.say(f"forecast of {made.size} written: {path} ({made.hash})")
        for line in missing_forecasts(made):
            view.say(line)

    def after_run(self, row: Row) -> None:
        if row["role"] != "judge" and self._describe is not None:
            # A repeated run may move a rate; ladder.json says which runs then no longer count.
            self._describe()
        run = next((one for one in self.plan.known_runs(self.rows) if one.name == row["run"]), None)
        if run is None or run.role != "judge":
            return
        if run.trunk is None and not has_trained(row):
            self._give_up_branches(run, row)
        trunk = run.trunk or run
        if ended_runs(self.rows) >= {branch.name for branch in self.plan.branches(trunk)}:
            # Checkpoints of three times the weights, which no other run starts from.
            shutil.rmtree(RunFolder(self._folder(trunk)).branches, ignore_errors=True)

    def give_up_lost_branches(self) -> None:
        """Give up branches that wait for a trunk that did not train, because an earlier call was killed before it did.

        Or because failed runs are repeated: a trunk that was stuck is a result and is not, so its branches cannot be.
        """
        lost = {row["run"]: row for row in self.rows if not has_trained(row)}
        for run in self.plan.known_runs(self.rows):
            if run.role == "judge" and run.trunk is None and run.name in lost:
                self._give_up_branches(run, lost[run.name])

    def _give_up_branches(self, trunk: LadderRun, row: Row) -> None:
        """Store a row for every branch of a trunk that did not train, so that no cell loses a seed in silence."""
        ended = ended_runs(self.rows)
        for branch in (one for one in self.plan.branches(trunk) if one.name not in ended):
            reason = f"its trunk {trunk.name}: {run_state(row)}" + (f" ({row['reason']})" if row["reason"] else "")
            lost = lost_run_row(self.job(branch), "failed", reason, row["started"])
            lost |= {"stuck": row.get("stuck"), "diverged": row.get("diverged"), **self.facts(branch), **self.stamp}
            self.store.append(lost)
            self.rows.append(lost)

    def _folder(self, run: LadderRun) -> Path:
        return self.folder / "runs" / run.name
