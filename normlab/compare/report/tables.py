"""Tables of the report: ranking, speed, runs, trouble in training, configuration, environment, events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from normlab.compare.report.budget import trained_on, unit_of, units_a_token
from normlab.compare.report.cautions import difference_digits
from normlab.compare.report.gpu_sharing import runs_sharing_gpu
from normlab.compare.report.results import ReportedRun, Results
from normlab.compare.report.verdict import failure_reason
from normlab.compare.statistics import SchemeResult
from normlab.pages.numbers import NONE, duration, finite_or_none, fixed, format_count, memory, rate, signed
from normlab.pages.tables import Cell, Column, Table, flatten, numeric_cell
from normlab.train.metrics import TITLES, Metric

MARKS = {"no difference shown": "≈", "failed": "✕", "unreliable": "✕", "stuck": "✕"}


def ranking_table(results: Results) -> Table:
    """Ranking: result, difference to the baseline with its interval, and verdict of every scheme."""
    base = results.label(results.baseline or "")
    columns = [
        Column("Scheme"), Column(results.metric.title.capitalize(), True), Column(f"Against {base}", True),
        Column("Interval"), Column("Detectable", True), Column("Verdict"), *_beside(results), Column("Rate", True),
        Column("Seeds", True),
    ]  # fmt: skip
    places = difference_digits(results)
    return Table("Ranking", columns, [_standing_row(results, own, places) for own in results.standings]).filled()


def _beside(results: Results) -> list[Column]:
    """Headings of the other values of an evaluation."""
    return [Column(TITLES[name], True) for name in results.metric.beside]


def _standing_row(results: Results, own: SchemeResult, places: int) -> list[Cell]:
    difference = own.difference
    interval, low = NONE, None
    if difference is not None and difference.low is not None:
        low = difference.low
        interval = f"{signed(low, places)} to {signed(difference.high, places)}"
    edge = f" ({own.edge_words.removeprefix('the ').removesuffix(' tried')})" if own.edge else ""
    mark = _mark(own.verdict, results.metric)
    judged = [run for run in results.runs if run.scheme == own.scheme and run.role == "judge" and run.lr == own.lr]
    done = [run for run in judged if run.state == "done" and not run.is_stuck]
    others = [_mean(run.row.get(name) for run in done) for name in results.metric.beside]
    return [
        Cell(own.label, own.label.lower(), scheme=results.schemes.index(own.scheme)),
        numeric_cell(fixed(own.mean, places), own.mean),
        numeric_cell(signed(difference.mean if difference else None, places), difference.mean if difference else None),
        Cell(interval, low, whole=True),
        numeric_cell(fixed(own.detectable, places), own.detectable),
        Cell(f"{mark} {own.verdict}".strip(), own.verdict, tone=own.verdict.replace(" ", "-")),
        *(numeric_cell(fixed(value), value) for value in others),
        numeric_cell(rate(own.lr) + edge, own.lr),
        numeric_cell(_seeds(own), len(own.finished)),
    ]


def _seeds(own: SchemeResult) -> str:
    """Number of judge seeds that trained, failed and were stuck."""
    share = str(len(own.values)) if not own.lost else f"{len(own.finished)} of {len(own.values)}"
    lost = ((len(own.stuck), "stuck"), (own.failed, "failed"))
    return ", ".join([share, *(f"{number} {what}" for number, what in lost if number)])


def _mark(verdict: str, metric: Metric) -> str:
    """Arrow for the side of the baseline on which a scheme lies."""
    if verdict in ("better", "worse"):
        return "▲" if (verdict == "better") == metric.higher else "▼"
    return MARKS.get(verdict, "")


@dataclass(frozen=True)
class Cost:
    """Cost of a scheme's runs: medians over the runs that represent it."""

    speed: float | None = None
    mfu: float | None = None
    peak: float | None = None
    seconds: float | None = None


def median_cost(runs: Sequence[ReportedRun]) -> Cost:
    done = [run for run in runs if run.state == "done"] or list(runs)
    return Cost(
        speed=_median(_speed(run) for run in done),
        # The peak FLOP rate of a CPU is a rough estimate, and small models are far from it.
        mfu=_median(run.metrics.mfu for run in done if run.row.get("peak_bytes") is not None),
        peak=_median(run.row.get("peak_bytes") for run in done),
        # Zero is what a row has whose times were lost.
        seconds=_median(run.row.get("seconds") or None for run in done),
    )


