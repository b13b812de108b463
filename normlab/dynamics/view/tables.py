"""Tables of the HTML pages of simulations and experiments."""

from __future__ import annotations

import math
from itertools import pairwise

from normlab.dynamics.config import OBSERVABLE_LABELS, OBSERVABLES
from normlab.dynamics.experiments.result import ExperimentResult, PredictionVerdict
from normlab.dynamics.experiments.result import TableValue as Value
from normlab.dynamics.measure.fits import FORMULAS
from normlab.dynamics.result import FittedLaw, SchemeRun, Simulation
from normlab.dynamics.view.plots import run_labels
from normlab.pages.numbers import NONE, duration
from normlab.pages.tables import Cell, Column, Table, columns, flatten, numeric_cell

_QUANTITIES = {"variance": "squared distance of tokens from their mean", "radius": "length of the hidden state"}


def number_cell(value: float | None, digits: int = 4) -> Cell:
    """A table cell with a number of significant digits that sorts by value; a dash for None."""
    known = value is not None and math.isfinite(value)
    return numeric_cell(f"{value:.{digits}g}".replace("-", "−") if known else NONE, value)


def run_table(simulation: Simulation) -> Table:
    """Table of the first and last value of every observable."""
    seen = simulation.runs[0].bands
    rows = [
        [Cell(OBSERVABLE_LABELS[name]), *(_change(run, name) for run in simulation.runs)]
        for name in OBSERVABLES
        if name in seen
    ]
    titles = [f"{label}#" for label in run_labels(simulation)]
    return Table("First and last values", columns("Quantity", *titles), rows, sortable=False)


def _change(run: SchemeRun, name: str) -> Cell:
    first, last = (f"{run[name].mean[place]:.3g}".replace("-", "−") for place in (0, -1))
    return numeric_cell(f"{first} → {last}", run[name].mean[-1])


def law_table(simulation: Simulation) -> Table:
    """Table of fitted and predicted laws; the prediction is shown also for runs without a tail."""
    rows = []
    for place, (label, run) in enumerate(zip(run_labels(simulation), simulation.runs, strict=True)):
        fits = {fitted.observable: fitted for fitted in run.fits}
        names = dict.fromkeys(["variance", *fits])
        rows += [[Cell(label, label, scheme=place), *_law_cells(run, name, fits.get(name))] for name in names]
    titles = columns("Scheme", "Quantity", "Law", "Measured a#", "95 % interval", "Predicted a#", "Difference#")
    note = (
        "A law of the distance is fitted where the squared distance is below a tenth of its first value and above "
        "rounding error, over the second half of those layers; a dash marks a run that did not get so far."
    )
    return Table("Laws", titles, rows, note=note)


def _law_cells(run: SchemeRun, name: str, fitted: FittedLaw | None) -> list[Cell]:
    tail = run.tail if name == "variance" else None
    if fitted is None:
        law = FORMULAS[tail.form] if tail else NONE
        return [
            Cell(_QUANTITIES.get(name, name)),
            Cell(law),
            number_cell(None),
            Cell(NONE),
            number_cell(tail.rate if tail else None),
            number_cell(None),
        ]
    rate = fitted.rate
    interval = f"{rate.low:.4f} to {rate.high:.4f}".replace("-", "−") if rate.low == rate.low else NONE
    return [
        Cell(_QUANTITIES.get(name, name)), Cell(FORMULAS[rate.form]), number_cell(rate.value, 5),
        Cell(interval, whole=True), number_cell(fitted.predicted, 5), number_cell(fitted.error, 2),
    ]  # fmt: skip


def merge_table(simulation: Simulation) -> Table:
    """Table of cluster merges: one row for every recorded time with fewer clusters than before."""
    rows = [
        [
            Cell(label, label, scheme=place),
            number_cell(merge.time, 5),
            number_cell(merge.clusters, 5),
            number_cell(stood),
        ]
        for place, (label, run) in enumerate(zip(run_labels(simulation), simulation.runs, strict=True))
        for merge, stood in zip(run.merges, _standing(run), strict=True)
    ]
    return Table("Merge times", columns("Scheme", "Layer#", "Clusters left#", "Unchanged for (layers)#"), rows)


def _standing(run: SchemeRun) -> list[float]:
    """How long the clusters persisted after each merge."""
    moments = [*(merge.time for merge in run.merges), run.times[-1]]
    return [after - before for before, after in pairwise(moments)]


def verdict_table(result: ExperimentResult) -> Table:
    """Table of measurements and predictions; those that disagree come first."""
    order = {False: 0, None: 1, True: 2}
    rows = [_verdict_row(verdict) for verdict in sorted(result.verdicts, key=lambda v: order[v.agrees])]
    titles = columns("Of", "Quantity", "Verdict", "Measured#", "Predicted#", "Difference#", "Limit#", "95 % interval")
    return Table("Against the prediction", titles, rows)


def _verdict_row(verdict: PredictionVerdict) -> list[Cell]:
    words, tone = {
        True: ("✓ as predicted", "better"), False: ("✗ not as predicted", "worse"),
        None: ("no prediction", "not-judged"),
    }[verdict.agrees]  # fmt: skip
    known = verdict.low is not None and verdict.high is not None and verdict.low == verdict.low
    interval = f"{verdict.low:.4g} to {verdict.high:.4g}".replace("-", "−") if known else NONE
    return [
        Cell(verdict.subject, verdict.subject), Cell(verdict.quantity, verdict.quantity), Cell(words, words, tone=tone),
        number_cell(verdict.measured, 6), number_cell(verdict.predicted, 6), number_cell(verdict.error, 2),
        number_cell(verdict.tolerance, 2), Cell(interval, whole=True),
    ]  # fmt: skip


def result_table(result: ExperimentResult) -> Table:
    """The result table of an experiment."""
    numeric = [
        all(cell is None or isinstance(cell, float) for cell in column) for column in zip(*result.rows, strict=True)
    ]
    titles = [Column(title, flag) for title, flag in zip(result.columns, numeric or [False] * 99, strict=False)]
    return Table("Results", titles, [[_cell(value) for value in row] for row in result.rows])


def _cell(value: Value) -> Cell:
    return Cell(value, value) if isinstance(value, str) else number_cell(value, 5)


def config_table(result: Simulation | ExperimentResult) -> Table:
    rows = [[Cell(name), Cell(value)] for name, value in flatten(result.config).items()]
    return Table("Configuration", columns("Option", "Value"), rows, sortable=False)


def environment_table(result: Simulation | ExperimentResult) -> Table:
    rows = [[Cell(name), Cell(value)] for name, value in result.versions.items()]
    rows.append([Cell("time"), Cell(duration(result.seconds))])
    return Table("Environment", columns("What", "Value"), rows, sortable=False)
