"""Result of a simulation: observables over time, fitted laws, cluster merges and token paths; saved as JSON or HTML."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from normlab.dynamics.measure.fits import Rate
from normlab.dynamics.measure.tails import Tail
from normlab.errors import unknown
from normlab.utils.records import StoredResult

SCHEMA = 1
"""Version of the JSON format; increased when the meaning of a field changes."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """An observable over time: mean, 5 % and 95 % quantiles over seeds."""

    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Merge:
    """A recorded time at which there were fewer clusters than before."""

    time: float
    clusters: int
    """Number of clusters after the merge."""


@dataclass(frozen=True, kw_only=True)
class FittedLaw:
    """A decay or growth law fitted to an observable, with the predicted rate."""

    observable: str
    rate: Rate
    predicted: float | None = None
    """Rate predicted by theory; None if there is no prediction."""

    @property
    def error(self) -> float | None:
        """Fitted rate minus predicted rate."""
        return None if self.predicted is None else self.rate.value - self.predicted


@dataclass(frozen=True, kw_only=True)
class SchemeRun:
    """Result of one scheme at one β."""

    scheme: str
    beta: float
    times: tuple[float, ...]
    bands: dict[str, Band]
    """Observable → band over time."""
    histogram: tuple[tuple[float, ...], ...] = ()
    """For every recorded time the share of token pairs in each bin of the cosine, mean over seeds."""
    merges: tuple[Merge, ...] = ()
    """Cluster merges of the first seed."""
    fits: tuple[FittedLaw, ...] = ()
    tail: Tail | None = None
    """Predicted decay of the variance at late times; None if there is no prediction."""
    paths: tuple[tuple[tuple[float, float, float], ...], ...] = ()
    """For every recorded time the 3-D positions of some tokens of the first seed, on axes common to all runs."""

    def __getitem__(self, observable: str) -> Band:
        if observable not in self.bands:
            raise unknown("observable of this run", observable, self.bands)
        return self.bands[observable]


class SimulateResult(StoredResult):
    """Base class of what `normlab simulate` returns."""

    made_by = "normlab simulate"

    def to_html(self) -> str:
        from normlab.dynamics.view.page import render_result

        return render_result(self)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Simulation(SimulateResult):
    """A finished simulation."""

    what = "simulation"

    config: dict[str, Any]
    """Options of the simulation."""
    runs: tuple[SchemeRun, ...]
    """One result for every scheme and β."""
    explained: float | None = None
    """Explained variance of the three principal axes that the paths are drawn on."""
    notes: tuple[str, ...] = ()
    """Assumptions and remarks shown with the result."""
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    schema: Literal[1] = SCHEMA

    def run(self, scheme: str | None = None, beta: float | None = None) -> SchemeRun:
        """Result of a scheme at a β; the first one if they are left out."""
        for run in self.runs:
            if scheme in (None, run.scheme) and beta in (None, run.beta):
                return run
        raise unknown("run", f"{scheme} at β {beta}", [f"{run.scheme} at β {run.beta:g}" for run in self.runs])

    def table(self) -> str:
        """Table of first and last values and fitted laws, as plain text."""
        from normlab.dynamics.view.card import simulation_text

        return simulation_text(self)