def _speed(run: ReportedRun) -> float | None:
    """Tokens, or images, per second."""
    found = run.metrics.tokens_per_s or finite_or_none(run.row.get("tokens_per_s"))
    return None if found is None else found * units_a_token(run)


def speed_table(results: Results) -> Table:
    """Throughput and memory, with ratios to the baseline; no ratios if runs shared a GPU."""
    spoken = [run for scheme in results.schemes for run in results.chosen(scheme)]
    together = runs_sharing_gpu((run.id, run.row) for run in results.runs) & {run.id for run in spoken}
    base = median_cost(results.chosen(results.baseline)) if results.baseline in results.schemes else Cost()
    beside = f"against {results.label(results.baseline or '')}"
    columns = [
        Column("Scheme"),
        Column(f"{unit_of(results).capitalize()}/s", True),
        Column("Speed " + beside, True),
        Column("Of peak", True),
    ]
    columns += [Column("Peak memory", True), Column("Memory " + beside, True), Column("Run time", True)]
    rows = [_cost_row(results, k, scheme, base, alone=not together) for k, scheme in enumerate(results.schemes)]
    if results.kind == "run":
        # A single run has no ratios.
        keep = [0, 1, 3, 4, 6]
        columns, rows = [columns[k] for k in keep], [[row[k] for k in keep] for row in rows]
    note = f"{len(together)} of {len(spoken)} runs shared a GPU with another run, which took its part of the speed."
    return Table("Speed and memory", columns, rows, note=f"{note} Ratios are left out." if together else "").filled()


def _cost_row(results: Results, k: int, scheme: str, base: Cost, *, alone: bool) -> list[Cell]:
    own = median_cost(results.chosen(scheme))
    speed, peak = _ratio(own.speed, base.speed) if alone else None, _ratio(own.peak, base.peak)
    mfu = own.mfu if alone else None
    return [
        Cell(results.label(scheme), results.label(scheme).lower(), scheme=k),
        numeric_cell(format_count(own.speed), own.speed),
        numeric_cell(_percent(speed), speed),
        numeric_cell(_percent(mfu), mfu),
        numeric_cell(memory(own.peak), own.peak),
        numeric_cell(_percent(peak), peak),
        numeric_cell(duration(own.seconds), own.seconds),
    ]


def run_table(results: Results) -> Table:
    """Every run, including those that failed or have not ended."""
    columns = [Column("Run"), Column("Scheme"), Column("Role")]
    columns += [Column("Rate", True), Column("Seed", True), Column("State")]
    columns += [Column(results.metric.title.capitalize(), True), *_beside(results)]
    columns += [Column(unit_of(results).capitalize(), True), Column("Remark")]
    return Table("All runs", columns, [_run_row(results, run) for run in results.runs]).filled()


def _run_row(results: Results, run: ReportedRun) -> list[Cell]:
    value = run.value if run.row.get("value") is not None else finite_or_none(run.row.get(results.metric.field))
    others = [run.row.get(name) for name in results.metric.beside]
    state = "stuck" if run.is_stuck else run.state
    return [
        Cell(run.id, run.id),
        Cell(run.label, run.label.lower(), scheme=results.schemes.index(run.scheme)),
        Cell(run.role or NONE, run.role or ""),
        numeric_cell(rate(run.lr), run.lr),
        numeric_cell(NONE if run.seed is None else str(run.seed), run.seed),
        Cell(state, state, tone=state),
        numeric_cell(fixed(value), value),
        *(numeric_cell(fixed(other), other) for other in others),
        numeric_cell(format_count(trained_on(run)), trained_on(run)),
        Cell(failure_reason(run) if run.state == "failed" else run.reason or "", run.reason or ""),
    ]


_TROUBLE = {"spikes": "spike", "nonfinite": "nonfinite", "skipped": "skip", "rollbacks": "rollback"}
"""Counts in a row, and the event of `metrics.jsonl` that each of them counts."""


