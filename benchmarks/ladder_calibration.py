"""How often a ladder's intervals cover the truth: eighteen simulated truths, on a path and on a grid, M and K.

    OMP_NUM_THREADS=1 python benchmarks/ladder_calibration.py --out results/ladder-calibration.json

Required: M's nominal 95 % intervals cover at least 0.90 for the worst truth at the top rung, 3.5 × and 10 × beyond it,
and so do those of the change of the gap over the ladder.
The other designs, and the forecasts of a held-out top rung, are printed to show where the intervals fail.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from normlab.bench.facts import dated
from normlab.ladders.statistics.calibration import Case, Coverage, measure, required_cases, within_priors, worst
from normlab.ladders.statistics.priors import priors_in_words
from normlab.ladders.statistics.simulation import (
    CLEAN,
    FRESH_TRUTHS,
    NOISY,
    TRUTHS,
    USUAL,
    simulated_grid,
    simulated_path,
)
from normlab.utils.files import write_json
from normlab.utils.records import to_plain

REQUIRED = 0.90


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to measure."""

    repeats: int = 1000
    level: float = 0.95
    other_repeats: int = 300
    """For other designs, other noise and forecasts; 0 leaves them out."""
    out: Path | None = None


def main(arguments: Arguments) -> None:
    """Measure, print and store."""
    started, facts = time.perf_counter(), dated()
    cases = [*required_cases(), *(other_cases() if arguments.other_repeats else [])]
    rows: list[Coverage] = []
    summary: list[dict[str, Any]] = []
    for case in cases:
        for estimator in ("M", "K"):
            repeats = arguments.repeats if case.is_required else arguments.other_repeats
            truths = within_priors(case, TRUTHS)
            found = measure(case, truths, repeats, estimator, arguments.level)
            rows += found
            summary.append({**_summary(case, estimator, found), "repeats": repeats, "truths": len(truths)})
            print(_line(summary[-1]), flush=True)
    fresh = [_fresh(case, arguments) for case in required_cases()]
    record = {
        **facts, "numpy": np.__version__, "seconds": round(time.perf_counter() - started),
        "level": arguments.level, "required": REQUIRED,
        "passed": all(own["passed"] for own in summary if own["required"]),
        "fresh": [own for one in fresh for own in one], "noise": to_plain(USUAL), "priors": priors_in_words(), "summary": summary, "rows": to_plain(rows),
    }  # fmt: skip
    print("required:", "passed" if record["passed"] else "FAILED")
    if arguments.out:
        write_json(arguments.out, record)


def _fresh(case: Case, arguments: Arguments) -> list[dict[str, Any]]:
    """M on truths that were written down after its scales were set: what the required truths may flatter."""
    found = measure(case, FRESH_TRUTHS, arguments.repeats, "M", arguments.level)
    print("fresh truths:", _line(_summary(case, "M", found)), flush=True)
    return to_plain(found)


def other_cases() -> list[Case]:
    """Other numbers of rungs and seeds, other noise than assumed, and forecasts of a top rung that is held out."""
    path, grid, beyond = simulated_path(), simulated_grid(), ("1x", "3.5x", "10x", "100x")
    return [
        Case(name="path: 5 rungs, 3 seeds, to 100 ×", ladder=path, places=beyond),
        Case(name="path: 4 rungs, 3 seeds", ladder=simulated_path(4)),
        Case(name="path: 6 rungs, 3 seeds", ladder=simulated_path(6)),
        Case(name="path: 5 rungs, 2 seeds", ladder=path, seeds=2),
        Case(name="path: 5 rungs, 3 seeds, clean", ladder=path, noise=CLEAN),
        Case(name="path: 5 rungs, 3 seeds, noisy", ladder=path, noise=NOISY),
        Case(name="path: forecast of rung 5 from 4", ladder=path, held_out=1),
        Case(name="grid: 2 seeds at the largest size", ladder=grid, top_seeds=2),
        Case(name="grid: noisy", ladder=grid, noise=NOISY),
        Case(name="grid: branches correlated 0.5, not 0.75", ladder=grid, noise=replace(USUAL, branch=0.5)),
        Case(name="grid: branches correlated 0.9, not 0.75", ladder=grid, noise=replace(USUAL, branch=0.9)),
        Case(name="grid: forecast of 12x768 from three sizes", ladder=grid, held_out=3),
    ]


def _summary(case: Case, estimator: str, found: Sequence[Coverage]) -> dict[str, Any]:
    lowest = worst(found)
    required = case.is_required and estimator == "M"
    return {
        "case": case.name,
        "estimator": estimator,
        "required": required,
        "passed": min(own.coverage for own in lowest.values()) >= REQUIRED,
        "worst": {place: {"coverage": own.coverage, "truth": own.truth} for place, own in lowest.items()},
        "mean_width": {place: float(np.mean([own.width for own in found if own.place == place])) for place in lowest},
    }


def _line(summary: dict[str, Any]) -> str:
    places = [
        f"{place} {own['coverage']:.3f} ({own['truth']}), width {summary['mean_width'][place]:.3f}"
        for place, own in summary["worst"].items()
    ]
    return f"{summary['case']} | {summary['estimator']} | worst: {'; '.join(places)}"


if __name__ == "__main__":
    main(tyro.cli(Arguments))
