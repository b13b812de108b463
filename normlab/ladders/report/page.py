"""HTML page of a ladder: its sections, and `build`, which writes it. What is not known is left out."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normlab.errors import NormLabError
from normlab.ladders.report import tables
from normlab.ladders.report.cautions import cautions
from normlab.ladders.report.content import LadderReport
from normlab.ladders.report.copying import copying_table
from normlab.ladders.report.forecast_notes import forecast_notes
from normlab.ladders.report.glance import glance_table
from normlab.ladders.report.header import header_facts
from normlab.ladders.report.plots import plot_data
from normlab.ladders.report.training import training_grid
from normlab.ladders.report.validation import set_table
from normlab.ladders.report.verdict import (
    findings,
    forecast_sentence,
    headline,
    irreducible_sentence,
    reasons,
    slope_sentence,
)
from normlab.ladders.report.weights import weight_bars, words
from normlab.ladders.statistics.answer import FEW_STEPS
from normlab.pages.numbers import format_count, join_names
from normlab.pages.page import Section, install_command, render, section
from normlab.pages.tables import Table
from normlab.utils.files import write_atomically


def build(content: LadderReport, path: str | Path) -> Path:
    """Write the page of a ladder; returns its path."""
    path = Path(path)
    if path.is_dir():
        raise NormLabError(f"{path} is a folder; expected a file, e.g. {path / 'ladder.html'}")
    # Unpaired surrogates cannot be encoded; they are replaced.
    write_atomically(path, render_page(content).encode("utf-8", "replace"))
    return path


def render_page(content: LadderReport) -> str:
    """The page as HTML."""
    data = plot_data(content)
    return render(
        title(content),
        _sections(content, data),
        data,
        headline=headline(content),
        findings=_with_bold_names(content, findings(content)),
        cautions=cautions(content),
        facts=header_facts(content),
        styles=("ladder/ladder.css",),
        scripts=("ladder/ladder.js",),
    )


def _with_bold_names(content: LadderReport, lines: Sequence[str]) -> list[str]:
    """Lines that begin with the name of a scheme, with the name in bold; everything else is escaped."""
    from markupsafe import Markup, escape

    names = sorted(content.schemes, key=len, reverse=True)
    found = [(line, next((name for name in names if line.startswith(f"{name}:")), "")) for line in lines]
    return [Markup("<b>{}</b>{}").format(name, line[len(name) :]) if name else escape(line) for line, name in found]


def title(content: LadderReport) -> str:
    others = content.schemes[1:]
    return f"Ladder of {join_names(others)} against {content.answer.baseline}" if others else "Ladder"


def reproduce_commands(content: LadderReport) -> list[str]:
    """Commands that reproduce the ladder, as far as they were recorded."""
    design = content.design
    return [*install_command(design.versions), shlex.join(design.command)] if design.command else []


def _sections(content: LadderReport, data: dict[str, Any]) -> list[Section]:
    found = [
        _table("glance", "At a glance", glance_table(content)),
        _gaps(content, data),
        _slices(content, data),
        _multiplier(content, data),
        _forecast(content),
        _beyond(content),
        _table("sets", "Validation sets", set_table(content)),
        _table("cells", "Every cell", tables.gap_table(content)),
        _table("copying", "Copying from the context", copying_table(content)),
        _training(content),
        _rates(content, data),
        _baseline(content, data),
        _table("lost", "Runs that did not train", tables.lost_table(content)),
        _table("assumptions", "Assumptions", tables.assumption_table(content)),
        _table("environment", "Environment", tables.environment_table(content)),
    ]
    commands = reproduce_commands(content)
    if commands:
        found.append(section("reproduce", "How to reproduce", "reproduce.html", commands=commands))
    return [each for each in found if each is not None]


def _common(content: LadderReport) -> dict[str, Any]:
    """What several templates ask for."""
    return {
        "schemes": content.schemes,
        "baseline": content.answer.baseline,
        "level": f"{100 * content.answer.level:g} %",
        "few_steps": f"{FEW_STEPS:,}",
        # One scheme beside the baseline needs no buttons to show or hide it.
        "several": len(content.schemes) > 2,
    }


def _table(slug: str, heading: str, table: Table) -> Section | None:
    return section(slug, heading, "table.html", table=table) if table.rows else None


def _gaps(content: LadderReport, data: dict[str, Any]) -> Section | None:
    if not data["gaps"]:
        return None
    places = [place for entry in data["gaps"] for place in entry["beyond"]]
    return section(
        "gaps", "Gap over compute", "ladder/gaps.html", entries=data["gaps"], sizes=content.sizes,
        **_common(content),
        is_grid=content.answer.kind == "grid", has_band=any(entry["ribbons"] for entry in data["gaps"]),
        has_beyond=any(not place["refused"] for place in places),
        has_refused=any(place["refused"] for place in places), has_far=any(place["far"] for place in places),
        has_seeds=any(len(cell["seeds"]) > 1 for entry in data["gaps"] for cell in entry["cells"]),
        has_short=any(cell["short"] for entry in data["gaps"] for cell in entry["cells"]),
        has_large=any(why.rule == "gap too large" for own in content.answer.schemes for why in own.identified.reasons),
        has_left_out=any(not cell["usable"] for entry in data["gaps"] for cell in entry["cells"]),
    )  # fmt: skip


def _slices(content: LadderReport, data: dict[str, Any]) -> Section | None:
    """Gap over tokens at each size and over size at each budget; panels with one cell say nothing."""
    cells = {(cell["size"], cell["tokens"]) for entry in data["gaps"] for cell in entry["cells"]}
    over_tokens = [(k, size) for k, size in enumerate(content.sizes) if len({t for s, t in cells if s == size}) > 1]
    over_size = [
        (k, f"{format_count(tokens)} tokens")
        for k, tokens in enumerate(content.budgets)
        if len({s for s, t in cells if t == tokens}) > 1
    ]
    bars = weight_bars(content)
    if not (over_tokens or over_size or bars):
        return None
    heading = "Tokens or size?" if over_tokens or over_size else "Form of the gap"
    return section(
        "tokens-or-size", heading, "ladder/slices.html", over_tokens=over_tokens, over_size=over_size, bars=bars,
        words=words, has_band=any(entry["ribbons"] for entry in data["gaps"]),
        has_short=any(cell["short"] for entry in data["gaps"] for cell in entry["cells"]),
        **_common(content),
    )  # fmt: skip


def _multiplier(content: LadderReport, data: dict[str, Any]) -> Section | None:
    if not data["multipliers"]:
        return None
    timed = any(point["time"] for entry in data["multipliers"] for point in entry["points"])
    return section("multiplier", "Compute multiplier", "ladder/multiplier.html", timed=timed, **_common(content))


def _forecast(content: LadderReport) -> Section | None:
    if not content.held_out:
        return None
    return section(
        "forecast", "Forecast and result", "ladder/forecast.html",
        said=[*forecast_notes(content), forecast_sentence(content.held_out)], table=tables.forecast_table(content),
        size=content.design.held_out or content.held_out[0].place.size,
        simple=any(entry.simple_law for entry in content.held_out), **_common(content),
    )  # fmt: skip


def _beyond(content: LadderReport) -> Section | None:
    unknown = [
        (own.scheme, content.schemes.index(own.scheme), reasons(own))
        for own in content.answer.schemes
        if own.identified.reasons
    ]
    projections, more_runs = tables.projection_table(content), tables.more_runs_table(content)
    if not (unknown or projections.rows or more_runs.rows):
        return None
    return section(
        "beyond", "Beyond the ladder", "ladder/beyond.html", unknown=unknown, projections=projections,
        more_runs=more_runs,
    )  # fmt: skip


def _training(content: LadderReport) -> Section | None:
    grid = training_grid(content)
    if not grid:
        return None
    return section(
        "training", "How the cells were trained", "ladder/training.html", grid=grid,
        columns=max(len(line.cells) for line in grid), design=content.design, few_steps=f"{FEW_STEPS:,}",
        short=any(cell and cell.is_short for line in grid for cell in line.cells),
        held_out=any(cell and cell.is_held_out for line in grid for cell in line.cells),
    )  # fmt: skip


def _rates(content: LadderReport, data: dict[str, Any]) -> Section | None:
    table = tables.rate_table(content)
    if not table.rows:
        return None
    return section(
        "rates", "Learning rates", "ladder/rates.html", panels=data["rates"], table=table,
        edges=any(search.edge for search in content.design.rates),
    )  # fmt: skip


def _baseline(content: LadderReport, data: dict[str, Any]) -> Section | None:
    if not data["baseline_law"]["points"]:
        return None
    return section(
        "baseline", f"Loss of {content.answer.baseline}", "ladder/baseline.html", law=content.answer.baseline_law,
        slope=slope_sentence(content), irreducible=irreducible_sentence(content),
        **_common(content),
    )  # fmt: skip
