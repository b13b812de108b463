"""Markdown report of a ladder: verdict, gaps, projections, forecast, training, rates and cautions."""

from __future__ import annotations

from normlab.ladders.report import tables
from normlab.ladders.report.cautions import cautions
from normlab.ladders.report.content import LadderReport
from normlab.ladders.report.copying import copying_table
from normlab.ladders.report.forecast_notes import forecast_notes
from normlab.ladders.report.glance import glance_table
from normlab.ladders.report.header import header_facts
from normlab.ladders.report.page import reproduce_commands, title
from normlab.ladders.report.training import training_table
from normlab.ladders.report.validation import set_table
from normlab.ladders.report.verdict import findings, headline, irreducible_sentence, reasons, slope_sentence
from normlab.ladders.report.weights import weight_bars, words
from normlab.pages.markdown import escape, table
from normlab.pages.tables import Table


def markdown(content: LadderReport) -> str:
    """The ladder as Markdown; sections without content are left out."""
    parts = [f"# {escape(title(content))}", f"**{escape(headline(content))}**", _list(findings(content))]
    parts += _list_section("Keep in mind", cautions(content))
    parts += _table_section("At a glance", glance_table(content))
    parts += _table_section("Validation sets", set_table(content))
    parts += _table_section("Gap at every cell", tables.gap_table(content))
    parts += _table_section("Copying from the context", copying_table(content))
    parts += _list_section("What drives the gap", _weights(content))
    parts += _table_section("Forecast and result", tables.forecast_table(content), " ".join(forecast_notes(content)))
    parts += _table_section("Beyond the ladder", tables.projection_table(content))
    parts += _list_section("Why a gap is not identified", _reasons(content))
    parts += _table_section("What it would take", tables.more_runs_table(content))
    parts += _table_section("Training", training_table(content))
    parts += _table_section("Learning rates", tables.rate_table(content))
    parts += _list_section(f"Loss of {content.answer.baseline}", _baseline(content))
    parts += _table_section("Runs that did not train", tables.lost_table(content))
    parts += _table_section("Assumptions", tables.assumption_table(content))
    parts += [escape("; ".join(f"{name} {text}" for name, text in header_facts(content)))]
    commands = reproduce_commands(content)
    # A fence longer than any run of backticks in the command cannot be closed by it.
    parts += ["\n".join(["`````sh", *(line.replace("`````", "") for line in commands), "`````"])] if commands else []
    return "\n\n".join(part for part in parts if part) + "\n"


def _list(lines: list[str]) -> str:
    return "\n".join(f"- {escape(line)}" for line in lines)


def _list_section(heading: str, lines: list[str]) -> list[str]:
    return [f"## {escape(heading)}", _list(lines)] if lines else []


def _table_section(heading: str, source: Table, before: str = "") -> list[str]:
    if not source.rows:
        return []
    return [f"## {escape(heading)}", escape(before), table(source), escape(source.note)]


def _weights(content: LadderReport) -> list[str]:
    return [
        f"{bar.scheme}: {'; '.join(filter(None, (words(bar.axis), words(bar.forms))))}" for bar in weight_bars(content)
    ]


def _reasons(content: LadderReport) -> list[str]:
    return [f"{own.scheme}: {line}" for own in content.answer.schemes for line in reasons(own)]


def _baseline(content: LadderReport) -> list[str]:
    law = content.answer.baseline_law
    if law is None:
        return []
    return [slope_sentence(content), f"Fitted law: {law.text}.", irreducible_sentence(content)]
