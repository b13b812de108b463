"""Terminal output of `normlab simulate`: tables of simulations and experiments."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from normlab.dynamics.result import FittedLaw, SchemeRun, Simulation
from normlab.utils.text import counted

if TYPE_CHECKING:
    from normlab.dynamics.experiments.result import ExperimentResult, PredictionVerdict

_WIDTH = 110
_ROWS = 30


def print_result(result: Simulation | ExperimentResult) -> None:
    """Print a simulation or an experiment."""
    _print(result, Console())


def simulation_text(simulation: Simulation) -> str:
    return _text(simulation)


def result_text(result: ExperimentResult) -> str:
    return _text(result)


def _text(result: Simulation | ExperimentResult) -> str:
    console = Console(file=io.StringIO(), width=_WIDTH, no_color=True, force_jupyter=False)
    _print(result, console)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def _print(result: Simulation | ExperimentResult, console: Console) -> None:
    if isinstance(result, Simulation):
        _print_simulation(result, console)
    else:
        _print_result(result, console)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)


def _print_simulation(simulation: Simulation, console: Console) -> None:
    options = simulation.config
    sizes = f"{options['tokens']} tokens in dimension {options['dim']}, {counted(options['seeds'], 'seed')}"
    table = Table(title=f"{sizes}, to time {options['time']:g}", pad_edge=False)
    for column in ("scheme", "β", "cosine", "clusters", "radius", "variance", "95 %", "theory"):
        table.add_column(column, overflow="fold")  # a number whose exponent is cut off is wrong
    for run in simulation.runs:
        fitted = next((fit for fit in run.fits if fit.observable == "variance"), None)
        changes = [_change(run, name) for name in ("cosine", "clusters", "radius")]
        table.add_row(*map(escape, [run.scheme, f"{run.beta:g}", *changes, *_law(fitted), str(run.tail or "–")]))
    console.print(table)


def _change(run: SchemeRun, observable: str) -> str:
    """First and last value, as text."""
    if observable not in run.bands:
        return "–"
    mean = run.bands[observable].mean
    return f"{mean[0]:.3g} → {mean[-1]:.3g}"


def _law(fitted: FittedLaw | None) -> tuple[str, str]:
    """The fitted law and the half width of the interval of its rate, as text."""
    if fitted is None:
        return "–", "–"
    rate = fitted.rate
    return rate.formula, "–" if math.isnan(rate.low) else f"±{(rate.high - rate.low) / 2:.2g}"


def _print_result(result: ExperimentResult, console: Console) -> None:
    table = Table(title=f"{result.experiment}: {result.about}", pad_edge=False)
    for column in result.columns:
        table.add_column(escape(column), overflow="fold")
    for row in _thinned(result.rows):
        table.add_row(*(escape(_cell(cell)) for cell in row))
    console.print(table)
    _print_verdicts(result.verdicts, console)


def _print_verdicts(verdicts: Sequence[PredictionVerdict], console: Console) -> None:
    wrong = [verdict for verdict in verdicts if verdict.agrees is False]
    right = sum(verdict.agrees is True for verdict in verdicts)
    if right or wrong:
        console.print(f"{right} of {right + len(wrong)} predictions hold", highlight=False)
    for line in _lines(wrong):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _lines(verdicts: Iterable[PredictionVerdict]) -> list[str]:
    return [f"  {verdict.sentence}" for verdict in verdicts]


def _thinned(rows: Sequence[tuple]) -> Sequence[tuple]:
    """At most about `_ROWS` rows, evenly thinned; the last row is kept."""
    every = math.ceil(len(rows) / _ROWS) or 1
    return rows[::-every][::-1]


def _cell(cell: float | str | None) -> str:
    if cell is None or cell != cell:
        return "–"
    if isinstance(cell, str):
        return cell
    text = f"{cell:.5g}"
    return f"{cell:.3g}" if "e" in text else text
