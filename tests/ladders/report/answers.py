"""A made-up answer with the shape of the estimator's: intervals around the means of the rows, not fits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from normlab.ladders.rows import LadderRow
from normlab.ladders.statistics.answer import (
    FEW_STEPS,
    BaselineCell,
    BaselineLaw,
    CellGap,
    Identified,
    Interval,
    LadderAnswer,
    MoreRuns,
    Obstacle,
    Place,
    Projection,
    SchemeAnswer,
    Trend,
    TrendTest,
    Verdict,
)

LEVEL = 0.983
VERDICTS: dict[str, Verdict] = {"peri": "shrinks", "geonorm": "crosses"}


def answer(
    rows: Sequence[LadderRow],
    *,
    baseline: str = "pre",
    targets: bool = True,
    fitted: bool = True,
) -> LadderAnswer:
    """The answer of a ladder; without `fitted` it is too small for a fit."""
    schemes = [name for name in dict.fromkeys(row.scheme for row in rows) if name != baseline]
    budgets = {row.size: {r.tokens for r in rows if r.size == row.size} for row in rows}
    grid = any(len(own) > 1 for own in budgets.values())
    return LadderAnswer(
        baseline=baseline, level=0.95, level_each=LEVEL, kind=("grid" if grid else "path") if fitted else "too small",
        schemes=[_scheme(rows, name, baseline, targets and fitted, fitted) for name in schemes],
        baseline_law=_law(rows, baseline) if fitted else None,
        cautions=["3 of 12 cells have fewer than 3,000 steps."] if grid else [],
        priors={"level of the gap": "normal, sd 0.10 nats", "bend": "0 to 40 · 1e-3 nats an e-fold^1.5"},
        versions={"numpy": "2.5.4"},
    )  # fmt: skip


def _scheme(rows: Sequence[LadderRow], scheme: str, baseline: str, targets: bool, fitted: bool) -> SchemeAnswer:
    cells = [_cell(rows, scheme, baseline, place, fitted) for place in _places(rows, scheme)]
    usable = [cell for cell in cells if cell.is_usable]
    top, bottom = usable[-1], usable[0]
    verdict: Verdict = VERDICTS.get(scheme, "not shown") if fitted else "not shown"
    test = TrendTest(
        axis="compute", bottom=_place(bottom), top=_place(top), verdict=verdict,
        gap_bottom=_around(_mean(bottom), 0.012), gap_top=_around(_mean(top), 0.012),
        change=_around(_mean(top) - _mean(bottom), 0.03), log_multiplier_change=None, margin=0.01,
    ) if fitted else None  # fmt: skip
    projections = [_projection(top, times, name) for times, name in
                   ((3.5, ""), (10.0, ""), (7.1, "16x1024"))] if targets else []  # fmt: skip
    disagree = Obstacle(rule="forms disagree", text="Laws that fit equally well disagree in sign there.")
    reasons = [] if scheme == "peri" else [disagree]
    mean = _mean(top)
    return SchemeAnswer(
        scheme=scheme, cells=cells, trend=Trend(verdict=verdict, compute=test, tokens=None, sizes=None),
        projections=projections, identified=Identified(is_identified=not reasons, reasons=reasons),
        form_weights={"fades or grows": 0.7, "settles": 0.3} if fitted else {},
        axis_weights={"parameters alone": 0.02, "mostly parameters": 0.03, "compute": 0.15, "mostly tokens": 0.3,
                      "tokens alone": 0.5} if fitted else {},
        sentence=f"{scheme}: gap {mean:+.3f} at {top.size}, {top.tokens:,} tokens.",
        what_more=[MoreRuns(what="2 more seeds at every cell", place=projections[0].place, width_now=0.08,
                            width_then=0.06)] if projections else [],
        held_out=[],
    )  # fmt: skip


def _places(rows: Sequence[LadderRow], scheme: str) -> list[tuple[int, int]]:
    return sorted({row.cell for row in rows if row.scheme == scheme})


def _cell(rows: Sequence[LadderRow], scheme: str, baseline: str, place: tuple[int, int], fitted: bool) -> CellGap:
    own = {row.seed: row for row in rows if row.scheme == scheme and row.cell == place}
    base = {row.seed: row for row in rows if row.scheme == baseline and row.cell == place}
    pairs = {
        str(seed): row.loss - other.loss
        for seed, row in own.items()
        if (other := base.get(seed)) and row.loss is not None and other.loss is not None
    }
    first = next(iter(own.values()))
    lost = [row for row in own.values() if not row.is_usable]
    mean = float(np.mean(list(pairs.values()))) if pairs else math.nan
    interval = Interval(mean - 0.012, mean + 0.012, mean, LEVEL)
    times = Interval(math.exp(-8 * (mean + 0.012)), math.exp(-8 * (mean - 0.012)), math.exp(-8 * mean), LEVEL)
    usable = not lost and bool(pairs)
    return CellGap(
        size=first.size, parameters=first.parameters, tokens=first.tokens, flops=first.flops,
        tokens_per_parameter=first.tokens / first.parameters, steps=first.steps, n=len(pairs), differences=pairs,
        student=interval if len(pairs) > 1 else None, gap=interval if fitted and usable else None,
        multiplier=times if fitted and usable else None,
        multiplier_in_time=times if fitted and usable and first.tokens_per_s else None,
        few_steps=first.steps is not None and first.steps < FEW_STEPS, is_usable=usable,
        reason=f"unreliable: seed {lost[0].seed} of {scheme} {lost[0].state}" if lost else None,
    )  # fmt: skip


def _projection(top: CellGap, times: float, size: str) -> Projection:
    mean, spread = _mean(top), 0.02 * math.log(times) + 0.015
    place = Place(
        name=f"{size}, 400M tokens" if size else f"{times:g} × the top", size=size,
        parameters=round(top.parameters * times**0.5), tokens=round(top.tokens * times**0.5), flops=top.flops * times,
    )  # fmt: skip
    return Projection(
        place=place, times_top=times, gap=Interval(mean - spread, mean + spread, mean, LEVEL),
        simple_law=Interval(mean - spread / 3, mean + spread / 3, mean, LEVEL), constant_multiplier=None,
        multiplier=Interval(0.9, 1.3, 1.1, LEVEL), shrinks=0.7, shrinks_simple_law=0.9, is_smoothness=False,
    )  # fmt: skip


def _law(rows: Sequence[LadderRow], baseline: str) -> BaselineLaw:
    cells = []
    for place in _places(rows, baseline):
        own = [row for row in rows if row.scheme == baseline and row.cell == place]
        loss = float(np.mean([row.loss for row in own if row.loss is not None]))
        cells.append(BaselineCell(
            size=own[0].size, parameters=place[0], tokens=place[1], flops=own[0].flops, n=len(own), loss=loss,
            fitted=loss + 0.003, slope=Interval(0.1, 0.14, 0.12, LEVEL),
        ))  # fmt: skip
    return BaselineLaw(
        kind="L(N, D)", text="E + A·N^-α + B·D^-β",
        irreducible=Interval(1.8, 2.4, 2.1, 0.95), residual_sd=0.004, cells=cells,
    )  # fmt: skip


def _place(cell: CellGap) -> Place:
    return Place(name=cell.size, size=cell.size, parameters=cell.parameters, tokens=cell.tokens, flops=cell.flops)


def _around(mean: float, half: float) -> Interval:
    return Interval(mean - half, mean + half, mean, LEVEL)


def _mean(cell: CellGap) -> float:
    return sum(cell.differences.values()) / len(cell.differences)
