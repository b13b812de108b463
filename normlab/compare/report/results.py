"""Load the results of a comparison folder or a run folder, as plain data for the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from normlab.compare.report.run_metrics import Metrics, metrics_of_row, read_metrics
from normlab.compare.statistics import SchemeResult, rank_schemes
from normlab.compare.store import Store
from normlab.errors import NormLabError
from normlab.pages.numbers import finite_or_none, join_names
from normlab.train.config import DEFAULT_TASK
from normlab.train.metrics import LOSS, TITLES, Metric, metric_named
from normlab.train.monitor.stuck import has_recovered
from normlab.train.tasks import TASKS
from normlab.utils.results_folder import COMPARISON, RUN

Table = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """One run, from its row in the store, its folder, or both."""

    id: str
    scheme: str
    label: str
    state: str
    """done, failed, interrupted, stopped, stuck, running, or unknown."""

    lr: float | None = None
    seed: int | None = None
    role: str | None = None
    reason: str | None = None
    value: float | None = None
    row: Table = field(default_factory=dict)
    """Measured values: the fields of a row, as far as they are known."""

    config: Table = field(default_factory=dict)
    versions: Table = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def is_stuck(self) -> bool:
        """Whether its loss was not 0.1 below the unigram entropy 300 steps after warm-up, or at its end.

        Rows of version 0.1 lack this field.
        """
        return self.state == "stuck" or (self.state in ("done", "failed") and bool(self.row.get("stuck")))

    @property
    def has_recovered(self) -> bool:
        """Whether it was stuck and no longer was at its end; it is marked all the same."""
        entropy, loss = self.row.get("unigram_entropy"), self.row.get("loss")
        if not self.is_stuck or entropy is None or loss is None:
            return False
        return has_recovered(entropy, loss, self.row.get("stuck_at"), self.row["steps"])

    @property
    def has_failed(self) -> bool:
        """Whether it failed; a run that was stopped early because it was stuck did not."""
        return self.state == "failed" and not self.is_stuck

    @property
    def is_lost(self) -> bool:
        """Whether it is excluded from all means."""
        return self.has_failed or self.is_stuck or self.state == "interrupted"


@dataclass(frozen=True, kw_only=True)
class Results:
    """All results of a comparison or run, for pages and tables."""

    folder: Path
    kind: Literal["comparison", "run"]
    runs: list[ReportedRun]
    about: Table = field(default_factory=dict)
    """compare.json, or the run's config.json."""

    baseline: str | None = None
    metric: Metric = LOSS
    level: float = 0.95
    standings: list[SchemeResult] = field(default_factory=list)
    problem: str | None = None
    """Why there is no ranking, in one line."""

    @property
    def schemes(self) -> list[str]:
        """In the order given by the user: a scheme's colour does not change with its rank."""
        named = self.about.get("schemes")
        first = [str(name) for name in named] if isinstance(named, list) else []
        found = list(dict.fromkeys(run.scheme for run in self.runs))
        return [name for name in dict.fromkeys(first) if name in found] + [n for n in found if n not in first]

    def label(self, scheme: str) -> str:
        return next((run.label for run in self.runs if run.scheme == scheme), scheme)

    def scheme_result(self, scheme: str) -> SchemeResult | None:
        return next((own for own in self.standings if own.scheme == scheme), None)

    def chosen(self, scheme: str) -> list[ReportedRun]:
        """The runs that represent a scheme: judge runs at its rate, else tune runs there, else all it has.

        Runs that failed or were stuck are included only if there are no others.
        """
        of_scheme = [run for run in self.runs if run.scheme == scheme]
        own = [run for run in of_scheme if not run.is_lost] or of_scheme
        standing = self.scheme_result(scheme)
        at_rate = [run for run in own if standing is None or standing.lr is None or run.lr == standing.lr]
        return [run for run in at_rate if run.role == "judge"] or at_rate or own


def load_results(folder: str | Path) -> Results:
    """Read a comparison folder (compare.json, rows.jsonl) or a run folder (metrics.jsonl, status.json)."""
    folder = Path(folder)
    if (folder / COMPARISON).is_file() or (folder / "rows.jsonl").is_file():
        return _comparison(folder)
    if any((folder / name).is_file() for name in ("metrics.jsonl", "status.json", RUN)):
        run = _run_in(folder, {})
        # config.json of a run also has its versions and its command.
        about = _read_table(folder / RUN)
        return Results(folder=folder, kind="run", runs=[run], about=about, metric=_metric_of(run))
    if not folder.is_dir():
        raise NormLabError(f"there is no folder {folder}; expected one made by normlab train, compare or ladder")
    raise NormLabError(
        f"{folder} holds neither a comparison (compare.json, rows.jsonl) nor a run (metrics.jsonl); "
        "name a folder that normlab compare, normlab ladder or normlab train made"
    )


