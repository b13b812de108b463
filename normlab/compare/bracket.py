"""Learning-rate search for one scheme: which rates to try next, and which of those tried is best.

All rates are on one grid, 1e-3 · 2^(k/2) for integer k, so that different schemes are run at the same rates. For each
scheme:

1. Try the start (`start_rate`, a function of the model size), half and twice that rate.
2. While the best rate is the smallest or largest tried, try the next one beyond it, a factor of 2 away, from start/64
   up to 64 · start. While no run has trained, extend in both directions, from start/16 up to 16 · start.
3. If the search is refined, try the rates a factor of √2 below and above the best.

The best rate is then *interior* (the next rate on either side was tried and is worse) or lies at a limit. The search is
a pure function of scores and does not depend on runs, rows or torch.
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

_FACTOR = 1.01 * 2.0 ** (_REACH / _COARSE)
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

    def next(self, scores: Mapping[float, Score]) -> RateSearch:
        """Next step of the search, given the scores so far; rates off the grid are ignored."""
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

    Steps beyond an end are those of the list there, up to a factor of 64. If no rate of the list trains, it ends.
    """

    rates: tuple[float, ...]
    """At least two."""
    also: float | None = None
    """A rate found elsewhere, which is tried with them."""

    def next(self, scores: Mapping[float, Score]) -> RateSearch:
        """Next step of the search, given the scores so far."""
        first = {*self.rates, *(() if self.also is None else (_rounded(self.also),))}
        if due := first - scores.keys():
            return RateSearch(next_rates=tuple(sorted(due)))
        if _is_lost(scores):
            return RateSearch(end="untrained")
        best, lowest, highest = _best(scores), min(scores), max(scores)
        below, above = self._steps
        if scores[lowest] == scores[best] and lowest / below >= min(first) / _FACTOR:
            return RateSearch(next_rates=(_rounded(lowest / below),))
        if scores[highest] == scores[best] and highest * above <= max(first) * _FACTOR:
            return RateSearch(next_rates=(_rounded(highest * above),))
        ends: dict[float, End] = {lowest: "lowest", highest: "highest"}
        return RateSearch(pick=best, end=ends.get(best, "interior"))

    @property
    def _steps(self) -> tuple[float, float]:
        """Factors between the two lowest and the two highest rates."""
        ordered = sorted(self.rates)
        return ordered[1] / ordered[0], ordered[-1] / ordered[-2]


def start_rate(depth: int, width: int) -> float:
    """Start of the search before rounding to the grid: 1e-3 · (85M / (12 · depth · width²))^0.2."""
    usual_size, usual_rate, power = _USUAL
    return usual_rate * (usual_size / (12 * depth * width**2)) ** power


def grid_rate(k: int) -> float:
    """The rate at an index, rounded to three digits: 1e-3, 1.41e-3, 2e-3."""
    return _rounded(_GRID * 2.0 ** (k / 2), digits=3)


def _rounded(lr: float, digits: int = 6) -> float:
    return float(f"{lr:.{digits}g}")


def grid_index(lr: float) -> int | None:
    """The index of a rate; None if it is not on the grid."""
    k = round(2.0 * math.log2(lr / _GRID))
    return k if grid_rate(k) == lr else None


def _best(seen: Mapping[_Rate, Score]) -> _Rate:
    """The rate, or its index, with the best score; ties go to the lower one."""
    return min(seen, key=lambda k: (seen[k], k))


def _is_lost(seen: Mapping[_Rate, Score]) -> bool:
    return all(math.isinf(score.mean) for score in seen.values())
