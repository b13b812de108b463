"""How often a ladder's intervals cover the truth: 24 simulated truths, on a path and on a grid, both estimators.

    OMP_NUM_THREADS=1 python benchmarks/ladder_calibration.py --out results/ladder-calibration.json

Required: the smooth estimator's nominal 95 % intervals cover at least 0.90 for the worst truth at the top rung, 3.5 ×
and 10 × beyond it, and so do those of the change of the gap over the ladder. Six of the truths are fresh: they were
written down after its scales were set. The other designs, and the forecasts of a held-out top rung, show where the
intervals fail.
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
from normlab.ladders.statistics.priors import priors_in_words
from normlab.ladders.statistics.simulated.calibration import (
    ESTIMATORS,
    Case,
    Coverage,
    measure,
    required_cases,
    within_priors,
    worst,
)
from normlab.ladders.statistics.simulated.ladders import (
    CLEAN,
    EARLY,
    EARLY_AND_STRONG,
    EARLY_ON_A_PATH,
    LATE,
    MIDDLE,
    NOISY,
    SMALL,
    UNTUNED,
    USUAL,
    simulated_grid,
    simulated_path,
)
from normlab.ladders.statistics.simulated.truths import FRESH_TRUTHS, TRUTHS
from normlab.utils.files import write_json
from normlab.utils.records import to_plain

REQUIRED = 0.90
TRUTH_SETS = {"known": TRUTHS, "fresh": FRESH_TRUTHS}
"""The smooth estimator's scales were set with the known truths in sight; the fresh ones show what that flatters."""


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
    started, facts = time.process_time(), dated()
    rows: list[Coverage] = []
    summary: list[dict[str, Any]] = []
    for case, estimator, kind, repeats in _measurements(arguments):
        truths = within_priors(case, TRUTH_SETS[kind])
        found = measure(case, truths, repeats, estimator, arguments.level)
        rows += found
        summary.append({**_summary(case, estimator, found), "repeats": repeats, "truths": len(truths), "kind": kind})
        print(_line(summary[-1]), flush=True)
    passed = all(own["passed"] for own in summary if own["required"])
    print("required:", "passed" if passed else "FAILED")
    if arguments.out:
        record = {
            **facts, "numpy": np.__version__, "cpu_seconds": round(time.process_time() - started),
            "level": arguments.level, "required": REQUIRED, "passed": passed, "noise": to_plain(USUAL),
            "priors": priors_in_words(), "summary": summary, "rows": to_plain(rows),
        }  # fmt: skip
        write_json(arguments.out, record)


def _measurements(arguments: Arguments) -> list[tuple[Case, str, str, int]]:
    """Case, estimator, set of truths and repeats."""
    required = [(case, arguments.repeats) for case in required_cases()]
    others = [(case, arguments.other_repeats) for case in other_cases()] if arguments.other_repeats else []
    known = [(case, estimator, "known", repeats) for case, repeats in (*required, *others) for estimator in ESTIMATORS]
    return known + [(case, "smooth", "fresh", repeats) for case, repeats in required]


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
        Case(name="path: one cell in ten untuned", ladder=path, noise=UNTUNED),
        Case(name="path: forecast of rung 5 from 4", ladder=path, held_out=1),
        Case(name="grid: noisy", ladder=grid, noise=NOISY),
        Case(name="grid: one cell in ten untuned", ladder=grid, noise=UNTUNED),
        Case(name="grid: branches correlated 0.5, not 0.75", ladder=grid, noise=replace(USUAL, branch=0.5)),
        Case(name="grid: branches correlated 0.9, not 0.75", ladder=grid, noise=replace(USUAL, branch=0.9)),
        Case(name="path: short runs scatter more", ladder=path, noise=EARLY_ON_A_PATH),
        Case(name="grid: short runs scatter much more", ladder=grid, noise=EARLY_AND_STRONG),
        Case(name="grid: middle runs scatter more", ladder=grid, noise=MIDDLE),
        Case(name="grid: small models scatter more", ladder=grid, noise=SMALL),
        Case(name="grid: long runs scatter more", ladder=grid, noise=LATE),
        Case(name="grid: forecast of 12x768 from three sizes", ladder=grid, held_out=3),
        Case(name="grid: the same, short runs scatter more", ladder=grid, noise=EARLY, held_out=3),
    ]


def _summary(case: Case, estimator: str, found: Sequence[Coverage]) -> dict[str, Any]:
    lowest = worst(found)
    required = case.is_required and estimator == "smooth"
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
    return f"{summary['case']} | {summary['estimator']}, {summary['kind']} truths | worst: {'; '.join(places)}"


if __name__ == "__main__":
    main(tyro.cli(Arguments))
