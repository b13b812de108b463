"""Read the rows that a ladder's runs have stored, as `LadderRow`s."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from normlab.compare.report.copy_gain import copy_gain
from normlab.compare.report.gpu_sharing import runs_sharing_gpu
from normlab.ladders.rows import LadderRow

Row = Mapping[str, Any]


def judged_rows(rows: Sequence[Row], field: str = "loss", *, set_aside: Collection[str] = ()) -> list[LadderRow]:
    """The rows that count for the answer, not those that found learning rates; `field` names the loss to take.

    `set_aside` are runs at a rate that is no longer the picked one.
    """
    ended = [row for row in rows if row["role"] == "judge" and row["state"] != "interrupted"]
    judged = [row for row in ended if row["run"] not in set_aside]
    # A run that shared its GPU, and one on a CPU whose cores others used, has no speed to compare.
    shared = runs_sharing_gpu((row["run"], row) for row in rows)
    return [_row(row, field, row["run"] not in shared) for row in judged]


def run_state(row: Row) -> str:
    """done, stuck, diverged or failed."""
    if row.get("stuck"):
        return "stuck"
    return "diverged" if row.get("diverged") is not None else row["state"]


def _row(row: Row, field: str, has_speed: bool) -> LadderRow:
    value = row.get(field)
    state, usable = run_state(row), value is not None and math.isfinite(value)
    return LadderRow(
        scheme=row["scheme"], size=row["size"], parameters=row["parameters"], tokens=row["budget"], flops=row["flops"],
        seed=row["seed"], loss=value if usable else None, steps=row["planned_steps"], trunk=row["trunk"],
        tokens_per_s=row["tokens_per_s"] if has_speed and row.get("gpu") else None, lr=row["lr"],
        state=state if usable or state != "done" else "failed", started=row["started"], forecast=row.get("forecast"),
        copying=copy_gain(row["profiles"][-1]) if row.get("profiles") else None,
    )  # fmt: skip


def validation_sets(rows: Iterable[Row]) -> list[str]:
    """Names of the further validation sets that the runs were scored on."""
    found = [name.removeprefix("loss_") for row in rows for name in row if name.startswith("loss_")]
    return list(dict.fromkeys(found))
