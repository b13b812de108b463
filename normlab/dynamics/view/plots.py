"""The numbers behind the plots and the moving tokens of a page: few enough digits to travel inside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from normlab.dynamics.choices import ABOUT, OBSERVABLES, Observable
from normlab.dynamics.measure.fits import Rate
from normlab.dynamics.result import Band, Fitted, SchemeRun, Simulation
from normlab.dynamics.view.figures import Curve, Figure

FINE = 1000
"""Places on the sphere are whole numbers of this part of its radius: below a pixel."""
MOST_GROUPS = 20
"""Curves beyond so many are a bundle, without a name each."""
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
    """beside the spheres, below them, or among the rest."""


def panels(simulation: Simulation) -> list[ObservablePanel]:
    """A plot for everything that was looked at."""
    seen = set(simulation.runs[0].bands)
    place = dict.fromkeys(_BESIDE, "beside") | dict.fromkeys(_MORE, "more")
    return [
        ObservablePanel(name, ABOUT[name], name in _LOG, place.get(name, "main"))
        for name in OBSERVABLES
        if name in seen
    ]


def labels(simulation: Simulation) -> list[str]:
    """What each run is called; β where there are several."""
    several = len({run.beta for run in simulation.runs}) > 1
    return [f"{run.scheme}, β = {run.beta:g}" if several else run.scheme for run in simulation.runs]


def simulation_data(simulation: Simulation) -> dict[str, Any]:
    """Everything that the scripts of a simulation's page read."""
    return {
        "schemes": [{"label": label} for label in labels(simulation)],
        "clock": simulation.config.get("clock", "plain"),
        "flat": simulation.config.get("dim") == 2,
        "fine": FINE,
        "panels": [vars(panel) for panel in panels(simulation)],
        "runs": [_run(run, several=simulation.config.get("seeds", 1) > 1) for run in simulation.runs],
    }


def _run(run: SchemeRun, *, several: bool) -> dict[str, Any]:
    return {
        "times": rounded(run.times, 8),
        "bands": {name: _band(band, several) for name, band in run.bands.items()},
        "laws": [_law(fitted, run.times) for fitted in run.fits],
        "merges": rounded((merge.time for merge in run.merges), 8),
        "paths": [[round(FINE * x) for place in look for x in place] for look in run.paths],
        "histogram": [rounded(look, 3) for look in run.histogram],
    }


def _band(band: Band, several: bool) -> dict[str, Any]:
    drawn = {"mean": rounded(band.mean)}
    return drawn | {"low": rounded(band.low), "high": rounded(band.high)} if several else drawn


def _law(fitted: Fitted, times: Sequence[float]) -> dict[str, Any]:
    """The fitted line, and the foretold one through its middle."""
    rate, shown = fitted.rate, [time for time in times if fitted.rate.begin <= time <= fitted.rate.end]
    return {
        "observable": fitted.observable,
        "times": rounded(shown, 8),
        "fitted": rounded(rate.at(time) for time in shown),
        "foretold": [] if fitted.predicted is None else rounded(_foretold(rate, fitted.predicted, shown)),
    }


def _foretold(rate: Rate, slope: float, times: Sequence[float]) -> list[float]:
    """A law of another rate that meets the fitted one in the middle of its looks."""
    middle = times[len(times) // 2]
    unit = Rate(form=rate.form, value=1.0, low=1.0, high=1.0, begin=rate.begin, end=rate.end, intercept=0.0)
    clock = [math.log(unit.at(time) / unit.at(middle)) for time in times]
    return [rate.at(middle) * math.exp(slope * x) for x in clock]


def figures_data(figures: Sequence[Figure]) -> dict[str, Any]:
    """Everything that the script of an experiment's page reads. Curves of one name share a colour and a button."""
    named = list(dict.fromkeys(c.name for figure in figures for c in figure.curves if c.role == "data"))
    groups = named if len(named) <= MOST_GROUPS else []
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
            "x": rounded(image.x), "y": rounded(image.y), "z": [rounded(row, 4) for row in image.values],
            "label": image.label,
        },
    }  # fmt: skip


def _curve(curve: Curve, groups: Sequence[str]) -> dict[str, Any]:
    own = [place for place, name in enumerate(groups) if curve.name == name or curve.name.startswith(f"{name}, ")]
    return {
        "name": curve.name, "x": rounded(curve.x, 7), "y": rounded(curve.y, 6), "low": rounded(curve.low),
        "high": rounded(curve.high), "role": curve.role, "marks": curve.marks, "group": own[0] if own else None,
    }  # fmt: skip


def rounded(values: Iterable[float], digits: int = 5) -> list[float | None]:
    """So many digits of each; None for what no plot can show."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]
