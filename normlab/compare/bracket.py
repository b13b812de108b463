"""Learning-rate search for one scheme: which rates to try next, and which of those tried is best.

All rates are on one grid, 1e-3 · 2^(k/2) for integer k, so that different schemes are run at the same rates. `Bracket`,
for each scheme:

1. Try the start (`start_rate`, a function of the model size), half and twice that rate.
2. While the best rate is the smallest or largest tried, try the next one beyond it, a factor of 2 away, from start/64
   up to 64 · start. While no run has trained, extend in both directions, from start/16 up to 16 · start.
3. If the search is refined, try the rates a factor of √2 below and above the best.

An end that is as good as the best counts as the best. The best rate is then *interior* (a worse rate was tried on
either side) or lies at a limit. A list of rates (`RateList`) is searched in the same way, by its own steps. Searches
are pure functions of scores and do not depend on runs, rows or torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

End = Literal["interior", "lowest", "highest", "untrained"]
_Rate = TypeVar("_Rate", int, float)

_GRID = 1e-3
"""The rate with index 0; consecutive indices differ by a factor of √2."""

_COARSE = 2
"""Indices per factor of 2."""

_REACH = 6 * _COARSE
"""Indices from the start to either limit: a factor of 64. Some schemes want 16 times the usual rate or more."""

_REACH_FACTOR = 1.01 * 2.0 ** (_REACH / _COARSE)
"""The same as a factor, with room for rounded rates."""

_LOST_REACH = 4 * _COARSE
"""The same while no run has trained: a factor of 16."""

_USUAL = (85e6, 1e-3, 0.2)
"""Block parameters of a 125M model, its learning rate, and the exponent with which rates decrease with size.
Stored comparisons selected 1e-3 to 8e-3 with 4 to 36 blocks of width 64, where this rule gives 2e-3 to 4e-3."""


class Score(NamedTuple):
    """Score of a rate. Scores compare by the number of runs that did not train, then by the mean; lower is better."""

    lost: int
    """Runs that failed, diverged or were stuck."""
    mean: float
    """Mean loss of the runs that trained (negative accuracy if higher is better); infinite if none did."""


@dataclass(frozen=True)
class RateSearch:
    """State of the search for one scheme's rate."""

    next_rates: tuple[float, ...] = ()
    """Rates to try next; empty once the search has ended."""
    pick: float | None = None
    """The best rate, once the search has ended; None if no run trained."""
    end: End | None = None
    """Position of the best rate: interior, at one of the two limits, or untrained if no rate trained."""


@dataclass(frozen=True)
class Bracket:
    """Learning-rate search from a start, which is rounded to a power of 2 on the grid."""

    start: float
    refined: bool = True
    """Whether rates a factor of √2 from the best are tried as well."""

    @property
    def first(self) -> tuple[float, ...]:
        """The rates that are always tried: half the start, the start, and twice the start."""
        return tuple(grid_rate(self._start + step) for step in (-_COARSE, 0, _COARSE))

    @property
    def limits(self) -> tuple[float, float]:
        """The lowest and the highest rate of the search."""
        return grid_rate(self._start - _REACH), grid_rate(self._start + _REACH)

    def may_try(self, lr: float) -> bool:
        """Whether the search could come to a rate: whether it is on the grid."""
        return grid_index(lr) is not None

    def next(self, scores: Mapping[float, Score]) -> RateSearch:
        """Next step of the search, given the scores so far; rates off the grid are ignored."""
        seen = {k: score for lr, score in scores.items() if (k := grid_index(lr)) is not None}
        due = self._due(seen)
        if due:
            return RateSearch(next_rates=tuple(grid_rate(k) for k in due))
        if _is_lost(seen):
            return RateSearch(end="untrained")
        return RateSearch(pick=grid_rate(_best(seen)), end=_end(seen))

    @property
    def _start(self) -> int:
        return _COARSE * round(math.log2(self.start / _GRID))

    def _due(self, seen: Mapping[int, Score]) -> list[int]:
        first = [self._start + step for step in (-_COARSE, 0, _COARSE)]
        if missing := [k for k in first if k not in seen]:
            return missing
        below, above = min(seen) - _COARSE, max(seen) + _COARSE
        if _is_lost(seen):
            return self._inside(below, above, reach=_LOST_REACH)
        best = _best(seen)
        # An end that is as good as the best (accuracies are counts) is widened, too.
        beyond = [below] * (seen[min(seen)] == seen[best]) + [above] * (seen[max(seen)] == seen[best])
        # Factors of 2 first: refining around a best rate that may still move would waste runs.
        around = (best - 1, best + 1) if self.refined else ()
        return self._inside(*beyond) or [k for k in self._inside(*around) if k not in seen]

    def _inside(self, *indices: int, reach: int = _REACH) -> list[int]:
        return [k for k in indices if abs(k - self._start) <= reach]


