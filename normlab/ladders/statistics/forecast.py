"""Forecasts of cells that are not trained yet, and whether stored ones came true."""

from __future__ import annotations

from collections.abc import Sequence

from normlab.compare.statistics import bonferroni_level
from normlab.errors import NormLabError
from normlab.ladders.rows import LadderRow
from normlab.ladders.statistics.answer import CellForecast, HeldOut, Place
from normlab.ladders.statistics.cells import LARGEST_GAP, Cell, cells_of, check_rows, largest_gap
from normlab.ladders.statistics.estimators.fit import estimate, sample_of
from normlab.ladders.statistics.estimators.simple_law import simple_law_prior


def forecast(
    rows: Sequence[LadderRow], *, baseline: str, cells: Sequence[Place], seeds: int, level: float = 0.95
) -> list[CellForecast]:
    """Prediction intervals of the mean paired difference of `seeds` new seeds, by scheme and cell.

    They hold jointly over the schemes and cells with probability `level`: a miss at one of several budgets counts as a
    miss. A scheme without a usable cell has no forecast, and neither has one whose gaps are too large to be fitted.
    """
    check_rows(rows, baseline)
    if seeds < 1:
        raise NormLabError(f"a forecast is of at least one seed, got {seeds}; try 2")
    schemes = [scheme for scheme in dict.fromkeys(row.scheme for row in rows) if scheme != baseline]
    each = bonferroni_level(level, len(schemes) * len(cells) + 1)
    found = []
    for scheme in schemes:
        usable = [cell for cell in cells_of(rows, scheme, baseline) if cell.is_usable]
        if not usable or not cells or largest_gap(usable) >= LARGEST_GAP:
            continue
        sample = sample_of(usable)
        smooth = estimate(sample, cells, new_seeds=seeds)
        simple = estimate(sample, cells, prior_of=simple_law_prior, new_seeds=seeds)
        found += [
            CellForecast(scheme=scheme, place=place, seeds=seeds, gap=m.interval(each), simple_law=k.interval(each))
            for place, m, k in zip(cells, smooth, simple, strict=True)
        ]
    return found


def compare_with_forecast(scheme: str, cells: Sequence[Cell], forecasts: Sequence[CellForecast]) -> list[HeldOut]:
    """Hit or miss of each forecast of a scheme; neither where its runs are missing or unreliable.

    A forecast is of the mean of so many seeds: fewer scatter more, and are not judged by it.
    """
    measured = {(cell.place.size, cell.tokens): cell for cell in cells}
    found = []
    for own in forecasts:
        if own.scheme != scheme:
            continue
        cell = measured.get((own.place.size, own.place.tokens))
        is_complete = cell is not None and cell.is_usable and len(cell.differences) >= own.seeds
        mean = cell.mean if cell is not None and is_complete else None
        found.append(
            HeldOut(
                scheme=scheme, place=own.place, seeds=own.seeds, forecast=own.gap, simple_law=own.simple_law,
                measured=mean,
                is_hit=None if mean is None else own.gap.low <= mean <= own.gap.high,
                is_simple_law_hit=None if mean is None else own.simple_law.low <= mean <= own.simple_law.high,
            )
        )  # fmt: skip
    return found
