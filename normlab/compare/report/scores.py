"""Table of the scores on tasks and texts: the mean of every scheme, and its paired difference to the baseline."""

from __future__ import annotations

import json
from typing import Any

from normlab.compare.report.results import Results
from normlab.compare.scores import FILE
from normlab.compare.statistics import paired_difference
from normlab.evaluation.store import Store
from normlab.pages.numbers import NONE, finite_or_none, fixed, signed
from normlab.pages.tables import Cell, Column, Table, numeric_cell

_PLACES = 4
Values = dict[int, float]
"""Scores by seed."""


def scores_table(results: Results) -> Table:
    """One line for each scheme and metric; empty if nothing was evaluated."""
    base = results.baseline or ""
    columns = [
        Column("Scheme"), Column("Task"), Column("Metric"), Column("Mean", True),
        Column(f"Against {results.label(base)}", True), Column("Interval"), Column("Seeds", True),
    ]  # fmt: skip
    rows: list[list[Cell]] = []
    for (task, metric, _), schemes in _scores(results).items():
        for scheme in (name for name in results.schemes if name in schemes):
            other = schemes.get(base, {}) if scheme != base else {}
            rows.append(_line(results, scheme, task, metric, schemes[scheme], other))
    note = (
        f"Means over seeds. Intervals are those of paired differences at level {results.level:g}, each line by itself: "
        f"among many lines some differ by chance."
    )
    return Table("Scores on tasks and texts", columns, rows, note=note)


def _scores(results: Results) -> dict[tuple[str, str, str], dict[str, Values]]:
    """(task, metric, settings) → scheme → scores by seed, of the runs that represent a scheme."""
    runs = {run.id: run for scheme in results.schemes for run in results.chosen(scheme) if run.role == "judge"}
    found: dict[tuple[str, str, str], dict[str, Values]] = {}
    for row in Store(results.folder / FILE).rows:
        run = runs.get(row["run"].rpartition("/")[2])
        if run is None or run.seed is None:
            continue
        for score in row["scores"]:
            if (value := finite_or_none(score["value"])) is not None:
                key = (_named(score["task"], row["settings"]), score["metric"], json.dumps(row["settings"]))
                found.setdefault(key, {}).setdefault(run.scheme, {})[run.seed] = value
    return found


def _named(task: str, settings: dict[str, Any]) -> str:
    limit = settings.get("limit")
    return task if limit is None else f"{task} (first {limit})"


def _line(results: Results, scheme: str, task: str, metric: str, own: Values, base: Values) -> list[Cell]:
    shared = own.keys() & base.keys()
    difference = paired_difference(own, base, results.level) if shared else None
    mean = sum(own.values()) / len(own)
    low, interval = None, NONE
    if difference is not None and difference.low is not None:
        low, interval = difference.low, f"{signed(difference.low, _PLACES)} to {signed(difference.high, _PLACES)}"
    gap = None if difference is None else difference.mean
    label = results.label(scheme)
    return [
        Cell(label, label.lower(), scheme=results.schemes.index(scheme)), Cell(task, task), Cell(metric, metric),
        numeric_cell(fixed(mean, _PLACES), mean), numeric_cell(signed(gap, _PLACES), gap),
        Cell(interval, low, whole=True), numeric_cell(str(len(own)), len(own)),
    ]  # fmt: skip
