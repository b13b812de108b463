"""answer(): from the rows of a ladder to gaps, trends, projections and verdicts for every scheme."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from normlab import __version__
from normlab.compare.statistics import bonferroni_level, paired_difference
from normlab.errors import NormLabError
from normlab.ladders.rows import LadderRow
from normlab.ladders.statistics.answer import (
    FEW_STEPS,
    CellForecast,
    CellGap,
    Identified,
    Interval,
    LadderAnswer,
    Place,
    SchemeAnswer,
)
from normlab.ladders.statistics.baseline import fit_baseline, slopes_at
from normlab.ladders.statistics.cautions import find_cautions
from normlab.ladders.statistics.cells import (
    LARGEST_GAP,
    Cell,
    MeanLoss,
    cells_of,
    check_rows,
    largest_gap,
    mean_losses,
)
from normlab.ladders.statistics.design import effects_of_more_runs, seeds_for_sign
from normlab.ladders.statistics.estimators.fit import Sample, estimate, sample_of, simple_law_weights
from normlab.ladders.statistics.estimators.layout import kind_of
from normlab.ladders.statistics.estimators.mixture import Mixture
from normlab.ladders.statistics.estimators.noise import mean_sd
from normlab.ladders.statistics.forecast import compare_with_forecast
from normlab.ladders.statistics.identified import EdgeRate, identify, not_fitted
from normlab.ladders.statistics.implausible import implausible_losses
from normlab.ladders.statistics.more_seeds import GapFit
from normlab.ladders.statistics.multiplier import multiplier
from normlab.ladders.statistics.priors import priors_in_words
from normlab.ladders.statistics.projection import NEXT_RUNG, TEN_TIMES, project, times_top
from normlab.ladders.statistics.sentence import lost_runs, sentence, sentence_by_cell
from normlab.ladders.statistics.trend import NO_TREND, find_trend

SMALLEST_TIMED = 100e6
"""Parameters from which on speeds count: smaller models are bound by kernel launches."""


def answer(
    rows: Sequence[LadderRow],
    *,
    baseline: str,
    targets: Sequence[Place] = (),
    level: float = 0.95,
    held_out: Sequence[CellForecast] | None = None,
    edge_rates: Sequence[EdgeRate] = (),
    minimum_steps: int = FEW_STEPS,
    epochs: dict[int, float] | None = None,
) -> LadderAnswer:
    """Compare every scheme with the baseline over the whole ladder.

    Args:
        rows: One for each scheme, size, budget and seed. Cells with a run that is not done are named and left out.
        baseline: The scheme that gaps are relative to.
        targets: Places beyond the ladder to project to, besides 3.5 × and 10 × the top.
        level: Joint level of all schemes' intervals at any one cell or place (Bonferroni).
        held_out: Forecasts that were written before their runs began.
        edge_rates: Picked rates at the edge of those tried.
        minimum_steps: Cells with fewer are marked.
        epochs: How often the data was seen, by budget of tokens.
    """
    check_rows(rows, baseline)
    if not 0.0 < level < 1.0:
        raise NormLabError(f"a confidence level lies between 0 and 1, got {level}; try 0.95")
    schemes = [scheme for scheme in dict.fromkeys(row.scheme for row in rows) if scheme != baseline]
    each = bonferroni_level(level, len(schemes) + 1)
    means = mean_losses(rows, baseline)
    comparison = _Comparison(
        baseline, means, targets, each, level, held_out or (), edge_rates, minimum_steps, epochs or {}
    )
    by_scheme = {scheme: cells_of(rows, scheme, baseline) for scheme in schemes}
    answers = [comparison.answer(scheme, cells) for scheme, cells in by_scheme.items()]
    return LadderAnswer(
        baseline=baseline, level=level, level_each=each, kind=kind_of(means) if len(means) > 1 else "too small",
        schemes=answers, baseline_law=fit_baseline(means, level),
        cautions=[
            *find_cautions(by_scheme, answers, minimum_steps, each), *implausible_losses(rows, minimum_steps)
        ],
        priors=priors_in_words(),
        versions=_versions(),
    )  # fmt: skip


def no_answer(baseline: str, level: float) -> LadderAnswer:
    """The answer of a ladder whose baseline has no ended run yet."""
    return LadderAnswer(
        baseline=baseline, level=level, level_each=level, kind="too small", schemes=[], baseline_law=None,
        cautions=[f"No run of {baseline} that counts has ended yet."], priors=priors_in_words(), versions=_versions(),
    )  # fmt: skip


def _versions() -> dict[str, str]:
    return {"normlab": __version__, "numpy": np.__version__, "python": platform.python_version()}


@dataclass(frozen=True)
class _Comparison:
    """Compares one scheme after the other with the baseline; holds what they share."""

    baseline: str
    means: Sequence[MeanLoss]
    targets: Sequence[Place]
    level: float
    """Of each interval."""
    joint_level: float
    held_out: Sequence[CellForecast]
    edges: Sequence[EdgeRate]
    minimum_steps: int
    epochs: Mapping[int, float]

    def answer(self, scheme: str, cells: Sequence[Cell]) -> SchemeAnswer:
        usable = [cell.place for cell in cells if cell.is_usable]
        if not usable:
            return self._without_fit(scheme, cells, not_fitted("no cell is usable"))
        largest = largest_gap(cells)
        if largest >= LARGEST_GAP:
            text = f"gaps of up to {largest:.2f} nats are too large for the assumptions of a trend or a forecast"
            return self._without_fit(scheme, cells, not_fitted(text, "gap too large"))
        held_out = compare_with_forecast(scheme, cells, self.held_out)
        sample = sample_of(cells)
        top = max(usable, key=lambda place: place.flops)
        trend = find_trend(sample, usable, self.means, self.level)
        multiples = [times_top(usable, times) for times in (NEXT_RUNG, TEN_TIMES)]
        beyond = project(sample, top, [*multiples, *self.targets], self.means, self.level)
        # Without a target, 10 × the top is one; beside targets it is judged as well, since its number is shown.
        far, targets = beyond[1:], beyond[len(multiples) :]
        judged = targets or far
        edges = [edge for edge in self.edges if edge.scheme in (scheme, self.baseline)]
        nearest = min((own.place for own in judged), key=lambda place: place.flops)
        identified = identify(sample, far, judged, self.means, held_out, edges)
        families, axes = simple_law_weights(sample)
        gaps = self._gaps(cells, sample)
        at_top = next(gap for gap in gaps if gap.is_usable and gap.cell == top.cell)
        return SchemeAnswer(
            scheme=scheme, cells=gaps, trend=trend, projections=beyond, identified=identified, form_weights=families,
            axis_weights=axes, held_out=held_out,
            sentence=sentence(
                scheme, self.baseline, at_top, trend, beyond, judged, identified, self.joint_level,
                lost_runs(cells, top.flops),
            ),
            what_more=effects_of_more_runs(sample, usable, nearest, self.level),
            seeds_for_sign=seeds_for_sign(GapFit(sample, usable, self.means, self.level), top),
        )  # fmt: skip

    def _without_fit(self, scheme: str, cells: Sequence[Cell], why: Identified) -> SchemeAnswer:
        """Each cell by itself: Student's intervals of its seeds."""
        gaps = [self._gap(cell, None, None, None) for cell in cells]
        top = max((cell.flops for cell in cells if cell.is_usable), default=math.inf)
        return SchemeAnswer(
            scheme=scheme, cells=gaps, trend=NO_TREND, projections=[], identified=why, form_weights={},
            axis_weights={}, what_more=[],
            held_out=compare_with_forecast(scheme, cells, self.held_out),
            sentence=sentence_by_cell(scheme, self.baseline, gaps, why, self.joint_level, lost_runs(cells, top)),
        )  # fmt: skip

    def _gaps(self, cells: Sequence[Cell], sample: Sample) -> list[CellGap]:
        """All cells; the smooth estimator is evaluated at those left out as well, from the others."""
        found, slopes = estimate(sample, cells), slopes_at(self.means, cells)
        nodes = slopes.nodes if slopes is not None else [None] * len(cells)
        return [self._gap(cell, own, at, sample) for cell, own, at in zip(cells, found, nodes, strict=True)]

    def _gap(self, cell: Cell, gap: Mixture | None, slopes: np.ndarray | None, sample: Sample | None) -> CellGap:
        place, in_flops, in_time, off, sd = cell.place, None, None, None, None
        if gap is not None and slopes is not None:
            in_flops = multiplier(gap, slopes, self.level, cell.flops_ratio)
            if cell.speed_ratio is not None and place.parameters >= SMALLEST_TIMED:
                in_time = multiplier(gap, slopes, self.level, cell.speed_ratio)
        if gap is not None and sample is not None and cell.is_usable:
            sd = float(sample.noise.sds(np.array(cell.tokens)))
            off = abs(cell.mean - gap.mean) / mean_sd(sd, len(cell.differences))
        return CellGap(
            size=place.size, parameters=place.parameters, tokens=place.tokens, flops=place.flops,
            tokens_per_parameter=place.tokens_per_parameter, steps=place.steps, n=len(cell.differences),
            differences={str(seed): value for seed, value in cell.differences.items()},
            student=_student(cell, self.level), gap=gap.interval(self.level) if gap is not None else None,
            multiplier=in_flops, multiplier_in_time=in_time,
            few_steps=place.steps is not None and place.steps < self.minimum_steps, is_usable=cell.is_usable,
            reason=cell.reason, epochs=self.epochs.get(place.tokens), seed_sd=sd, off_sd=off,
        )  # fmt: skip


def _student(cell: Cell, level: float) -> Interval | None:
    if len(cell.differences) < 2:
        return None
    found = paired_difference(cell.differences, dict.fromkeys(cell.differences, 0.0), level)
    if found.low is None or found.high is None:
        return None
    return Interval(found.low, found.high, found.mean, level)
