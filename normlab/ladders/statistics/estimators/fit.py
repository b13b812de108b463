"""Fit an estimator to the cells of one scheme: distributions of the gap, or of sums of gaps, at any places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from normlab.ladders.statistics.cells import Cell
from normlab.ladders.statistics.estimators.gaussian import GaussianModel, Prior
from normlab.ladders.statistics.estimators.layout import HasPlace, Kind, Layout, kind_of, layout_of
from normlab.ladders.statistics.estimators.mixture import Mixture
from normlab.ladders.statistics.estimators.noise import SeedNoise, noise_model, pooled
from normlab.ladders.statistics.estimators.simple_law import simple_law_prior
from normlab.ladders.statistics.estimators.smooth import smooth_prior

Array = np.ndarray
PriorOf = Callable[[Layout], Prior]


@dataclass(frozen=True)
class Sample:
    """What a fit needs of one scheme's usable cells."""

    places: tuple[HasPlace, ...]
    means: Array
    seeds: Array
    groups: Array
    noise: SeedNoise
    flops_ratios: tuple[float, ...] = ()
    """FLOPs of the baseline over the scheme's, by cell; none: equal."""

    @property
    def kind(self) -> Kind:
        return kind_of(self.places)

    @property
    def tokens(self) -> Array:
        return tokens_of(self.places)

    def flops_ratio(self, place: HasPlace) -> float:
        """FLOPs of the baseline over the scheme's at a place; where it is no cell, as at the top."""
        if not self.flops_ratios:
            return 1.0
        known = {(at.parameters, at.tokens): own for at, own in zip(self.places, self.flops_ratios, strict=True)}
        top = max(self.places, key=lambda at: at.flops)
        return known.get((place.parameters, place.tokens), known[top.parameters, top.tokens])


@dataclass(frozen=True)
class NewCell:
    """A cell that might be trained."""

    place: HasPlace
    group: int
    """Number of its trunk, as in `Sample.groups`."""
    seeds: int


def tokens_of(places: Sequence[HasPlace]) -> Array:
    return np.array([float(at.tokens) for at in places])


def sample_of(cells: Sequence[Cell]) -> Sample:
    """The sample of usable cells; at least one is needed."""
    usable = [cell for cell in cells if cell.is_usable]
    names = sorted({cell.trunk for cell in usable})
    groups = [names.index(cell.trunk) for cell in usable]
    differences = [np.array(list(cell.differences.values())) for cell in usable]
    return Sample(
        tuple(cell.place for cell in usable),
        np.array([own.mean() for own in differences]),
        np.array([len(own) for own in differences]),
        np.array(groups),
        pooled(differences, groups, [cell.tokens for cell in usable]),
        tuple(cell.flops_ratio for cell in usable),
    )


def estimate(
    sample: Sample,
    places: Sequence[HasPlace],
    functionals: Array | None = None,
    prior_of: PriorOf = smooth_prior,
    new_seeds: int | None = None,
) -> list[Mixture]:
    """Distribution of each functional (a row of weights over places; the gap at each place if None).

    With `new_seeds` it is the mean of that many new seeds at a new cell there: a prediction.
    """
    posterior = _model(sample, places, functionals, prior_of, new_seeds).fit(sample.means[None])
    return [posterior.mixture(index) for index in range(posterior.means.shape[-1])]


def estimate_with_more(sample: Sample, place: HasPlace, cells: Sequence[NewCell], seeds: int) -> Mixture:
    """The gap at a place as more runs are expected to leave it: new cells, and more seeds at every old one.

    Nobody knows where their results will lie. For each hyperparameter the spread depends on the design alone: it is
    that of the larger design, around today's mean and with today's weight. The prior is today's as well, so that more
    runs never make anything less certain.
    """
    today = _model(sample, [place], None, smooth_prior, None).fit(sample.means[None]).mixture(0)
    every = [*(cell.place for cell in cells), place]
    prior = smooth_prior(layout_of(sample.places, every, sample.noise.scatter_power))
    noise = noise_model(
        np.concatenate([sample.seeds + seeds, [cell.seeds for cell in cells]]),
        np.concatenate([sample.groups, [cell.group for cell in cells]]).astype(int),
        np.concatenate([sample.tokens, tokens_of([cell.place for cell in cells])]),
        sample.noise,
    )
    return replace(today, sds=GaussianModel(prior, noise, np.eye(1)).sds[:, 0])


def simple_law_weights(sample: Sample) -> tuple[dict[str, float], dict[str, float]]:
    """Posterior weights of the simple law's families and axes."""
    prior = simple_law_prior(layout_of(sample.places, sample.places[-1:]))
    model = _model(sample, sample.places[-1:], None, simple_law_prior, None)
    weights = model.shape_weights(model.fit(sample.means[None]))
    families: dict[str, float] = {}
    axes: dict[str, float] = {}
    for (family, axis), weight in zip(prior.labels, weights.tolist(), strict=True):
        families[family] = families.get(family, 0.0) + weight
        axes[axis] = axes.get(axis, 0.0) + weight
    return families, axes


def _model(
    sample: Sample, places: Sequence[HasPlace], functionals: Array | None, prior_of: PriorOf, new_seeds: int | None
) -> GaussianModel:
    rows = np.eye(len(places)) if functionals is None else functionals
    noise = noise_model(sample.seeds, sample.groups, sample.tokens, sample.noise, tokens_of(places), new_seeds or 1)
    prior = prior_of(layout_of(sample.places, places, sample.noise.scatter_power))
    return GaussianModel(prior, noise, rows, predicts=new_seeds is not None)
