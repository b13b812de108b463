"""Fit exponents over width or depth to the traces of all seeds, and judge them against a threshold.

An exponent is fitted for each seed over all sizes, by least squares in logarithms. Their mean has Student's t interval
over the seeds. The interval is of chance alone: where the values are no power law, it does not say so, the plot does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from normlab.checks.coordinates.records import Finding, Point, Trend, steepest
from normlab.numerics.power_law import Fit, mean_fit, power_law
from normlab.probes.profile import Number


def trend(module: str, points: Sequence[Point], threshold: float) -> Trend:
    """Exponents of one module, with a finding on each."""
    start, first, last = (_exponent(points, read) for read in (_start, _first, _last))
    relative = _exponent(points, _relative(_first if steepest(first, last) is first else _last))
    size = judge(start, [_start(point) for point in points], threshold)
    change = judge(steepest(first, last), [x for point in points for x in point.changes], threshold)
    if _is_excused(change, size, steepest(first, last), relative, threshold):
        change = "as its size"
    return Trend(
        module=module, points=tuple(points), start=start, first=first, last=last, size=size, change=change,
        relative=relative,
    )  # fmt: skip


def _is_excused(change: Finding, size: Finding, fit: Fit | None, relative: Fit | None, threshold: float) -> bool:
    """Whether a change that shrinks, or may shrink, does so no faster than the output itself."""
    if relative is None or fit is None or judge(relative, (), threshold) == "shrinks":
        return False
    may_shrink = change == "unclear" and size == "shrinks" and fit.high is not None and fit.high <= threshold
    return change == "shrinks" or may_shrink


def judge(fit: Fit | None, values: Iterable[Number], threshold: float) -> Finding:
    """The finding on a fitted exponent."""
    if any(value is None for value in values):
        return "not finite"
    if fit is None:
        return "constant"
    # One seed has no interval: the exponent counts as it is.
    low, high = (fit.exponent if end is None else end for end in (fit.low, fit.high))
    if low > threshold:
        return "grows"
    if high < -threshold:
        return "shrinks"
    return "flat" if -threshold <= low and high <= threshold else "unclear"


def _exponent(points: Sequence[Point], read: Callable[[Point], Number]) -> Fit | None:
    """The mean exponent over seeds; None if a value is zero or not finite."""
    if not all(read(point) for point in points):
        return None
    by_seed: dict[int, list[Point]] = {}
    for point in points:
        by_seed.setdefault(point.seed, []).append(point)
    return mean_fit([power_law([p.size for p in own], [read(p) or 0.0 for p in own]) for own in by_seed.values()])


def _start(point: Point) -> Number:
    return point.sizes[0]


def _first(point: Point) -> Number:
    return point.changes[0]


def _last(point: Point) -> Number:
    return point.changes[-1]


def _relative(change: Callable[[Point], Number]) -> Callable[[Point], Number]:
    def read(point: Point) -> Number:
        start, moved = _start(point), change(point)
        return moved / start if start and moved else None

    return read
