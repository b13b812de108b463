"""Plot data of the HTML page as JSON: observables, fitted laws, token paths and figures, rounded to few digits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from normlab.dynamics.config import OBSERVABLE_LABELS, OBSERVABLES, Observable
from normlab.dynamics.measure.fits import Rate
from normlab.dynamics.result import Band, FittedLaw, SchemeRun, Simulation
from normlab.dynamics.view.figures import Curve, Figure
from normlab.dynamics.view.opening import opening_look, opening_words

PATH_SCALE = 1000
"""Positions are stored as integers in units of radius / PATH_SCALE, which is below a pixel."""
MAX_GROUPS = 20
"""With more curves than this, curves get no colour and button of their own."""
_LOG = ("variance",)
_BESIDE: tuple[Observable, ...] = ("cosine", "variance")
_MORE: tuple[Observable, ...] = ("close", "fastest", "smallest", "largest")


@dataclass(frozen=True)
class ObservablePanel:
    """A plot of one observable."""

    name: Observable
    title: str
    log: bool
    place: str
    """Where on the page: beside the spheres, main, or more."""


def observable_panels(simulation: Simulation) -> list[ObservablePanel]:
    """One panel for every recorded observable."""
    seen = set(simulation.runs[0].bands)
    place = dict.fromkeys(_BESIDE, "beside") | dict.fromkeys(_MORE, "more")
    return [
        ObservablePanel(name, OBSERVABLE_LABELS[name], name in _LOG, place.get(name, "main"))
        for name in OBSERVABLES
        if name in seen
    ]


def run_labels(simulation: Simulation) -> list[str]:
    """Label of each run: the scheme, and β if there are several."""
    several = len({run.beta for run in simulation.runs}) > 1
    return [f"{run.scheme}, β = {run.beta:g}" if several else run.scheme for run in simulation.runs]


def simulation_data(simulation: Simulation) -> dict[str, Any]:
    """Data that the scripts of a simulation's page read."""
    return {
        "schemes": [{"label": label} for label in run_labels(simulation)],
        "clock": simulation.config.get("clock", "plain"),
        "flat": simulation.config.get("dim") == 2,
        "fine": PATH_SCALE,
        "opening": opening_look(simulation),
        "opened": opening_words(simulation),
        "panels": [vars(panel) for panel in observable_panels(simulation)],
        "runs": [_run(run, several=simulation.config.get("seeds", 1) > 1) for run in simulation.runs],
    }


def _run(run: SchemeRun, *, several: bool) -> dict[str, Any]:
    return {
        "times": round_digits(run.times, 8),
        "bands": {name: _band(band, several) for name, band in run.bands.items()},
        "laws": [_law(fitted, run.times) for fitted in run.fits],
        "merges": round_digits((merge.time for merge in run.merges), 8),
        "paths": [[round(PATH_SCALE * x) for place in look for x in place] for look in run.paths],
        "histogram": [round_digits(look, 3) for look in run.histogram],
    }


def _band(band: Band, several: bool) -> dict[str, Any]:
    drawn = {"mean": round_digits(band.mean)}
    return drawn | {"low": round_digits(band.low), "high": round_digits(band.high)} if several else drawn


def _law(fitted: FittedLaw, times: Sequence[float]) -> dict[str, Any]:
    """The fitted line, and the predicted one through its middle."""
    rate, shown = fitted.rate, [time for time in times if fitted.rate.begin <= time <= fitted.rate.end]
    return {
        "observable": fitted.observable,
        "times": round_digits(shown, 8),
        "fitted": round_digits(rate.at(time) for time in shown),
        "predicted": [] if fitted.predicted is None else round_digits(_predicted_line(rate, fitted.predicted, shown)),
    }


def _predicted_line(rate: Rate, slope: float, times: Sequence[float]) -> list[float]:
    """A law with the predicted rate that meets the fitted one at its middle time."""
    middle = times[len(times) // 2]
    unit = Rate(form=rate.form, value=1.0, low=1.0, high=1.0, begin=rate.begin, end=rate.end, intercept=0.0)
    clock = [math.log(unit.at(time) / unit.at(middle)) for time in times]
    return [rate.at(middle) * math.exp(slope * x) for x in clock]


def figures_data(figures: Sequence[Figure]) -> dict[str, Any]:
    """Data that the script of an experiment's page reads. Curves of one name share a colour and a button."""
    named = list(dict.fromkeys(c.name for figure in figures for c in figure.curves if c.role == "data"))
    groups = named if len(named) <= MAX_GROUPS else []
    return {
        "schemes": [{"label": name} for name in groups],
        "figures": [_figure(figure, groups) for figure in figures],
    }


def _figure(figure: Figure, groups: Sequence[str]) -> dict[str, Any]:
    image = figure.image
    return {
        "x": {"title": figure.x_label, "log": figure.x_log},
        "y": {"title": figure.y_label, "log": figure.y_log},
        "curves": [_curve(curve, groups) for curve in figure.curves],
        "image": image
        and {
            "x": round_digits(image.x), "y": round_digits(image.y), "z": [round_digits(row, 4) for row in image.values],
            "label": image.label,
        },
    }  # fmt: skip


def _curve(curve: Curve, groups: Sequence[str]) -> dict[str, Any]:
    own = [place for place, name in enumerate(groups) if curve.name == name or curve.name.startswith(f"{name}, ")]
    return {
        "name": curve.name, "x": round_digits(curve.x, 7), "y": round_digits(curve.y, 6),
        "low": round_digits(curve.low), "high": round_digits(curve.high), "role": curve.role, "marks": curve.marks,
        "group": own[0] if own else None,
    }  # fmt: skip


def round_digits(values: Iterable[float], digits: int = 5) -> list[float | None]:
    """Round to significant digits; None for numbers that are not finite."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]
