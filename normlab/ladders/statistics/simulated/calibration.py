"""How often intervals cover the truth on simulated ladders: the test that an interval called 95 % is one.

Many simulated ladders share their factorisations: the posterior is linear in the data for each hyperparameter. For that
the estimated noise of seeds is rounded to steps of 6 %, its correlation between branches to steps of 0.08, the power of
tokens that it follows to steps of 0.1 and this power's error to steps of 0.08, which `answer` does not do.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from normlab.ladders.statistics.answer import Place
from normlab.ladders.statistics.cells import LARGEST_GAP
from normlab.ladders.statistics.estimators.fit import PriorOf, tokens_of
from normlab.ladders.statistics.estimators.gaussian import GaussianModel, Posterior
from normlab.ladders.statistics.estimators.layout import layout_of
from normlab.ladders.statistics.estimators.noise import SeedNoise, effective_df, noise_model, pooled
from normlab.ladders.statistics.estimators.simple_law import simple_law_prior
from normlab.ladders.statistics.estimators.smooth import smooth_prior
from normlab.ladders.statistics.simulated.ladders import (
    EARLY,
    USUAL,
    Noise,
    SimulatedLadder,
    simulate,
    simulated_grid,
    simulated_path,
)
from normlab.ladders.statistics.simulated.truths import Places, Truth

Array = np.ndarray
Bin = tuple[int, ...]
"""Estimated noise in whole steps."""

ESTIMATORS: dict[str, PriorOf] = {"smooth": smooth_prior, "simple_law": simple_law_prior}
_ROUNDINGS = (0.06, 0.08, 0.1, 0.08)
"""Steps of ln σ, of the correlation, of the power and of its error."""
_BATCH = 40
"""Data sets fitted at once: bounds the memory."""
_WIDTHS = 12
"""Data sets of each truth whose interval is computed, for the mean width."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A design and its noise; places are the top and beyond, or cells that are held out and forecast."""

    name: str
    ladder: SimulatedLadder
    noise: Noise = USUAL
    seeds: int = 3
    top_seeds: int | None = None
    """Seeds of the last trunk, where it has fewer."""
    held_out: int = 0
    """Number of cells at the end that are forecast from the others, as means of `new_seeds` seeds."""
    new_seeds: int = 2
    places: tuple[str, ...] = ("1x", "3.5x", "10x")
    is_required: bool = False
    """Whether the smooth estimator's worst coverage must be at least 0.90."""

    @property
    def seeds_by_cell(self) -> Array:
        is_last = self.ladder.group == self.ladder.group[-1]
        return np.where(is_last, self.top_seeds or self.seeds, self.seeds)


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
    bins: list[Bin] = field(init=False)

    def __post_init__(self) -> None:
        self.bins = [_rounded(own) for own in self.noises]


def required_cases() -> list[Case]:
    """The designs whose worst coverage is required; the last two are plan A of benchmarks/."""
    path, grid = simulated_path(), simulated_grid()
    return [
        Case(name="path: 5 rungs, 3 seeds", ladder=path, is_required=True),
        Case(name="grid: 4 sizes, 3 budgets, 3 seeds", ladder=grid, is_required=True),
        Case(name="grid: 2 seeds at the largest size", ladder=grid, top_seeds=2, is_required=True),
        Case(name="grid: short runs scatter more", ladder=grid, noise=EARLY, top_seeds=2, is_required=True),
    ]


def measure(case: Case, truths: Sequence[Truth], repeats: int, estimator: str, level: float = 0.95) -> list[Coverage]:
    """Coverage of one estimator for every truth; deterministic, and independent of the other truths."""
    cells, places = _split(case)
    names, functionals = _questions(case, len(places))
    groups, seeds = case.ladder.group[: len(cells)], case.seeds_by_cell[: len(cells)]
    data = [_simulate(case, truth, repeats, len(cells)) for truth in truths]
    means, values = (np.concatenate([getattr(own, name) for own in data]) for name in ("means", "values"))
    bins = [step for own in data for step in own.bins]
    covered, widths = np.zeros(values.shape, dtype=bool), np.full(values.shape, np.nan)
    for step in sorted(set(bins)):
        own = _noise_of(step, case, cells)
        prior = ESTIMATORS[estimator](layout_of(cells, places, own.scatter_power))
        noise = noise_model(seeds, groups, tokens_of(cells), own, tokens_of(places), case.new_seeds)
        model = GaussianModel(prior, noise, functionals, predicts=case.held_out > 0)
        chosen = np.array([index for index, other in enumerate(bins) if other == step])
        for batch in np.array_split(chosen, math.ceil(len(chosen) / _BATCH)):
            posterior = model.fit(means[batch])
            covered[batch] = _covers(posterior, values[batch], level)
            for row in np.flatnonzero(batch % repeats < _WIDTHS).tolist():
                widths[batch[row]] = [posterior.mixture(at, row).interval(level).width for at in range(len(names))]
    share = covered.reshape(len(truths), repeats, -1).mean(axis=1)
    width = np.nanmean(widths.reshape(len(truths), repeats, -1), axis=1)
    return [
        Coverage(
            case=case.name, estimator=estimator, truth=truth.name, place=place, coverage=float(share[row, column]),
            width=float(width[row, column]),
        )
        for row, truth in enumerate(truths)
        for column, place in enumerate(names)
    ]  # fmt: skip


