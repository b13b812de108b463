"""The HTML page of a coordinate check: exponents by module with their intervals, values over width and depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from normlab.checks.coordinates.records import Axis, CoordinateCheck, Point, Trend
from normlab.checks.coordinates.words import (  # fmt: skip
    FINE,
    exponent,
    finding,
    headline,
    labels,
    level,
    rule_words,
    sentences,
    sizes_of,
)
from normlab.checks.view.page import commands
from normlab.checks.view.plots import one
from normlab.numerics.power_law import Fit
from normlab.pages.numbers import duration, rate
from normlab.pages.page import Section, render, section
from normlab.pages.tables import Cell, Column, Table, flatten, numeric_cell
from normlab.probes.profile import Number


def page(check: CoordinateCheck) -> str:
    """The HTML page as text."""
    return render(
        f"Coordinate check of {check.target.name}",
        _sections(check),
        plot_data(check),
        headline=f"{headline(check)}.",
        tone=level(check),
        findings=sentences(check),
        cautions=[*check.target.notes, *check.notes],
        facts=_facts(check),
        styles=("check/check.css", "check/coordinates.css"),
        scripts=("check/coordinates.js",),
    )


def plot_data(check: CoordinateCheck) -> dict[str, Any]:
    """Plot data as JSON: exponents, and means over seeds at every size and step; one colour for each module."""
    modules = list(dict.fromkeys(trend.module for axis in check.axes for trend in axis.trends))
    names, places = labels(modules), {module: place for place, module in enumerate(modules)}
    return {
        "schemes": [{"label": names[module]} for module in modules],
        "threshold": check.threshold,
        "steps": check.steps,
        "axes": [
            {
                "name": axis.name,
                "sizes": list(axis.sizes),
                "trends": [_drawn(trend, axis.sizes) | {"scheme": places[trend.module]} for trend in axis.trends],
            }
            for axis in check.axes
        ],
    }


def _drawn(trend: Trend, sizes: Sequence[int]) -> dict[str, Any]:
    return {
        "fits": {name: _fit(getattr(trend, name)) for name in ("start", "first", "last")},
        "fine": trend.change in FINE,
        "size": [_over_seeds(trend, sizes, "sizes", step) for step in range(len(trend.points[0].sizes))],
        "change": [_over_seeds(trend, sizes, "changes", step) for step in range(len(trend.points[0].changes))],
    }


def _fit(fit: Fit | None) -> list[Number] | None:
    return None if fit is None else [one(fit.exponent), one(fit.low), one(fit.high)]


def _over_seeds(trend: Trend, sizes: Sequence[int], field: str, step: int) -> list[list[Number]]:
    """[geometric mean, smallest, largest] over seeds at each size."""
    return [_middle([getattr(p, field)[step] for p in trend.points if p.size == size]) for size in sizes]


def _middle(values: Sequence[Number]) -> list[Number]:
    known = [value for value in values if value]
    if len(known) < len(values):
        return [None, None, None]
    return [one(float(np.exp(np.mean(np.log(known))))), one(min(known)), one(max(known))]


def _sections(check: CoordinateCheck) -> list[Section]:
    most = max(len(axis.trends) for axis in check.axes)
    shared = {"axes": check.axes, "steps": check.steps, "threshold": f"{check.threshold:g}"}
    return [
        section("exponents", "Exponents", "check/exponents.html", lines=most, seeds=check.seeds, **shared),
        section("values", "Values", "check/values.html", **shared),
        *(section(axis.name, f"Over {axis.name}", "table.html", table=exponent_table(axis, check))
          for axis in check.axes),
        section("configuration", "Configuration", "configuration.html",
                config=_config(check), environment=_versions(check)),
        section("reproduce", "How to reproduce", "reproduce.html", commands=commands([check])),
    ]  # fmt: skip


def exponent_table(axis: Axis, check: CoordinateCheck) -> Table:
    """Exponents of every module, and the values they were fitted to."""
    last = [Column(f"Change, step {check.steps}", True)] if check.steps > 1 else []
    ends = [Column(f"Change at {size}", True) for size in (axis.sizes[0], axis.sizes[-1])]
    titles = [Column("Module"), Column("Size at the start", True), Column("Change, step 1", True), *last, *ends]
    names = labels(trend.module for trend in axis.trends)
    return Table(
        f"Exponents over {axis.name}",
        [*titles, Column("Finding")],
        [_row(trend, names[trend.module], axis, check) for trend in axis.trends],
        note=f"{sizes_of(axis).capitalize()}, {rule_words(axis, check)}. p of value ∝ {axis.name}^p with half its 95 % "
        f"interval over {check.seeds} seeds. The last two numbers: changes after {check.steps} steps, seeds' means.",
    )


def _row(trend: Trend, name: str, axis: Axis, check: CoordinateCheck) -> list[Cell]:
    fits = [trend.start, trend.first, trend.last] if check.steps > 1 else [trend.start, trend.first]
    ends = [_mean_change([p for p in trend.points if p.size == size]) for size in (axis.sizes[0], axis.sizes[-1])]
    tone = "worse" if trend.breaks_rule else ""
    return [
        Cell(name, name),
        *(numeric_cell(exponent(fit), None if fit is None else fit.exponent) for fit in fits),
        *(numeric_cell("–" if value is None else f"{value:.3g}", value) for value in ends),
        Cell(finding(trend), finding(trend), tone=tone),
    ]


def _mean_change(points: Sequence[Point]) -> Number:
    return _middle([point.changes[-1] for point in points])[0]


def _facts(check: CoordinateCheck) -> list[tuple[str, str]]:
    facts = [("kind", check.target.kind), *((axis.name, ", ".join(map(str, axis.sizes))) for axis in check.axes)]
    bases = (("base width", check.base_dim), ("base depth", check.base_depth))
    facts += [(name, "none" if base is None else str(base)) for name, base in bases]
    facts += [("steps", str(check.steps)), ("rate", rate(check.lr)), ("seeds", str(check.seeds))]
    return [*facts, ("time", duration(check.seconds))]


def _config(check: CoordinateCheck) -> Table:
    rows = [[Cell(name), Cell(value)] for name, value in flatten(check.config).items()]
    return Table("Configuration", [Column("Field"), Column("Value")], rows, sortable=False)


def _versions(check: CoordinateCheck) -> Table:
    rows = [[Cell(name), Cell(value)] for name, value in check.versions.items()]
    return Table("Versions", [Column("Package"), Column("Version")], rows, sortable=False)
