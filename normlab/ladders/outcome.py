"""Exit code and closing messages of `normlab ladder`: runs left, failed and interrupted."""

from __future__ import annotations

import os
from pathlib import Path

from normlab.compare.outcome import Outcome
from normlab.compare.store import Store
from normlab.ladders.config import LadderConfig
from normlab.ladders.forecast import hash_by_scheme, read_forecasts
from normlab.ladders.ladder import open_data
from normlab.ladders.plan import LadderPlan


def outcome(config: LadderConfig, folder: str | os.PathLike[str]) -> Outcome:
    """Summarise how the runs of a ladder have ended so far."""
    _, config = open_data(config, progress=False)
    rows = Store(folder).rows()
    plan = LadderPlan(config, hash_by_scheme(read_forecasts(Path(folder)), rows))
    known = {run.name for run in plan.known_runs(rows)}
    own = [row for row in rows if row["run"] in known]
    interrupted = {row["run"] for row in own if row["state"] == "interrupted"}
    # Failures during a learning-rate search are expected; a stuck or diverged run is a result.
    failed = [
        row for row in own
        if row["role"] == "judge" and row["state"] == "failed" and not row.get("stuck") and row.get("diverged") is None
    ]  # fmt: skip
    due = sum(run.name not in interrupted for run in plan.runnable(rows))
    work = plan.work(rows)
    return Outcome(due, work.runs - work.ended, plan.is_open(rows), len(failed), len(interrupted))
