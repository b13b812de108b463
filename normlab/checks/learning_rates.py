"""Learning-rate sweep: over how many decades of the learning rate a design learns, and where it stops learning.

    ℓ(η)       mean loss of the last 8 of 60 steps; that of step 0, ℓ₀, for a run that broke or rose above 20
    ℓ_ref      lowest ℓ(η) of all candidates: a design measured against its own best looks robust if its best is poor
    usable     ℓ(η) ≤ ℓ_ref + ¼ (ℓ₀ − ℓ_ref) and below ℓ₀; the width of the longest such range is what to compare
    sens       mean over the rates of min(ℓ(η), ℓ₀) − ℓ_ref
    lr_max     largest rate with ℓ(η) < ℓ₀, refined by three bisections

All runs of all candidates see the same batches from the same seed. A lone target gets a Pre-Norm twin of its size.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from normlab.checks.burst import train
from normlab.checks.config import CheckConfig
from normlab.checks.ladder_records import RateLadder, Twin
from normlab.checks.ladders import Budget, Tell
from normlab.probes.profile import Number
from normlab.targets.target import Target

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
STEPS = 60
LAST = 8
HIGHEST = 20.0
BISECTIONS = 3


@dataclass(frozen=True)
class _Runs:
    """Losses of one design at the rates tried."""

    losses: list[Number]
    start: float
    left_out: list[float]


def rate_ladder(
    target: Target, config: CheckConfig, tell: Tell, *, depth: int
) -> tuple[RateLadder | None, tuple[str, ...]]:
    """The ladder at one depth, and notes on what was left out; no ladder if the first step already breaks."""
    runs = _run(target, config, tell, depth)
    if not math.isfinite(runs.start):
        return None, ("no learning-rate ladder: the loss of the first step is not finite",)
    twin, reference, words = _reference(target, runs, config, tell, depth)
    rates = RATES[: len(runs.losses)]
    ladder = RateLadder(
        depth=depth,
        steps=STEPS,
        rates=rates,
        losses=tuple(runs.losses),
        start=runs.start,
        twin=twin,
        **_judged(rates, runs.losses, runs.start, reference),
        reference=reference,
        reference_from=words,
        lr_max=_largest_rate(target, runs, depth, tell),
    )
    cut = ", ".join(f"{rate:g}" for rate in runs.left_out)
    notes = (f"learning rates {cut} left out to stay within {config.max_seconds:g} s",) if cut else ()
    return ladder, notes


def with_reference(ladder: RateLadder, reference: float, words: str) -> RateLadder:
    """The ladder with another reference loss: designs that are compared share the lowest."""
    judged = _judged(ladder.rates, ladder.losses, ladder.start, reference)
    return dataclasses.replace(ladder, reference=reference, reference_from=words, **judged)


def final_loss(losses: Sequence[Number]) -> Number:
    """Final loss ℓ: the mean of the last losses; None if the run ended early."""
    known = [loss for loss in losses if loss is not None and loss <= HIGHEST]
    if len(known) < len(losses) or not known:
        return None
    return sum(known[-LAST:]) / len(known[-LAST:])


def _run(target: Target, config: CheckConfig, tell: Tell, depth: int) -> _Runs:
    budget, losses, start = Budget(config.max_seconds), [], math.nan
    for rate in RATES:
        if losses and not budget.fits(1.0):
            break
        tell(f"{target.name} at rate {rate:g}")
        began = time.perf_counter()
        curve = train(target, depth=depth, steps=STEPS, lr=rate, highest=HIGHEST)
        budget.paid(1.0, time.perf_counter() - began)
        start = curve[0] if curve[0] is not None else math.nan
        losses.append(final_loss(curve))
    return _Runs(losses, start, list(RATES[len(losses) :]))


def _reference(
    target: Target, runs: _Runs, config: CheckConfig, tell: Tell, depth: int
) -> tuple[Twin | None, float, str]:
    if config.reference_loss is not None:
        return None, config.reference_loss, "given"
    own = min((loss for loss in runs.losses if loss is not None), default=runs.start)
    other = target.twin()
    if other is None:
        return None, own, f"{target.name} itself: no twin can be built for its task"
    if other.name == target.name:
        return None, own, f"{target.name} itself"
    twin = Twin(name=other.name, losses=tuple(_run(other, config, tell, depth).losses))
    best = min((loss for loss in twin.losses if loss is not None), default=math.inf)
    return twin, min(own, best), target.name if own <= best else f"{twin.name}, its twin"


def _judged(rates: Sequence[float], losses: Sequence[Number], start: float, reference: float) -> dict[str, Any]:
    counted = [start if loss is None else loss for loss in losses]
    limit = reference + 0.25 * (start - reference)
    # If no candidate learns, the reference is ℓ₀ itself: a rate that does not get below it is unusable.
    span = _longest([loss <= limit and loss < start for loss in counted])
    usable = None if span is None else (rates[span[0]], rates[span[1]])
    return {
        "usable": usable,
        "decades": 0.0 if usable is None else math.log10(usable[1] / usable[0]),
        "sens": sum(min(loss, start) - reference for loss in counted) / len(counted),
    }


def _longest(marks: Sequence[bool]) -> tuple[int, int] | None:
    """First and last place of the longest run of marks; of equal ones the first."""
    best: tuple[int, int] | None = None
    first = None
    for place, mark in enumerate([*marks, False]):
        if mark and first is None:
            first = place
        if not mark and first is not None:
            if best is None or place - first > best[1] - best[0] + 1:
                best = (first, place - 1)
            first = None
    return best


def _largest_rate(target: Target, runs: _Runs, depth: int, tell: Tell) -> float | None:
    fine = [loss is not None and loss < runs.start for loss in runs.losses]
    if not any(fine):
        return None
    top = max(place for place, mark in enumerate(fine) if mark)
    if top + 1 == len(fine):
        return RATES[top]
    low, high = RATES[top], RATES[top + 1]
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        tell(f"{target.name} at rate {middle:.3g}")
        loss = final_loss(train(target, depth=depth, steps=STEPS, lr=middle, highest=HIGHEST))
        low, high = (middle, high) if loss is not None and loss < runs.start else (low, middle)
    return low
