"""Find runs that shared a GPU with another run: their speed is not representative."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from normlab.compare.report.results import ReportedRun


def runs_sharing_gpu(runs: Sequence[ReportedRun]) -> set[str]:
    """The names of runs that were under way while another run was on their GPU."""
    timed = [(run.id, gpu, times) for run in runs if (gpu := _gpu(run)) and (times := _times(run))]
    return {
        name
        for name, gpu, (begin, end) in timed
        for other, same, (from_, to) in timed
        if other != name and same == gpu and from_ < end and begin < to
    }


def _gpu(run: ReportedRun) -> str | None:
    """The GPU; its name where a row does not tell GPUs of one name apart. Only GPUs say what memory they gave."""
    return run.row.get("gpu") or (run.row.get("device") if run.row.get("peak_bytes") is not None else None)


def _times(run: ReportedRun) -> tuple[datetime, datetime] | None:
    try:
        return datetime.fromisoformat(run.row["started"]), datetime.fromisoformat(run.row["finished"])
    except (KeyError, TypeError, ValueError):
        return None
