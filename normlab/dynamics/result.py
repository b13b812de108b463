"""The result of a simulation: observables over time, the laws fitted to them, and paths to draw, in plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from normlab.dynamics.measure.fits import Rate
from normlab.dynamics.measure.tails import Tail
from normlab.errors import unknown
from normlab.utils.records import StoredResult

SCHEMA = 1
"""Version of the JSON; it grows when a field changes its meaning."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """An observable over time: its mean over seeds and the middle 90 % of them."""

    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Merge:
    """A look at which there were fewer clusters than before."""

    time: float
    clusters: int
    """That are left."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The law of an observable, fitted and foretold."""

    observable: str
    rate: Rate
    predicted: float | None = None
    """What theory says of the rate; None where it says nothing."""

    @property
    def error(self) -> float | None:
        """Fitted rate less the predicted one."""
        return None if self.predicted is None else self.rate.value - self.predicted


@dataclass(frozen=True, kw_only=True)
class SchemeRun:
    """One scheme at one β."""

    scheme: str
    beta: float
    times: tuple[float, ...]
    bands: dict[str, Band]
    """By observable."""
    histogram: tuple[tuple[float, ...], ...] = ()
    """For every look the share of pairs in each part of [−1, 1] that their cosine can lie in, mean over seeds."""
    merges: tuple[Merge, ...] = ()
    """Of the first seed."""
    fits: tuple[Fitted, ...] = ()
    tail: Tail | None = None
    """How tokens collapse in the end, by theory; None where it says nothing."""
    paths: tuple[tuple[tuple[float, float, float], ...], ...] = ()
    """For every look the places of some tokens of the first seed on the axes that all runs share."""

    def __getitem__(self, observable: str) -> Band:
        if observable not in self.bands:
            raise unknown("observable of this run", observable, self.bands)
        return self.bands[observable]


class Shown(StoredResult):
    """What `normlab simulate` ends in."""

    made_by = "normlab simulate"

    def to_html(self) -> str:
        from normlab.dynamics.view.page import page

        return page(self)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Simulation(Shown):
    """A finished simulation."""

    what = "simulation"

    config: dict[str, Any]
    """The options it ran with."""
    runs: tuple[SchemeRun, ...]
    """Every scheme at every β."""
    explained: float | None = None
    """Share of the tokens' square length that the three axes of the paths hold."""
    notes: tuple[str, ...] = ()
    """What a reader must know."""
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    schema: Literal[1] = SCHEMA

    def run(self, scheme: str | None = None, beta: float | None = None) -> SchemeRun:
        """The run of a scheme at a β; the first where they are left out."""
        for run in self.runs:
            if scheme in (None, run.scheme) and beta in (None, run.beta):
                return run
        raise unknown("run", f"{scheme} at β {beta}", [f"{run.scheme} at β {run.beta:g}" for run in self.runs])

    def table(self) -> str:
        """First and last values and fitted laws, as plain text."""
        from normlab.dynamics.view.card import simulation_text

        return simulation_text(self)