def within_priors(case: Case, truths: Sequence[Truth]) -> list[Truth]:
    """Truths whose gap is nowhere on the ladder so large that `answer` fits nothing."""
    return [truth for truth in truths if float(abs(truth.gap(case.ladder.cells)).max()) < LARGEST_GAP]


def worst(found: Sequence[Coverage]) -> dict[str, Coverage]:
    """The lowest coverage at each place."""
    places = dict.fromkeys(own.place for own in found)
    return {place: min((own for own in found if own.place == place), key=lambda own: own.coverage) for place in places}


def _rounded(noise: SeedNoise) -> Bin:
    values = (math.log(noise.sd), noise.branch, noise.exponent, noise.exponent_error)
    return tuple(round(value / step) for value, step in zip(values, _ROUNDINGS, strict=True))


def _noise_of(steps: Bin, case: Case, cells: Sequence[Place]) -> SeedNoise:
    log_sd, branch, exponent, error = (own * step for own, step in zip(steps, _ROUNDINGS, strict=True))
    seeds, groups = case.seeds_by_cell[: len(cells)], case.ladder.group[: len(cells)]
    centre = float(np.average(np.log(tokens_of(cells)), weights=seeds - 1))
    df = effective_df(seeds.tolist(), groups.tolist(), branch)
    return SeedNoise(math.exp(log_sd), df, branch, exponent, error, centre)


def _covers(posterior: Posterior, values: Array, level: float) -> Array:
    below, tail = posterior.below(values[:, None, :]), (1.0 - level) / 2.0
    return (below >= tail) & (below <= 1.0 - tail)


def _simulate(case: Case, truth: Truth, repeats: int, cells: int) -> _Data:
    rng = np.random.default_rng(zlib.crc32(f"{case.name}/{truth.name}".encode()))
    gaps, _ = simulate(case.ladder, truth, case.noise, case.seeds, repeats, rng)
    groups = case.ladder.group[:cells].tolist()
    seeds = case.seeds_by_cell.tolist()
    tokens = np.round(case.ladder.cells.tokens[:cells]).tolist()
    noises = [pooled([own[cell, : seeds[cell]] for cell in range(cells)], groups, tokens) for own in gaps]
    means = np.stack([gaps[:, cell, : seeds[cell]].mean(axis=-1) for cell in range(cells)], axis=1)
    if case.held_out:
        values = gaps[:, cells:, : case.new_seeds].mean(axis=-1)
    else:
        beyond = [float(truth.gap(case.ladder.beyond[place])[0]) for place in case.places]
        at_cells = truth.gap(case.ladder.cells)[list(_starts(case).values())].tolist()
        _, functionals = _questions(case, len(beyond) + len(at_cells))
        values = np.tile(functionals @ np.array([*beyond, *at_cells]), (repeats, 1))
    return _Data(means, noises, values)


def _split(case: Case) -> tuple[list[Place], list[Place]]:
    """Cells of the fit, and places to cover; the last ones are where changes start, unless cells are held out."""
    every = as_places(case.ladder.cells)
    cells = every[: len(every) - case.held_out]
    if case.held_out:
        return cells, every[len(cells) :]
    beyond = [own for place in case.places for own in as_places(case.ladder.beyond[place])]
    return cells, [*beyond, *(cells[start] for start in _starts(case).values())]


def _starts(case: Case) -> dict[str, int]:
    """Cells from which the change to the top is asked: the bottom and, on a grid, the top's size at a first budget."""
    first_of_top = int(np.flatnonzero(case.ladder.group == case.ladder.group[-1])[0])
    return {"top - bottom": 0} | ({"top - first budget": first_of_top} if case.ladder.is_branched else {})


def _questions(case: Case, places: int) -> tuple[list[str], Array]:
    """Names and functionals: the gap at every place, and its changes to the first place, which is the top."""
    if case.held_out:
        return [f"cell {index}" for index in range(places)], np.eye(places)
    every, starts = np.eye(places), list(_starts(case))
    changes = [every[0] - every[len(case.places) + index] for index in range(len(starts))]
    return [*case.places, *starts], np.vstack([every[: len(case.places)], *changes])


def as_places(at: Places) -> list[Place]:
    """Simulated places as those of a ladder."""
    numbers = zip(at.parameters.tolist(), at.tokens.tolist(), at.flops.tolist(), strict=True)
    return [Place(name="", size="", parameters=round(n), tokens=round(d), flops=c) for n, d, c in numbers]
