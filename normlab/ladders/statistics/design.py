"""What a design can show before it is trained, and what more runs would gain: widths of intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from normlab.errors import NormLabError
from normlab.ladders.statistics.answer import Design, ExpectedWidth, MoreRuns, Place
from normlab.ladders.statistics.estimators.fit import NewCell, Sample, estimate, estimate_with_more
from normlab.ladders.statistics.estimators.layout import SAME, Side, unvaried
from normlab.ladders.statistics.estimators.mixture import Mixture
from normlab.ladders.statistics.estimators.noise import ASSUMED_DF, SeedNoise, effective_df
from normlab.ladders.statistics.more_seeds import GapFit, seeds_to_decide
from normlab.ladders.statistics.projection import NEXT_RUNG, TEN_TIMES, times_top
from normlab.pages.numbers import format_count

MORE_SEEDS = 2
MOST_SEEDS = 100
"""More seeds than these at every cell are not looked for."""
_SIDES: dict[Side, Callable[[Place], int]] = {
    "size": lambda place: place.parameters,
    "tokens": lambda place: place.tokens,
}


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
    """What more seeds, and new cells on the way to the target, would gain there."""
    now = _width(estimate(sample, [target])[0], level)
    options = [(f"{MORE_SEEDS} more seeds at every cell", [], MORE_SEEDS)]
    options += [(what, cells, 0) for what, cells in extensions(sample, places, target)]
    return [
        MoreRuns(what=what, place=target, width_now=now,
                 width_then=_width(estimate_with_more(sample, target, cells, seeds), level))
        for what, cells, seeds in options
    ]  # fmt: skip


def seeds_for_sign(fit: GapFit, top: Place) -> int | None:
    """More seeds at every cell with which the sign at the top would show four times out of five, if means stay.

    None if it shows already, or if `MOST_SEEDS` would not do.
    """

    def is_shown(own: GapFit) -> bool:
        return not own.gaps([top])[0].spans_zero

    found = math.inf if is_shown(fit) else seeds_to_decide(fit, is_shown, MOST_SEEDS)
    return int(found) if math.isfinite(found) else None


def extensions(sample: Sample, places: Sequence[Place], target: Place) -> list[tuple[str, list[NewCell]]]:
    """New cells by the ladder's own step, never beyond the target: one more rung of a path, or a side of a grid."""
    if sample.kind == "grid" or unvaried(places):
        steps: dict[Side, float] = {
            side: _step([of(place) for place in places], of(target)) for side, of in _SIDES.items()
        }
        return [_one_more(sample, places, side, step) for side, step in steps.items() if step > SAME]
    step = _step([place.flops for place in places], target.flops)
    rung = NewCell(times_top(places, step), int(sample.groups.max()) + 1, _usual_seeds(sample))
    return [(f"one more rung at {step:.3g} × the top's compute", [rung])] if step > SAME else []


def _step(values: Sequence[float], target: float) -> float:
    """The factor to the next value: the ladder's last step, or less where the target is nearer."""
    known = sorted(set(values))
    own = known[-1] / known[-2] if len(known) > 1 else NEXT_RUNG
    return min(own, target / known[-1])


def _one_more(sample: Sample, places: Sequence[Place], side: Side, step: float) -> tuple[str, list[NewCell]]:
    """One more size at all budgets of the largest one, or one more budget at all sizes that have the longest one."""
    of, fresh = _SIDES[side], int(sample.groups.max()) + 1
    largest = max(of(place) for place in places)
    edge = [(place, int(own)) for place, own in zip(places, sample.groups, strict=True) if of(place) == largest]
    if len(set(sample.groups.tolist())) == len(sample.groups):
        groups = [fresh + index for index in range(len(edge))]
    else:
        # The budgets of one more size branch from a trunk of its own, one more budget from the trunk of its size.
        groups = [fresh if side == "size" else own for _, own in edge]
    grown = [_scaled(place, *((step, 1.0) if side == "size" else (1.0, step))) for place, _ in edge]
    cells = [NewCell(place, group, _usual_seeds(sample)) for place, group in zip(grown, groups, strict=True)]
    count = format_count(of(grown[0]))
    words = {"size": f"size, {count}, at all budgets", "tokens": f"budget, {count} tokens, at all sizes"}
    return f"one more {words[side]}", cells


def _usual_seeds(sample: Sample) -> int:
    return round(float(np.median(sample.seeds)))


def _scaled(place: Place, size: float, tokens: float) -> Place:
    return Place(
        name="", size="", parameters=round(place.parameters * size), tokens=round(place.tokens * tokens),
        flops=place.flops * size * tokens,
    )  # fmt: skip


def _width(gap: Mixture, level: float) -> float:
    found = gap.interval(level).width
    return found if math.isfinite(found) else math.inf