def trouble_table(results: Results) -> Table:
    """Spikes, bad steps and rollbacks of all runs of a scheme, and the sensitivity of those that represent it."""
    columns = [Column("Scheme"), Column("Runs", True), Column("Spikes", True), Column("Non-finite steps", True)]
    columns += [Column("Skipped steps", True), Column("Rollbacks", True), Column("Sensitivity", True)]
    rows = [_trouble_row(results, k, scheme) for k, scheme in enumerate(results.schemes)]
    note = (
        "Counts are sums over all runs of a scheme, at any rate. Sensitivity: relative change of the output per "
        "relative change of the input, at the end of training, mean over the runs that represent the scheme."
    )
    found = Table("Trouble in training", columns, rows, note=note).filled()
    # Rows of version 0.1 count nothing.
    return found if len(found.columns) > 2 else Table(found.caption, [], [])


def _trouble_row(results: Results, k: int, scheme: str) -> list[Cell]:
    runs = [run for run in results.runs if run.scheme == scheme]
    counts = [_total(_trouble_count(run, name) for run in runs) for name in _TROUBLE]
    sensitivity = _mean(_sensitivity(run) for run in results.chosen(scheme))
    return [
        Cell(results.label(scheme), results.label(scheme).lower(), scheme=k),
        numeric_cell(str(len(runs)), len(runs)),
        *(numeric_cell(NONE if number is None else str(number), number) for number in counts),
        numeric_cell(NONE if sensitivity is None else f"{sensitivity:.3g}", sensitivity),
    ]


def _trouble_count(run: ReportedRun, name: str) -> int | None:
    """From the row, or from the events of a run without one; None for a row of version 0.1 without its run."""
    found = finite_or_none(run.row.get(name))
    if found is not None:
        return int(found)
    if not run.metrics.step:
        return None
    return sum(event.get("what") == _TROUBLE[name] for event in run.metrics.event)


def _sensitivity(run: ReportedRun) -> float | None:
    last = run.metrics.profile[-1].get("sensitivity") if run.metrics.profile else None
    return finite_or_none(run.row.get("sensitivity", last))


def _total(counts: Iterable[int | None]) -> int | None:
    known = [number for number in counts if number is not None]
    return sum(known) if known else None


def config_table(results: Results) -> Table:
    """Configuration of the runs; a field in which they differ shows all its values."""
    configs = [flatten(run.config) for run in results.runs if run.config]
    names = list(dict.fromkeys(name for config in configs for name in config if not name.startswith("versions.")))
    rows = [[Cell(name), Cell(_values(config[name] for config in configs if name in config))] for name in names]
    return Table("Configuration", [Column("Field"), Column("Value")], rows, sortable=False)


def environment_table(results: Results) -> Table:
    """Devices and versions of all runs."""
    facts: dict[str, list[str]] = {"device": [str(d) for run in results.runs if (d := run.row.get("device"))]}
    for run in results.runs:
        for name, version in run.versions.items():
            facts.setdefault(str(name), []).append(str(version))
    rows = [[Cell(name), Cell(_values(values))] for name, values in facts.items() if values]
    return Table("Environment", [Column("What"), Column("Version")], rows, sortable=False)


def event_table(results: Results) -> Table:
    """Events during training: spikes, non-finite values, rollbacks, resumptions."""
    columns = [Column("Run"), Column("Step", True), Column("What"), Column("Layer"), Column("Detail")]
    rows = [
        [
            Cell(run.id, run.id), numeric_cell(str(event["step"]), event["step"]), Cell(str(event.get("what", NONE))),
            Cell(str(event.get("layer") or NONE)), Cell(str(event.get("detail") or "")),
        ]
        for run in results.runs
        for event in run.metrics.event
        if event.get("what") != "saved"
    ]  # fmt: skip
    return Table("Events", columns, rows[:200], note="The first 200 are shown." if len(rows) > 200 else "")


def _values(values: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(values))
    shown = ", ".join(distinct[:8])
    return f"{shown}, … ({len(distinct)} values)" if len(distinct) > 8 else shown


def _mean(values: Iterable[Any]) -> float | None:
    known = [found for value in values if (found := finite_or_none(value)) is not None]
    return fmean(known) if known else None


def _median(values: Iterable[Any]) -> float | None:
    known = [found for value in values if (found := finite_or_none(value)) is not None]
    return median(known) if known else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.1f} %"
