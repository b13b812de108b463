"""`compare`: run all training runs of a comparison and rank the schemes; resumable between and within runs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from normlab.compare.config import CompareConfig
from normlab.compare.description import write_description
from normlab.compare.executor import RunExecutor
from normlab.compare.plan import Plan
from normlab.compare.session import Session, check_call, check_runs, hold_folder
from normlab.compare.statistics import SchemeResult, rank_schemes
from normlab.compare.store import Row, Store
from normlab.utils.results_folder import COMPARISON


def compare(
    config: CompareConfig,
    folder: str | os.PathLike[str],
    *,
    minutes: float | None = None,
    progress: bool = True,
    command: Sequence[str] = (),
    stamp: Mapping[str, Any] | None = None,
    executor: RunExecutor | None = None,
) -> list[SchemeResult]:
    """Train schemes on the same data, each at its own tuned learning rate, and rank them with paired intervals.

    Runs what `folder` does not contain yet, and returns the ranking of the schemes.

    The same call resumes a comparison that was stopped or killed; more schemes, rates or seeds extend it. After
    `minutes`, those that the data take included, the current runs are saved, and the ranking is that of the finished
    ones (`left` counts the others). Ctrl-C and SIGTERM do the same and raise KeyboardInterrupt. A run whose process is
    killed is restarted from its checkpoint, at most `config.retries` times. `command` is stored for the report; `stamp`
    (a study's name and the hash of its rule) is added to every row; with an `executor` several comparisons use the same
    processes.
    """
    check_call(minutes)
    began = time.monotonic()
    check_runs(config.base, config.models.values())
    with hold_folder(folder, COMPARISON) as path:
        data = config.base.task_object.open(config.base, progress=progress)
        write_description(path, config, data, command)
        metric = config.base.task_object.metric
        session = Session(
            Plan(config), config.run_settings, path, data.fingerprint,
            metric=metric, progress=progress, stamp=stamp, executor=executor,
        )  # fmt: skip
        asked = session.execute(None if minutes is None else minutes - (time.monotonic() - began) / 60.0)
        rows = Store(path).rows()
    if asked is not None:
        raise KeyboardInterrupt(asked)
    return _standings(config, rows)


def left(config: CompareConfig, folder: str | os.PathLike[str]) -> int:
    """Number of runs of a comparison that have not ended."""
    return config.plan().left(Store(folder).rows())


def _standings(config: CompareConfig, rows: Sequence[Row]) -> list[SchemeResult]:
    baseline = config.baseline_name
    if not any(row["scheme"] == baseline for row in rows):
        return []
    return rank_schemes(rows, baseline, config.level)
