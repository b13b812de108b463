"""Table of the scores on tasks and texts: the mean of every scheme, and its paired difference to the baseline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from normlab.compare.report.results import Results
from normlab.compare.scores import FILE
from normlab.compare.statistics import paired_difference
from normlab.evaluation.groups import Groups, grouped_mean
from normlab.evaluation.store import Store
from normlab.numerics.student_t import t_interval
from normlab.pages.numbers import NONE, finite_or_none, fixed, signed
from normlab.pages.tables import Cell, Column, Table, numeric_cell

_PLACES = 4
_HASH_SHOWN = 8
"""Characters of a hash that tell two contents of one name apart."""


class _Line(NamedTuple):
    """What the scores of a line are of."""

    task: str
    metric: str
    settings: str
    """As JSON: windows, limit, and hashes of what was asked."""


class _Scored(NamedTuple):
    """The score of one run."""

    value: float
    groups: Groups | None


_Seeds = Mapping[int, _Scored]
"""Scores by seed."""


def scores_table(results: Results) -> Table:
    """One line for each scheme and metric; empty if nothing was evaluated."""
    base = results.baseline or ""
    columns = [
        Column("Scheme"), Column("Task"), Column("Metric"), Column("Mean", True),
        Column(f"Against {results.label(base)}", True), Column("Interval over seeds"), Column("Seeds", True),
    ]  # fmt: skip
    scores = _scores(results)
    grouped = any(run.groups for schemes in scores.values() for seeds in schemes.values() for run in seeds.values())
    columns += [Column("Interval over groups"), Column("Groups", True)] if grouped else []
    rows: list[list[Cell]] = []
    names = _names(list(scores))
    for key, schemes in scores.items():
        task, metric = names[key], key.metric
        for scheme in (name for name in results.schemes if name in schemes):
            other = schemes.get(base, {}) if scheme != base else {}
            line = _line(results, scheme, task, metric, schemes[scheme], other)
            rows.append([*line, *(_of_groups(schemes[scheme], other, results.level) if grouped else ())])
    note = (
        f"Means over seeds. Intervals are those of paired differences at level {results.level:g}, each line by itself: "
        f"among many lines some differ by chance. Over seeds: other runs on the same questions. "
        f"Runs that were stuck are left out."
    )
    note += " Over groups: the same runs on other groups of questions (other books, say)." if grouped else ""
    return Table("Scores on tasks and texts", columns, rows, note=note)


def _scores(results: Results) -> dict[_Line, dict[str, dict[int, _Scored]]]:
    """Scheme → scores by seed for each line, of the runs that represent a scheme.

    Settings tell questions apart: the same ones may have had another name in an earlier call, and have the newest here.
    """
    runs = {run.id: run for scheme in results.schemes for run in results.chosen(scheme)}
    judges = {name: run for name, run in runs.items() if run.role == "judge" and not run.is_lost}
    found: dict[_Line, dict[str, dict[int, _Scored]]] = {}
    newest: dict[_Line, str] = {}
    for row in Store(results.folder / FILE).rows:
        run = judges.get(row["run"].rpartition("/")[2])
        if run is None or run.seed is None:
            continue
        for score in row["scores"]:
            if (value := finite_or_none(score["value"])) is not None:
                part = "" if score["task"] == row.get("task") else score["task"]
                line = _Line(part, score["metric"], json.dumps(row["settings"]))
                newest[line] = score["task"]
                found.setdefault(line, {}).setdefault(run.scheme, {})[run.seed] = _Scored(value, score.get("groups"))
    return {line._replace(task=newest[line]): schemes for line, schemes in found.items()}


def _names(lines: Sequence[_Line]) -> dict[_Line, str]:
    """What to call the task of every line: with its limit, and with the settings that tell it from its namesakes."""
    found = {}
    for line in lines:
        own = json.loads(line.settings)
        others = [json.loads(other.settings) for other in lines if other[:2] == line[:2]]
        apart = [name for name in own if name != "limit" and any(other.get(name) != own[name] for other in others)]
        limit = [] if own.get("limit") is None else [f"first {own['limit']}"]
        told = ", ".join([*limit, *(_told(name, own[name]) for name in apart)])
        found[line] = f"{line.task} ({told})" if told else line.task
    return found


def _told(name: str, value: Any) -> str:
    """A setting in words; of a hash, as of a text that has changed since, the beginning."""
    return f"{name.replace('_', ' ')} {str(value)[:_HASH_SHOWN]}"


def _line(results: Results, scheme: str, task: str, metric: str, own: _Seeds, base: _Seeds) -> list[Cell]:
    shared = own.keys() & base.keys()
    difference = paired_difference(_values(own), _values(base), results.level) if shared else None
    mean = sum(_values(own).values()) / len(own)
    low, interval = None, NONE
    if difference is not None and difference.low is not None:
        low, interval = difference.low, f"{signed(difference.low, _PLACES)} to {signed(difference.high, _PLACES)}"
    gap = None if difference is None else difference.mean
    label = results.label(scheme)
    return [
        Cell(label, label.lower(), scheme=results.schemes.index(scheme)), Cell(task, task), Cell(metric, metric),
        numeric_cell(fixed(mean, _PLACES), mean), numeric_cell(signed(gap, _PLACES), gap),
        Cell(interval, low, whole=True), _seeds_cell(len(own), len(shared) if base else len(own)),
    ]  # fmt: skip


def _seeds_cell(seeds: int, pairs: int) -> Cell:
    """The seeds of the mean, and how many of them the baseline has, too, if not all."""
    return numeric_cell(str(seeds) if pairs == seeds else f"{seeds}, {pairs} paired", seeds)


def _values(seeds: _Seeds) -> dict[int, float]:
    return {seed: run.value for seed, run in seeds.items()}


def _of_groups(own: _Seeds, base: _Seeds, level: float) -> list[Cell]:
    """Student's t interval of the difference over groups, each averaged over the seeds that both have."""
    gaps = _gaps(own, base)
    over = grouped_mean(gaps) if gaps else None
    if over is None or over.stderr is None:
        return [Cell(NONE, None, whole=True), numeric_cell(NONE, None)]
    half = t_interval(level, over.groups - 1) * over.stderr
    interval = f"{signed(over.mean - half, _PLACES)} to {signed(over.mean + half, _PLACES)}"
    return [Cell(interval, over.mean - half, whole=True), numeric_cell(str(over.groups), over.groups)]


def _gaps(own: _Seeds, base: _Seeds) -> dict[str, tuple[float, int]]:
    """The mean difference of every group; empty unless all runs have the same groups."""
    pairs = [(own[seed].groups or {}, base[seed].groups or {}) for seed in sorted(own.keys() & base.keys())]
    sizes = {tuple((group, size) for group, (_, size) in sorted(one.items())) for pair in pairs for one in pair}
    if len(sizes) != 1:
        return {}
    (common,) = sizes
    return {group: (sum(a[group][0] - b[group][0] for a, b in pairs) / len(pairs), size) for group, size in common}