def find_field(table: Any, *names: str) -> Any:
    """The first of these fields in a nested dictionary, outermost first; None if there is none."""
    level = [table]
    while level:
        tables = [entry for entry in level if isinstance(entry, Mapping)]
        for name in names:
            for entry in tables:
                if entry.get(name) is not None:
                    return entry[name]
        level = [value for entry in tables for value in entry.values()]
    return None


def _comparison(folder: Path) -> Results:
    about = _read_table(folder / COMPARISON)
    rows = Store(folder).rows()
    runs = [_run_in(folder / "runs" / row["run"], row) for row in rows]
    runs += _under_way(folder, {run.id for run in runs})
    baseline = find_field(about, "baseline") or (rows[0]["scheme"] if rows else None)
    metric = metric_named(str(find_field(about, "metric") or (rows[0]["metric"] if rows else LOSS.name)))
    level = finite_or_none(about.get("level")) or 0.95
    standings, problem = _standings(rows, baseline, level)
    return Results(
        folder=folder, kind="comparison", runs=runs, about=about, baseline=baseline, metric=metric, level=level,
        standings=standings, problem=problem,
    )  # fmt: skip


def _metric_of(run: ReportedRun) -> Metric:
    """Metric of a run's task; version 0.1 had no tasks."""
    name = str(find_field(run.config, "task") or DEFAULT_TASK)
    return TASKS[name].metric if name in TASKS else LOSS


def _standings(rows: list[Table], baseline: Any, level: float) -> tuple[list[SchemeResult], str | None]:
    if not rows:
        return [], "no run has ended yet"
    metrics = dict.fromkeys(row["metric"] for row in rows)
    if len(metrics) > 1:
        # Rows of two comparisons in one file: losses of different things have no order.
        return [], f"rows have several metrics, {join_names(metrics)}"
    try:
        return rank_schemes(rows, str(baseline), level), None
    except NormLabError as error:
        return [], str(error)


def _under_way(folder: Path, ended: set[str]) -> list[ReportedRun]:
    runs = folder / "runs"
    found = sorted(path for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []
    return [_run_in(path, {}) for path in found if path.name not in ended]


def _run_in(folder: Path, row: Table) -> ReportedRun:
    """Combine a run's folder and its row; the row takes precedence, either may be missing."""
    # The name comes from a file and must not lead out of the comparison's folder.
    inside = row.get("run", folder.name) == folder.name
    status = _read_table(folder / "status.json") if inside else {}
    written = _read_table(folder / RUN) if inside else {}
    # config.json of a run also has its versions and device.
    stored = written.get("config")
    config = row.get("config") or (stored if isinstance(stored, dict) else written)
    there = inside and (folder / "metrics.jsonl").is_file()
    # Rows without their run folders contain a coarse history.
    metrics = read_metrics(folder / "metrics.jsonl") if there else metrics_of_row(row)
    seed = finite_or_none(row.get("seed", find_field(config, "seed")))
    reason = row.get("reason") or find_field(status, "reason")
    scheme = str(row.get("scheme") or find_field(config, "scheme") or folder.name)
    return ReportedRun(
        id=str(row.get("run", folder.name)),
        scheme=scheme,
        label=str(row.get("label") or find_field(config, "label") or scheme),
        state=str(row.get("state") or status.get("state") or "unknown"),
        lr=finite_or_none(row.get("lr", find_field(config, "lr", "learning_rate"))),
        seed=None if seed is None else int(seed),
        role=row.get("role"),
        reason=None if reason is None else str(reason),
        value=finite_or_none(row.get("value")),
        row=row or _measured(status, written, metrics),
        config=config,
        versions=row.get("versions") or find_field(written, "versions") or {},
        metrics=metrics,
    )


def _measured(status: Table, config: Table, metrics: Metrics) -> Table:
    """The fields of a row, from the metrics of a run without one."""
    evaluation = metrics.eval[-1] if metrics.eval else {}
    memory = [m for record in metrics.step if (m := finite_or_none(record.get("memory_bytes"))) is not None]
    found = status.get("result")
    result = found if isinstance(found, dict) else {}
    return {
        **{name: result[name] for name in ("stuck", "stuck_at", "unigram_entropy", "first_loss") if name in result},
        **{name: evaluation.get(name) for name in TITLES if name in evaluation},
        "tokens": status.get("tokens") or metrics.last("tokens"),
        "steps": status.get("step") or metrics.last("step"),
        "seconds": metrics.last("seconds"),
        "tokens_per_s": metrics.last("tokens_per_s"),
        "peak_bytes": max(memory, default=None),
        "device": status.get("device") or find_field(config, "device"),
    }


def _read_table(path: Path) -> Table:
    """Read a JSON object; empty if the file is missing or is not one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
