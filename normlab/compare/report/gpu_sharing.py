"""Find runs that shared a GPU with another run: their speed is not representative."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from normlab.compare.report.results import ReportedRun


def runs_sharing_gpu(runs: Sequence[ReportedRun]) -> set[str]:
    """Names of runs that overlapped in time with another run on the same GPU."""
    timed = [(run.id, gpu, times) for run in runs if (gpu := _gpu(run)) and (times := _times(run))]
    return {
        name
        for name, gpu, (begin, end) in timed
        for other, same, (from_, to) in timed
        if other != name and same == gpu and from_ < end and begin < to
    }


def _gpu(run: ReportedRun) -> str | None:
    """Identifier of the GPU, or its model name if the row lacks one; only GPU runs record peak memory."""
    return run.row.get("gpu") or (run.row.get("device") if run.row.get("peak_bytes") is not None else None)


def _times(run: ReportedRun) -> tuple[datetime, datetime] | None:
    try:
        return datetime.fromisoformat(run.row["started"]), datetime.fromisoformat(run.row["finished"])
    except (KeyError, TypeError, ValueError):
        return None
