"""Markdown report of a comparison: the ranking with intervals, scores on tasks, tokens, hardware and versions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from normlab.compare.report.budget import trained_on, unit_of
from normlab.compare.report.results import Results, load_results
from normlab.compare.report.scores import scores_table
from normlab.compare.report.tables import environment_table, ranking_table, run_table, speed_table
from normlab.compare.report.verdict import level_note, verdict
from normlab.pages.markdown import escape, table
from normlab.pages.numbers import format_count


def markdown(folder: str | Path) -> str:
    """Verdict and ranking of a comparison, or the results of a single run, as Markdown."""
    results = load_results(folder)
    words = verdict(results)
    parts = [f"**{escape(words.headline)}**"]
    if results.kind == "run":
        parts += [table(run_table(results)), table(speed_table(results))]
    elif results.standings:
        parts += [table(ranking_table(results)), escape(level_note(results))]
        scores = scores_table(results)
        parts += [table(scores), escape(scores.note)] if scores.rows else []
    lines = [*words.findings, *words.cautions]
    parts += ["\n".join(f"- {escape(line)}" for line in lines)] if lines else []
    return "\n\n".join([*parts, _conditions(results)]) + "\n"


def _conditions(results: Results) -> str:
    """One line on the budget, hardware and versions."""
    known = dict.fromkeys(format_count(trained_on(run)) for run in results.runs if run.state == "done")
    facts = [f"{' / '.join(known)} {unit_of(results)} a run"] if known else []
    facts += [f"{row[0].text} {row[1].text}" for row in environment_table(results).rows]
    return escape("; ".join(_sentence(facts)))


def _sentence(facts: Sequence[str]) -> Sequence[str]:
    return facts or ["tokens, device and versions were not recorded"]
