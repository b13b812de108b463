"""What a design can show before it is trained, and what more runs would gain: widths of intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from normlab.errors import NormLabError
from normlab.ladders.statistics.answer import Design, ExpectedWidth, MoreRuns, Place
from normlab.ladders.statistics.estimators.fit import Sample, estimate
from normlab.ladders.statistics.estimators.noise import ASSUMED_DF, SeedNoise, effective_df
from normlab.ladders.statistics.projection import NEXT_RUNG, TEN_TIMES, times_top
from normlab.pages.numbers import format_count

MORE_SEEDS = 2


def expected_widths(design: Design, level: float = 0.95) -> list[ExpectedWidth]:
    """Width of the interval at the top rung, 3.5 × and 10 × it and the targets, if the gap were a straight line.

    The best case: a gap that bends has wider intervals.
    """
    if not design.cells or design.seeds < 1:
        raise NormLabError("a design needs at least one cell and one seed; add a Place to cells, or try seeds=3")
    sizes = sorted({place.size for place in design.cells})
    groups = [sizes.index(own.size) if design.is_branched else index for index, own in enumerate(design.cells)]
    top = max(design.cells, key=lambda place: place.flops)
    seeds = [(design.top_seeds if own.size == top.size else None) or design.seeds for own in design.cells]
    noise = SeedNoise(design.seed_sd, max(ASSUMED_DF, effective_df(seeds, groups)))
    sample = Sample(tuple(design.cells), np.zeros(len(groups)), np.array(seeds), np.array(groups), noise)
    places = [top, times_top(design.cells, NEXT_RUNG), times_top(design.cells, TEN_TIMES), *design.targets]
    found = estimate(sample, places)
    return [
        ExpectedWidth(place=place, width=own.interval(level).width) for place, own in zip(places, found, strict=True)
    ]


def effects_of_more_runs(sample: Sample, places: Sequence[Place], target: Place, level: float) -> list[MoreRuns]:
    """What more seeds, one larger size and, on a grid, a longer budget would gain at the target.

    New cells are assumed to come out where the smooth estimator expects them.
    """
    now = _width(sample, target, level)
    options = [(f"{MORE_SEEDS} more seeds at every cell", sample.with_seeds(MORE_SEEDS))]
    for what, more in _extensions(sample, places):
        options.append((what, _extended(sample, more)))
    return [
        MoreRuns(what=what, place=target, width_now=now, width_then=_width(own, target, level)) for what, own in options
    ]


def _extended(sample: Sample, more: Sequence[tuple[Place, int]]) -> Sample:
    means = np.array([own.mean for own in estimate(sample, [place for place, _ in more])])
    seeds = round(float(np.median(sample.seeds)))
    return sample.with_cells([place for place, _ in more], means, seeds, np.array([group for _, group in more]))


def _extensions(sample: Sample, places: Sequence[Place]) -> list[tuple[str, list[tuple[Place, int]]]]:
    """New cells with the number of their trunk."""
    top = max(places, key=lambda place: place.flops)
    fresh = int(sample.groups.max()) + 1
    if sample.kind == "path":
        return [(f"one more rung at {NEXT_RUNG:g} × the top's compute", [(times_top(places, NEXT_RUNG), fresh)])]
    budgets = sorted({place.tokens for place in places})
    is_branched = len(set(sample.groups.tolist())) < len(sample.groups)
    larger = [
        (_scaled(top, NEXT_RUNG, budget / top.tokens), fresh + (0 if is_branched else index))
        for index, budget in enumerate(budgets)
    ]
    found = [(f"one more size, {format_count(top.parameters * NEXT_RUNG)}, at all budgets", larger)]
    at_top = [(place, int(group)) for place, group in zip(places, sample.groups, strict=True)
              if place.tokens == budgets[-1]]  # fmt: skip
    longer = [
        (_scaled(place, 1.0, 2.0), group if is_branched else fresh + index)
        for index, (place, group) in enumerate(at_top)
    ]
    return [*found, (f"one more budget, {format_count(2 * budgets[-1])} tokens, at all sizes", longer)]


def _scaled(place: Place, size: float, tokens: float) -> Place:
    return Place(
        name="", size="", parameters=round(place.parameters * size), tokens=round(place.tokens * tokens),
        flops=place.flops * size * tokens,
    )  # fmt: skip


def _width(sample: Sample, target: Place, level: float) -> float:
    found = estimate(sample, [target])[0].interval(level).width
    return found if math.isfinite(found) else math.inf
