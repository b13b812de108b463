"""The ranking as Markdown, for a paper or a pull request: intervals, seeds, rates, tokens, hardware and versions."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from normlab.report.load import Results, load
from normlab.report.numbers import count
from normlab.report.tables import Table, environment_table, ranking_table, run_table, speed_table
from normlab.report.verdict import level_note, verdict


def markdown(folder: str | Path) -> str:
    """The verdict and the ranking of a comparison; of a single run, its results."""
    results = load(folder)
    words = verdict(results)
    parts = [f"**{escape(words.headline)}**"]
    if results.kind == "run":
        parts += [table(run_table(results)), table(speed_table(results))]
    elif results.standings:
        parts += [table(ranking_table(results)), escape(level_note(results))]
    lines = [*words.findings, *words.cautions]
    parts += ["\n".join(f"- {escape(line)}" for line in lines)] if lines else []
    return "\n\n".join([*parts, _conditions(results)]) + "\n"


def table(source: Table) -> str:
    """A table in the pipe syntax, numbers to the right."""
    heads = [escape(column.title) for column in source.columns]
    rules = ["---:" if column.numeric else "---" for column in source.columns]
    rows = [[escape(cell.text) for cell in row] for row in source.rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [heads, rules, *rows])


def escape(text: str) -> str:
    """User text as text: no HTML, no cell or line of its own, no emphasis, link or code."""
    flat = " ".join(html.escape(text, quote=False).split())
    return "".join(f"\\{character}" if character in "\\|`*_[]~#" else character for character in flat)


def _conditions(results: Results) -> str:
    """One line on tokens, hardware and versions."""
    tokens = dict.fromkeys(count(run.row.get("tokens")) for run in results.runs if run.state == "done")
    facts = [f"{' / '.join(tokens)} tokens a run"] if tokens else []
    facts += [f"{row[0].text} {row[1].text}" for row in environment_table(results).rows]
    return escape("; ".join(_sentence(facts)))


def _sentence(facts: Sequence[str]) -> Sequence[str]:
    return facts or ["tokens, device and versions were not recorded"]
