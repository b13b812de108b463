"""Bracket a learning rate: which rates to try next for one scheme, and which of those tried is best.

All rates lie on one grid, 1e-3 · 2^(k/2) for whole k, so that runs of different schemes coincide. For each scheme:

1. Try the start (`start_rate`, a rule in the size of the model), its half and its double.
2. While the best rate is an end of those tried, try the next one beyond it, a factor of 2 away, from start/16 up to
   16 · start. While nothing has trained, try the next one on both sides.
3. Try the rates a factor of √2 below and above the best.

The best rate is then *interior* (the next rate on either side was tried and is worse) or lies at a limit. Scores in,
rates out: nothing here knows of runs, rows or torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

End = Literal["interior", "lowest", "highest", "untrained"]

_GRID = 1e-3
"""The rate with index 0; an index is a factor of √2."""

_COARSE = 2
"""Indices in a factor of 2."""

_REACH = 4 * _COARSE
"""Indices from the start to either limit: a factor of 16."""

_USUAL = (85e6, 1e-3, 0.2)
"""Parameters in the blocks of a model of 125M, the rate that suits it, and the power with which rates fall with size.
Stored comparisons picked 1e-3 to 8e-3 with 4 to 36 blocks of width 64, where this rule says 2e-3 to 4e-3."""


class Score(NamedTuple):
    """How a rate did. Scores compare: fewer runs that did not train first, then the lower mean."""

    lost: int
    """Runs that failed, diverged or were stuck."""
    mean: float
    """Mean loss of the runs that trained (minus the accuracy, where higher is better); infinite where none did."""


@dataclass(frozen=True)
class RateSearch:
    """Where the search for one scheme's rate stands."""

    next_rates: tuple[float, ...] = ()
    """Rates to try next; empty once the search has ended."""
    pick: float | None = None
    """The best rate, once the search has ended; None where nothing trained."""
    end: End | None = None
    """How it ended: around the pick, at one of the two limits, or without a rate that trains."""


@dataclass(frozen=True)
class Bracket:
    """The search for a learning rate from a start, which is rounded to the grid's factors of 2."""

    start: float

    @property
    def first(self) -> tuple[float, ...]:
        """The rates that are tried whatever comes out: half the start, the start, its double."""
        return tuple(grid_rate(self._start + step) for step in (-_COARSE, 0, _COARSE))

    @property
    def limits(self) -> tuple[float, float]:
        """The lowest and the highest rate that are tried."""
        return grid_rate(self._start - _REACH), grid_rate(self._start + _REACH)

    def next(self, scores: Mapping[float, Score]) -> RateSearch:
        """What to do, given the rates tried so far; rates that are not on the grid are not looked at."""
        seen = {k: score for lr, score in scores.items() if (k := grid_index(lr)) is not None}
        due = self._due(seen)
        if due:
            return RateSearch(next_rates=tuple(grid_rate(k) for k in due))
        if _is_lost(seen):
            return RateSearch(end="untrained")
        best = _best(seen)
        ends: dict[int, End] = {min(seen): "lowest", max(seen): "highest"}
        return RateSearch(pick=grid_rate(best), end=ends.get(best, "interior"))

    @property
    def _start(self) -> int:
        return _COARSE * round(math.log2(self.start / _GRID))

    def _due(self, seen: Mapping[int, Score]) -> list[int]:
        first = [self._start + step for step in (-_COARSE, 0, _COARSE)]
        if missing := [k for k in first if k not in seen]:
            return missing
        below, above = min(seen) - _COARSE, max(seen) + _COARSE
        if _is_lost(seen):
            return self._inside(below, above)
        best = _best(seen)
        beyond = [below] * (best == min(seen)) + [above] * (best == max(seen))
        # First the factors of 2: what lies around a best that is still moving would be tried in vain.
        return self._inside(*beyond) or [k for k in self._inside(best - 1, best + 1) if k not in seen]

    def _inside(self, *indices: int) -> list[int]:
        return [k for k in indices if abs(k - self._start) <= _REACH]


def start_rate(depth: int, width: int) -> float:
    """The rate that a search starts from, not yet rounded to the grid: 1e-3 · (85M / (12 · depth · width²))^0.2."""
    usual_size, usual_rate, power = _USUAL
    return usual_rate * (usual_size / (12 * depth * width**2)) ** power


def grid_rate(k: int) -> float:
    """The rate with an index, to three digits: 1e-3, 1.41e-3, 2e-3."""
    return float(f"{_GRID * 2.0 ** (k / 2):.3g}")


def grid_index(lr: float) -> int | None:
    """The index of a rate; None where it is not on the grid."""
    k = round(2.0 * math.log2(lr / _GRID))
    return k if grid_rate(k) == lr else None


def _best(seen: Mapping[int, Score]) -> int:
    """Ties go to the lower rate."""
    return min(seen, key=lambda k: (seen[k], k))


def _is_lost(seen: Mapping[int, Score]) -> bool:
    return all(math.isinf(score.mean) for score in seen.values())
