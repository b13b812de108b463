"""HTML report of a comparison or a single run: its sections, and `build`, which writes it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from normlab.compare.report import tables
from normlab.compare.report.copying import copying_table
from normlab.compare.report.header import header_facts
from normlab.compare.report.plots import plot_data
from normlab.compare.report.results import Results, find_field, load_results
from normlab.compare.report.scores import scores_table
from normlab.compare.report.verdict import level_note, verdict
from normlab.errors import NormLabError
from normlab.pages.numbers import join_names, rate
from normlab.pages.page import Section, install_command, render, section
from normlab.utils.files import writable, write_atomically


def build(folder: str | Path, *, out: str | Path | None = None, smoothing: float = 0.6) -> Path:
    """Write the HTML report of a comparison or run, by default `report.html` in its folder; return its path.

    `smoothing` in [0, 1) is the initial value of the slider of the training curves.
    """
    if not 0.0 <= smoothing < 1.0:
        raise NormLabError(f"smoothing lies in [0, 1), got {smoothing}; try 0.6")
    results = load_results(folder)
    path = results.folder / "report.html" if out is None else writable(out, ".html")
    # Unpaired surrogates cannot be encoded; they are replaced.
    write_atomically(path, render_report(results, smoothing).encode("utf-8", "replace"))
    return path


def render_report(results: Results, smoothing: float = 0.6) -> str:
    """The page as HTML."""
    words = verdict(results)
    data = plot_data(results, smoothing)
    return render(
        _title(results),
        _sections(results, data),
        data,
        headline=words.headline,
        findings=words.findings,
        cautions=words.cautions,
        facts=header_facts(results),
        scripts=("compare/comparison.js",),
    )


def reproduce_commands(results: Results) -> list[str]:
    """Shell commands that reproduce the result, as far as they were recorded."""
    recorded = find_field(results.about, "command", "command_line", "argv")
    line = shlex.join(map(str, recorded)) if isinstance(recorded, list) else str(recorded or "").strip()
    report = f"normlab report {shlex.quote(results.folder.name)}"
    return [*install_command(_versions(results)), line, report] if line else []


def _versions(results: Results) -> dict[str, Any]:
    return find_field(results.about, "versions") or next((run.versions for run in results.runs if run.versions), {})


def _title(results: Results) -> str:
    names = [results.label(scheme) for scheme in results.schemes]
    if results.kind == "run":
        return f"Run {results.runs[0].id}"
    return f"Comparison of {join_names(names)}" if names else "Comparison"


def _sections(results: Results, data: dict[str, Any]) -> list[Section]:
    lrs = [(lr, rate(lr)) for lr in sorted({curve["lr"] for curve in data["curves"] if curve["lr"] is not None})]
    sections = [
        section("curves", "Training curves", "compare/curves.html", curves=data["curves"], lrs=lrs, data=data,
                metric=results.metric, of_one_run=results.kind == "run"),
        section("profiles", "Through the depth", "compare/profiles.html", profiles=data["profiles"],
                of_one_run=results.kind == "run"),
        section("speed", "Speed and memory", "table.html", table=tables.speed_table(results)),
        section("runs", "Runs", "compare/runs.html", runs=tables.run_table(results),
                trouble=tables.trouble_table(results), copying=copying_table(results),
                events=tables.event_table(results)),
        section("configuration", "Configuration and environment", "configuration.html",
                config=tables.config_table(results), environment=tables.environment_table(results)),
        section("reproduce", "How to reproduce", "reproduce.html", commands=reproduce_commands(results)),
    ]  # fmt: skip
    if results.kind == "run":
        return sections
    curves, *rest = sections
    scores = scores_table(results)
    return [
        _ranking(results, data),
        *([section("scores", "Scores on tasks and texts", "table.html", table=scores)] if scores.rows else []),
        curves,
        section("rates", "Learning rate", "compare/rates.html", rates=data["rates"], higher=results.metric.higher),
        *rest,
    ]


def _ranking(results: Results, data: dict[str, Any]) -> Section:
    intervals = any(entry["low"] is not None for entry in data["ranking"])
    table, note = tables.ranking_table(results), level_note(results)
    return section(
        "ranking", "Ranking", "compare/ranking.html", problem=results.problem, table=table, note=note,
        intervals=intervals, higher=results.metric.higher,
    )  # fmt: skip
