"""The time at which the page of a simulation opens: where the schemes differ, instead of their common start."""

from __future__ import annotations

import math
from collections.abc import Sequence

from normlab.dynamics.result import Simulation

_NEARLY = 0.95
"""The first moment with this share of the largest difference: what comes later looks no more different."""


def opening_look(simulation: Simulation) -> int:
    """Index of the recorded time to open at.

    Several runs: where their mean cosines lie farthest apart. One run: halfway through the change of its own. The
    middle, if there is nothing to go by.
    """
    apart = _apart(simulation)
    most = max(apart, default=0.0)
    if most <= 0.0:
        return len(simulation.runs[0].times) // 2
    return next(look for look, value in enumerate(apart) if value >= _NEARLY * most)


def opening_words(simulation: Simulation) -> str:
    """What the page shows when it opens."""
    if max(_apart(simulation), default=0.0) <= 0.0:
        return "Shown: the middle of the run."
    if len(simulation.runs) > 1:
        return "Shown: where the schemes differ most. Play shows how they get there."
    return "Shown: halfway through the change. Play shows all of it."


def _apart(simulation: Simulation) -> list[float]:
    series = [run.bands["cosine"].mean for run in simulation.runs if "cosine" in run.bands]
    return _spread(series, len(simulation.runs[0].times)) if len(series) > 1 else _half(series)


def _spread(series: Sequence[Sequence[float]], looks: int) -> list[float]:
    """Difference of the largest and the smallest value at every time; 0 where one is not finite."""
    at_each = [[values[look] for values in series] for look in range(looks)]
    return [max(values) - min(values) if all(map(math.isfinite, values)) else 0.0 for values in at_each]


def _half(series: Sequence[Sequence[float]]) -> list[float]:
    """How far each value is on its way to the middle between the first and the last; no farther than there."""
    if not series or not math.isfinite(series[0][0]) or not math.isfinite(series[0][-1]):
        return []
    first, way = series[0][0], series[0][-1] - series[0][0]
    return [min(0.5, (value - first) / way) if way and math.isfinite(value) else 0.0 for value in series[0]]
