"""Plot data of a ladder's page as JSON: gaps, multipliers, forecasts, rates and the baseline's loss."""

from __future__ import annotations

import itertools
from typing import Any

from normlab.ladders.report.content import LadderReport, best_interval, mean_gap
from normlab.ladders.report.design import RateSearchFacts
from normlab.ladders.statistics.answer import CellGap, HeldOut, Interval, Projection, SchemeAnswer, place_name
from normlab.pages.numbers import format_count, join_names

FAR = 30.0
"""Places at more than this multiple of the top's compute are drawn on request only."""

Point = dict[str, Any]


def plot_data(content: LadderReport) -> dict[str, Any]:
    """All data that the page's script reads."""
    return {
        "schemes": [{"label": name, "baseline": name == content.answer.baseline} for name in content.schemes],
        "baseline": content.answer.baseline,
        "sizes": content.sizes,
        "budgets": content.budgets,
        "gaps": [_gaps(content, own) for own in content.answer.schemes if any(c.differences for c in own.cells)],
        "multipliers": _multipliers(content),
        "forecast": [_forecast(content, entry) for entry in content.held_out if entry.scheme in content.schemes],
        "rates": rate_panels(content),
        "baseline_law": _baseline(content),
    }


def _gaps(content: LadderReport, own: SchemeAnswer) -> dict[str, Any]:
    return {
        "scheme": content.schemes.index(own.scheme),
        "cells": [_cell(cell) for cell in own.cells if cell.differences],
        "ribbons": _ribbons(content, own),
        "top": own.top.flops if own.top else 0.0,
        "beyond": [_refused(place) if is_refused(own, place) else _beyond(place) for place in _by_compute(own)],
        "caption": _caption(own),
    }


def _cell(cell: CellGap) -> Point:
    interval = best_interval(cell) if cell.is_usable else None
    return {
        "size": cell.size, "tokens": cell.tokens, "parameters": cell.parameters, "flops": cell.flops,
        "mean": mean_gap(cell), "low": interval and interval.low, "high": interval and interval.high,
        "seeds": [{"seed": seed, "gap": gap} for seed, gap in cell.differences.items()],
        "short": cell.few_steps, "usable": cell.is_usable,
    }  # fmt: skip


def _ribbons(content: LadderReport, own: SchemeAnswer) -> list[list[Point]]:
    """Bands of the gap: through the budgets of each size on a grid, through all sizes on a path, and on beyond the top.

    Cells of different sizes can have the same compute and different gaps, so a grid has no single band. Cells that are
    left out above the top of the fit are beyond it, too.
    """
    top = own.top.flops if own.top else 0.0
    fitted = sorted((c for c in own.cells if c.gap is not None and c.flops <= top), key=lambda cell: cell.flops)
    groups = content.sizes if content.answer.kind == "grid" else [None]
    ribbons = [[_ends(cell.flops, cell.gap) for cell in fitted if size in (None, cell.size)] for size in groups]
    ahead = _ahead(own)
    return [ribbon + ahead if ribbon and ribbon[-1]["flops"] == top else ribbon for ribbon in ribbons if ribbon]


def _ahead(own: SchemeAnswer) -> list[Point]:
    """The band beyond the top: it ends before the first place at which the words give no number."""
    known = itertools.takewhile(lambda projection: not is_refused(own, projection), _by_compute(own))
    return [_ends(projection.place.flops, projection.gap) for projection in known if _is_multiple(projection)]


def _ends(flops: float, interval: Interval | None) -> Point:
    assert interval is not None
    return {"flops": flops, "low": interval.low, "high": interval.high}


def is_refused(own: SchemeAnswer, projection: Projection) -> bool:
    """Whether the gap at a place is not identified: a plot shows no number that the words refuse."""
    return bool(own.identified.against(projection.place.name))


def _beyond(projection: Projection) -> Point:
    return _place(projection) | {
        "low": projection.gap.low, "high": projection.gap.high, "mean": projection.gap.mean,
        "simple_low": projection.simple_law.low, "simple_high": projection.simple_law.high, "refused": False,
    }  # fmt: skip


