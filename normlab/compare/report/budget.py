"""What runs were trained on, in the unit that a user gives the budget in: tokens of a text, or images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normlab.compare.report.results import ReportedRun, Results, find_field
from normlab.pages.numbers import finite_or_none
from normlab.train.config import DEFAULT_TASK
from normlab.train.tasks import TASKS

_TOKENS = "tokens"


def budget_unit(config: Mapping[str, Any]) -> str:
    """tokens or images: the unit of a run's task; rows of version 0.1 had no tasks."""
    task = str(find_field(config, "task") or DEFAULT_TASK)
    return TASKS[task].config.budget if task in TASKS else _TOKENS


def unit_of(results: Results) -> str:
    """The unit of the runs of a comparison."""
    return budget_unit(next((run.config for run in results.runs if run.config), results.about))


def trained_on(run: ReportedRun) -> float | None:
    """Number of tokens, or of images, that a run was trained on; None if it is not recorded."""
    tokens = finite_or_none(run.row.get("tokens"))
    return None if tokens is None else tokens * units_a_token(run)


def units_a_token(run: ReportedRun) -> float:
    """Images for each token that the blocks processed; 1 for text."""
    tokens, steps = (finite_or_none(run.row.get(name)) for name in ("tokens", "steps"))
    batch = finite_or_none(run.config.get("batch"))
    if budget_unit(run.config) == _TOKENS or not (tokens and steps and batch):
        return 1.0
    return steps * batch / tokens
