"""How many more seeds at every cell would decide a question about a gap or a trend, if means and scatter stay."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from normlab.compare.statistics import POWER
from normlab.ladders.rows import LadderRow
from normlab.ladders.statistics.answer import Interval, Place, Trend
from normlab.ladders.statistics.baseline import MeanLoss
from normlab.ladders.statistics.cells import cells_of, mean_losses
from normlab.ladders.statistics.estimators.fit import Sample, estimate, sample_of
from normlab.ladders.statistics.estimators.noise import ASSUMED_RUNG_SD, SMALLEST_SD
from normlab.ladders.statistics.trend import find_trend


@dataclass(frozen=True)
class GapFit:
    """The gap of one scheme to the baseline: intervals and trends by the smooth estimator, for any number of seeds."""

    sample: Sample
    places: Sequence[Place]
    """Of the cells that are part of the fit."""
    baseline: Sequence[MeanLoss]
    level: float

    @classmethod
    def of(cls, rows: Sequence[LadderRow], scheme: str, baseline: str, level: float) -> GapFit:
        """From rows with at least one cell that both have trained at."""
        cells = cells_of(rows, scheme, baseline)
        places = [cell.place for cell in cells if cell.is_usable]
        return cls(sample_of(cells), places, mean_losses(rows, baseline), level)

    def gaps(self, places: Sequence[Place]) -> list[Interval]:
        return [own.interval(self.level) for own in estimate(self.sample, places)]

    def trend(self) -> Trend:
        return find_trend(self.sample, self.places, self.baseline, self.level)

    def at_seeds(self, seeds: np.ndarray) -> GapFit:
        """The same means with another number of seeds at every cell, which need not be a whole one."""
        return replace(self, sample=replace(self.sample, seeds=seeds))


def seeds_to_decide(fit: GapFit, is_decided: Callable[[GapFit], bool], most: int) -> float:
    """More seeds at every cell with which the question is decided four times out of five; infinite: over `most`.

    It is decided half of the time where intervals around today's estimates decide it, and four times out of five where
    intervals do that are wider by 0.84 standard errors of the seeds: those of fewer seeds. What all seeds of a cell
    share is part of the interval, but does not scatter anew, so that it must be made up for by even fewer.
    """
    normal = NormalDist()
    beyond = normal.inv_cdf(POWER) / normal.inv_cdf((1.0 + fit.level) / 2.0)
    # Seeds without any scatter: what they share is all that is left.
    variance = np.maximum(fit.sample.noise.sds(fit.sample.tokens) ** 2, SMALLEST_SD**2)

    def decides(more: int) -> bool:
        seeds = fit.sample.seeds + more
        shared = ASSUMED_RUNG_SD**2 * seeds / variance
        return is_decided(fit.at_seeds(seeds / ((np.sqrt(1.0 + shared) + beyond) ** 2 - shared)))

    # More seeds decide more, so that the numbers can be halved.
    found = bisect.bisect_left(range(1, most + 1), True, key=decides) + 1
    return found if found <= most else math.inf