@dataclass(frozen=True)
class RateList:
    """Learning-rate search from a list: all of its rates, then the next one beyond an end while that is the best.

    Steps beyond an end are those of the list there, up to a factor of 64 in all. It ends if no rate of the list trains.
    """

    rates: tuple[float, ...]
    """At least two."""
    also: float | None = None
    """A rate found elsewhere, which is tried with them."""

    @property
    def first(self) -> tuple[float, ...]:
        """The rates that are always tried."""
        return self.rates

    def may_try(self, lr: float) -> bool:
        """Whether the search could come to a rate: to any, since a list that has grown may have been widened before."""
        return True

    def next(self, scores: Mapping[float, Score]) -> RateSearch:
        """Next step of the search, given the scores so far."""
        first = {*self.rates, *self._also}
        if due := first - scores.keys():
            return RateSearch(next_rates=tuple(sorted(due)))
        if _is_lost(scores):
            return RateSearch(end="untrained")
        best, lowest, highest = _best(scores), min(scores), max(scores)
        below, above = self._steps
        if scores[lowest] == scores[best] and lowest / below >= min(first) / _REACH_FACTOR:
            return RateSearch(next_rates=(_near_grid(lowest / below),))
        if scores[highest] == scores[best] and highest * above <= max(first) * _REACH_FACTOR:
            return RateSearch(next_rates=(_near_grid(highest * above),))
        return RateSearch(pick=best, end=_end(scores))

    @property
    def _also(self) -> list[float]:
        """The rate found elsewhere, unless the list has it but for rounding."""
        if self.also is None or any(_are_close(self.also, lr) for lr in self.rates):
            return []
        return [_near_grid(self.also)]

    @property
    def _steps(self) -> tuple[float, float]:
        """Factors between the two lowest and the two highest rates; from √2, which spares runs, to 4."""
        ordered = sorted(self.rates)
        factors = ordered[1] / ordered[0], ordered[-1] / ordered[-2]
        below, above = (min(max(factor, math.sqrt(2.0)), 4.0) for factor in factors)
        return below, above


def start_rate(depth: int, width: int) -> float:
    """Start of the search before rounding to the grid: 1e-3 · (85M / (12 · depth · width²))^0.2."""
    usual_size, usual_rate, power = _USUAL
    return usual_rate * (usual_size / (12 * depth * width**2)) ** power


def grid_rate(k: int) -> float:
    """The rate at an index, rounded to three digits: 1e-3, 1.41e-3, 2e-3."""
    return float(f"{_GRID * 2.0 ** (k / 2):.3g}")


def _near_grid(lr: float) -> float:
    """The rate of the grid that a rate is but for rounding, else the rate with six digits."""
    near = grid_rate(round(2.0 * math.log2(lr / _GRID)))
    return near if _are_close(lr, near) else float(f"{lr:.6g}")


def _are_close(a: float, b: float) -> bool:
    return abs(a / b - 1.0) < 0.01


def grid_index(lr: float) -> int | None:
    """The index of a rate; None if it is not on the grid."""
    k = round(2.0 * math.log2(lr / _GRID))
    return k if grid_rate(k) == lr else None


def _best(seen: Mapping[_Rate, Score]) -> _Rate:
    """The rate, or its index, with the best score; ties go to the lower one."""
    return min(seen, key=lambda k: (seen[k], k))


def _end(seen: Mapping[_Rate, Score]) -> End:
    """Where the best rate of a search that has ended lies; an end that is as good counts as the best."""
    best = seen[_best(seen)]
    return "lowest" if seen[min(seen)] == best else "highest" if seen[max(seen)] == best else "interior"


def _is_lost(seen: Mapping[_Rate, Score]) -> bool:
    return all(math.isinf(score.mean) for score in seen.values())