def _refused(projection: Projection) -> Point:
    """A place that is named on the axis, without an interval."""
    return _place(projection) | {"refused": True}


def _place(projection: Projection) -> Point:
    return {
        "name": projection.place.name, "short": _short_name(projection), "flops": projection.place.flops,
        "multiple": _is_multiple(projection), "far": projection.times_top > FAR,
    }  # fmt: skip


def _caption(own: SchemeAnswer) -> str:
    """What a panel does not show beyond the ladder; empty if it shows all."""
    refused = [projection for projection in _by_compute(own) if is_refused(own, projection)]
    if not refused:
        return ""
    if len(refused) == len(own.projections):
        return "Not identified beyond the ladder: the band ends at its top."
    names = join_names([projection.place.name for projection in refused])
    return f"Not identified at {names}: nothing is drawn there."


def _is_multiple(projection: Projection) -> bool:
    """Whether a place is a multiple of the top's compute and no size of its own."""
    return not projection.place.size


def _by_compute(own: SchemeAnswer) -> list[Projection]:
    return sorted(own.projections, key=lambda projection: projection.place.flops)


def _short_name(projection: Projection) -> str:
    place = projection.place
    if _is_multiple(projection):
        return f"{projection.times_top:.3g} ×"
    return f"{place.size}, {format_count(place.tokens)}"


def _multipliers(content: LadderReport) -> list[dict[str, Any]]:
    known = [
        {
            "scheme": content.schemes.index(own.scheme),
            "points": [
                {"cell": _cell(cell), "flops": _times(cell.multiplier), "time": _times(cell.multiplier_in_time)}
                for cell in own.cells
                if cell.multiplier is not None
            ],
        }
        for own in content.answer.schemes
    ]
    return [entry for entry in known if entry["points"]]


def _times(interval: Interval | None) -> Point | None:
    return None if interval is None else {"mean": interval.mean, "low": interval.low, "high": interval.high}


def _forecast(content: LadderReport, entry: HeldOut) -> Point:
    simple = entry.simple_law
    return {
        "scheme": content.schemes.index(entry.scheme), "tokens": entry.place.tokens, "place": entry.place.name,
        "low": entry.forecast.low, "high": entry.forecast.high, "simple_low": simple and simple.low,
        "simple_high": simple and simple.high, "came": entry.measured, "hit": entry.is_hit,
    }  # fmt: skip


def rate_panels(content: LadderReport) -> list[dict[str, Any]]:
    """One panel for every size and budget at which rates were tried."""
    panels: dict[tuple[str, int], list[RateSearchFacts]] = {}
    for search in content.design.rates:
        if search.tried:
            panels.setdefault((search.size, search.tokens), []).append(search)
    return [
        {"title": place_name(size, tokens), "searches": [_search(content, search) for search in searches]}
        for (size, tokens), searches in panels.items()
    ]


def _search(content: LadderReport, search: RateSearchFacts) -> dict[str, Any]:
    tried = sorted(search.tried, key=lambda entry: entry.lr)
    return {
        "scheme": content.schemes.index(search.scheme), "pick": search.pick, "edge": search.edge,
        "tried": [{"lr": entry.lr, "loss": entry.loss, "state": entry.state} for entry in tried],
    }  # fmt: skip


def _baseline(content: LadderReport) -> dict[str, Any]:
    law = content.answer.baseline_law
    runs = [
        {"size": row.size, "tokens": row.tokens, "flops": row.flops, "loss": row.loss, "seed": row.seed}
        for row in content.rows
        if row.scheme == content.answer.baseline and row.is_usable
    ]
    fitted = (
        [{"size": c.size, "tokens": c.tokens, "flops": c.flops, "loss": c.fitted} for c in law.cells] if law else []
    )
    floor = {"low": law.irreducible.low, "high": law.irreducible.high} if law and law.irreducible else None
    return {"points": runs, "fitted": fitted, "floor": floor}
