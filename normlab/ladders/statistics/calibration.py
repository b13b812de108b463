"""How often intervals cover the truth on simulated ladders: the test that an interval called 95 % is one.

Many simulated ladders share their factorisations: the posterior is linear in the data for each hyperparameter. For that
the estimated noise of seeds is rounded to steps of 5 %, which `answer` does not do.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from normlab.ladders.statistics.answer import Place
from normlab.ladders.statistics.fit import PriorOf
from normlab.ladders.statistics.gaussian import GaussianModel, Posterior
from normlab.ladders.statistics.layout import layout_of
from normlab.ladders.statistics.noise import SeedNoise, noise_model, pooled
from normlab.ladders.statistics.simple_law import simple_law_prior
from normlab.ladders.statistics.simulation import (
    USUAL,
    Noise,
    Places,
    SimulatedLadder,
    Truth,
    simulate,
    simulated_grid,
    simulated_path,
)
from normlab.ladders.statistics.smooth import smooth_prior

Array = np.ndarray

ESTIMATORS: dict[str, PriorOf] = {"M": smooth_prior, "K": simple_law_prior}
_ROUNDING = 0.05
_BATCH = 40
"""Data sets fitted at once: bounds the memory."""
_WIDTHS = 12
"""Data sets of each truth whose interval is computed, for the mean width."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A design and its noise; places are those beyond the ladder, or cells that are held out and forecast."""

    name: str
    ladder: SimulatedLadder
    noise: Noise = USUAL
    seeds: int = 3
    held_out: int = 0
    """Number of cells at the end that are forecast from the others, as means of `new_seeds` seeds."""
    new_seeds: int = 2
    places: tuple[str, ...] = ("1x", "3.5x", "10x")
    is_required: bool = False
    """Whether M's worst coverage must be at least 0.90."""


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Share of intervals that cover, and their mean width, for one truth at one place."""

    case: str
    estimator: str
    truth: str
    place: str
    coverage: float
    width: float


@dataclass
class _Data:
    """Simulated cell means with estimated noise, and the values to be covered."""

    means: Array
    noises: list[SeedNoise]
    values: Array
    bins: Array = field(init=False)

    def __post_init__(self) -> None:
        self.bins = np.array([round(float(np.log(own.sd)) / _ROUNDING) for own in self.noises])


def required_cases() -> list[Case]:
    """The two designs whose worst coverage is required."""
    return [
        Case(name="path: 5 rungs, 3 seeds", ladder=simulated_path(), is_required=True),
        Case(name="grid: 4 sizes, 3 budgets, 3 seeds", ladder=simulated_grid(), is_required=True),
    ]


def measure(case: Case, truths: Sequence[Truth], repeats: int, estimator: str, level: float = 0.95) -> list[Coverage]:
    """Coverage of one estimator for every truth; deterministic, and independent of the other truths."""
    cells, places = _split(case)
    prior = ESTIMATORS[estimator](layout_of(cells, places))
    names = [f"cell {index}" for index in range(len(places))] if case.held_out else list(case.places)
    groups = case.ladder.group[: len(cells)]
    found = [_Sums(len(places)) for _ in truths]
    data = [_simulate(case, truth, repeats, len(cells)) for truth in truths]
    for step in sorted({int(value) for own in data for value in own.bins}):
        rounded = SeedNoise(float(np.exp(step * _ROUNDING)), data[0].noises[0].df)
        noise = noise_model(np.full(len(cells), case.seeds), groups, rounded, case.new_seeds)
        model = GaussianModel(prior, noise, np.eye(len(places)), predicts=case.held_out > 0)
        for own, sums in zip(data, found, strict=True):
            chosen = np.flatnonzero(own.bins == step)
            for start in range(0, len(chosen), _BATCH):
                batch = chosen[start : start + _BATCH]
                sums.add(model.fit(own.means[batch]), own.values[batch], batch, level)
    return [
        Coverage(
            case=case.name, estimator=estimator, truth=truth.name, place=place,
            coverage=float(sums.covered[index] / repeats), width=float(np.mean(sums.widths[index])),
        )
        for truth, sums in zip(truths, found, strict=True)
        for index, place in enumerate(names)
    ]  # fmt: skip


def worst(found: Sequence[Coverage]) -> dict[str, Coverage]:
    """The lowest coverage at each place."""
    places = dict.fromkeys(own.place for own in found)
    return {place: min((own for own in found if own.place == place), key=lambda own: own.coverage) for place in places}


class _Sums:
    def __init__(self, places: int) -> None:
        self.covered = np.zeros(places)
        self.widths: list[list[float]] = [[] for _ in range(places)]

    def add(self, posterior: Posterior, values: Array, batch: Array, level: float) -> None:
        below = posterior.below(values[:, None, :])
        tail = (1.0 - level) / 2.0
        self.covered += ((below >= tail) & (below <= 1.0 - tail)).sum(axis=0)
        for row in np.flatnonzero(batch < _WIDTHS):
            for place, widths in enumerate(self.widths):
                widths.append(posterior.mixture(place, int(row)).interval(level).width)


def _simulate(case: Case, truth: Truth, repeats: int, cells: int) -> _Data:
    rng = np.random.default_rng(zlib.crc32(f"{case.name}/{truth.name}".encode()))
    gaps, _ = simulate(case.ladder, truth, case.noise, case.seeds, repeats, rng)
    groups = case.ladder.group[:cells].tolist()
    noises = [pooled(list(own[:cells]), groups) for own in gaps]
    if case.held_out:
        values = gaps[:, cells:, : case.new_seeds].mean(axis=-1)
    else:
        true = [float(truth.gap(case.ladder.beyond[place])[0]) for place in case.places]
        values = np.tile(true, (repeats, 1))
    return _Data(gaps[:, :cells].mean(axis=-1), noises, values)


def _split(case: Case) -> tuple[list[Place], list[Place]]:
    """Cells of the fit, and places to cover."""
    every = as_places(case.ladder.cells)
    cells = every[: len(every) - case.held_out]
    if case.held_out:
        return cells, every[len(cells) :]
    return cells, [own for place in case.places for own in as_places(case.ladder.beyond[place])]


def as_places(at: Places) -> list[Place]:
    """Simulated places as those of a ladder."""
    numbers = zip(at.parameters.tolist(), at.tokens.tolist(), at.flops.tolist(), strict=True)
    return [Place(name="", size="", parameters=round(n), tokens=round(d), flops=c) for n, d, c in numbers]
