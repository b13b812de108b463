"""The smooth estimator: it assumes only that the gap is a smooth function, a line plus an integrated Wiener process.

On a path the process runs along ln C, twice as fast where all compute goes into tokens or into size, since a gap that
lives in one of them moves twice as fast along it. A place aside of the path is less certain by what slope and bend
between size and tokens may be, which the cells do not show. On a grid there are four processes, along size, tokens,
compute and tokens per parameter, each with a bend of its own: a gap that lives in tokens alone bends along tokens and
nowhere else, and one that moves differently in small and in large models bends along compute and tokens per parameter.
All bends are averaged over, weighted by how well they explain the cells.

Where short runs scatter more over seeds than long ones, their gap may bend faster, too: it is smooth in tokens that are
stretched by the scatter. Without that, noisy cells at the lowest budget are read off the quiet ones above, and a gap
that is steep at the start was covered 0.84 there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from normlab.ladders.statistics.estimators.gaussian import Prior
from normlab.ladders.statistics.estimators.layout import Layout

Array = np.ndarray

LEVEL_SD = 0.10
"""Prior standard deviation of the gap at the top, in nats."""
SLOPE_SD = 0.03
"""Of its slope, in nats an e-fold of compute."""
PATH_BENDS = (0.005, 0.010, 0.020, 0.040)
"""Nats an e-fold^1.5, with equal weight. With 0 and 0.002 among them, a gap that turns was covered 0.87 at 3.5 ×."""
GRID_SLOPE_SD = 0.06
"""Of the slope along size and along tokens: a gap that lives in one of them moves twice as fast along it."""
GRID_BENDS = (0.005, 0.015, 0.045)
"""For each of the four directions, with equal weight. With 0 among them, changes over budgets were covered 0.895."""


def smooth_prior(layout: Layout) -> Prior:
    """The smooth prior over the cells and places of a layout."""
    return _path_prior(layout) if layout.kind == "path" else _grid_prior(layout)


def _path_prior(layout: Layout) -> Prior:
    x, aside, along = layout.along, layout.aside, layout.stretched.along
    # Aside of the path tokens grow and size shrinks: the difference of two slopes, and a bend as in one of them alone.
    line = LEVEL_SD**2 + SLOPE_SD**2 * np.outer(x, x) + 2.0 * GRID_SLOPE_SD**2 * np.outer(aside, aside)
    return _bent(line, [along, 2.0 * abs(aside)], layout.cells, PATH_BENDS)


def _grid_prior(layout: Layout) -> Prior:
    slopes = np.outer(layout.size, layout.size) + np.outer(layout.tokens, layout.tokens)
    plane = LEVEL_SD**2 + GRID_SLOPE_SD**2 * slopes
    own = layout.stretched
    return _bent(plane, [own.size, own.tokens, own.compute, own.ratio], layout.cells, GRID_BENDS)


def _bent(straight: Array, directions: Sequence[Array], cells: int, bends: tuple[float, ...]) -> Prior:
    """A straight prior with a process along each direction, for all combinations of their bends."""
    bent = np.array([integrated_wiener(x, cells) for x in directions])
    every = np.array(list(itertools.product(bends, repeat=len(directions))))
    covariance = straight + np.einsum("hd,dij->hij", every**2, bent)
    return Prior(covariance, np.full(len(every), -np.log(len(every))))


def integrated_wiener(x: Array, cells: int) -> Array:
    """Covariance of a Wiener process integrated once, started at the lowest cell: u²(3v - u)/6 for u ≤ v."""
    distance = np.maximum(x - x[:cells].min(), 0.0)
    u, v = np.minimum.outer(distance, distance), np.maximum.outer(distance, distance)
    return u**2 * (3.0 * v - u) / 6.0
