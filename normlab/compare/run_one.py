"""Execute one training run of a comparison and return its result row; a failure is recorded as a result."""

from __future__ import annotations

import json
import math
import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from normlab.compare.plan import PlannedRun
from normlab.errors import NormLabError
from normlab.train.monitor.summary import summarise
from normlab.train.result import TrainResult
from normlab.train.storage.folder import RunFolder, now
from normlab.train.storage.sinks import read_records
from normlab.train.tasks import Data
from normlab.train.trainer import train
from normlab.utils.locks import wait_for
from normlab.utils.versions import versions

_TAIL_BYTES = 2**16

_opened: dict[str, Data] = {}
"""Data that this process has already opened, by fingerprint."""


@dataclass(frozen=True)
class Job:
    """One run for a worker process to execute."""

    run: PlannedRun
    folder: Path
    """Folder of the run."""
    fingerprint: str
    """Fingerprint of the data, the same for all runs."""
    branch_from: Path | None = None
    """Folder of the run whose checkpoint this one starts from; None: from its first step."""


def _known_data(job: Job) -> Data:
    """The data of the comparison, opened once per process."""
    if job.fingerprint in _opened:
        return _opened[job.fingerprint]
    config = job.run.config
    data = config.task_object.open(config, progress=False)
    if data.fingerprint != job.fingerprint:
        raise NormLabError(
            "a worker finds other data than the comparison began with; on a cluster every machine needs the same data, "
            "and the same Python where the data is its standard library"
        )
    _opened[job.fingerprint] = data
    return data


def execute_job(job: Job) -> dict[str, Any] | None:
    """Train or resume a run; return its row, or None if it was stopped.

    Errors that the user can fix (a full disk, a missing package) are raised: they are not results of the run.
    """
    began, data = now(), _known_data(job)
    job.folder.mkdir(parents=True, exist_ok=True)
    # A worker of a killed comparison may still be saving this run.
    with wait_for(job.folder / "lock"):
        pass
    try:
        result = train(job.run.config, job.folder, data=data, progress=False, branch_from=job.branch_from)
    except NormLabError:
        raise
    except Exception as error:
        traceback.print_exc()
        return lost_run_row(job, "failed", _in_one_line(error), began)
    return None if result.state == "stopped" else _row(job, result, began)


def lost_run_row(job: Job, state: Literal["failed", "interrupted"], reason: str, began: str) -> dict[str, Any]:
    """The row of a run that did not finish, from its metrics so far.

    "interrupted" means that its process was killed or lost, which is not a result of the run.
    """
    last = last_step(job.folder) or {}
    seconds, tokens = last.get("seconds") or 0.0, last.get("tokens") or 0
    result = TrainResult(
        state=state, reason=reason, steps=last.get("step") or 0, tokens=tokens,
        seconds=seconds, tokens_per_s=tokens / seconds if seconds else 0.0, peak_bytes=last.get("memory_bytes"),
        device=_device(job.folder),
    )  # fmt: skip
    return _row(job, result, began)


def last_step(folder: Path) -> dict[str, Any] | None:
    """The newest step record of a run's metrics, which may still be open for writing."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    return next((json.loads(line) for line in reversed(lines) if line.startswith(b'{"kind": "step"')), None)


def _row(job: Job, result: TrainResult, began: str) -> dict[str, Any]:
    run, metric = job.run, job.run.config.task_object.metric
    state, reason, value = result.state, result.reason, result.scores.get(metric.field)
    # The loss of a stuck run that was stopped early is shown, but is not part of any mean.
    state = "done" if state == "stuck" else state
    if state == "done" and (value is None or not math.isfinite(value)):
        state, reason = "failed", f"the {metric.title} is {value}"
    return {
        "run": run.name, "scheme": run.scheme, "label": run.scheme, "lr": run.config.lr, "seed": run.config.seed,
        "role": run.role, "state": state, "reason": reason, "metric": metric.name,
        "value": value if state == "done" else None, "loss": None, **result.scores,
        "tokens": result.tokens, "steps": result.steps, "seconds": result.seconds,
        "tokens_per_s": result.tokens_per_s, "peak_bytes": result.peak_bytes, "device": result.device,
        "gpu": result.gpu, "first_loss": result.first_loss, "unigram_entropy": result.unigram_entropy,
        "stuck": result.stuck, "stuck_at": result.stuck_at, "diverged": result.diverged,
        "versions": versions(), "config": run.config.shared_dict(), "started": began, "finished": now(),
        **_measured(job),
    }  # fmt: skip


def _measured(job: Job) -> dict[str, Any]:
    """Summary of the run's metrics; empty if it never began."""
    return summarise(read_records(RunFolder(job.folder).metrics), job.run.config.steps)


def _in_one_line(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}".rstrip(": ")


def _device(folder: Path) -> str:
    try:
        return json.loads((folder / "config.json").read_bytes())["device"]
    except (OSError, ValueError, KeyError):
        return "unknown"
