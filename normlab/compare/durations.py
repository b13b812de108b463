"""Expected duration of runs, estimated from those that ended in the same call (`--whole-runs`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from normlab.compare.plan import PlannedRun

_MARGIN = 1.1
"""A run takes this much longer than the one it is compared with, at most."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Ended:
    """A run that has ended: what it was, and what it took."""

    scheme: str
    shape: Shape
    work: float
    """FLOPs in this call."""
    seconds: float

    def distance(self, scheme: str, shape: Shape, work: float) -> tuple[bool, bool, float]:
        """How unlike this run another one is.

        The amount of work matters within a kind: a short run is mostly evaluation and compilation.
        """
        return self.shape != shape, self.scheme != scheme, abs(math.log(work / self.work))


class RunDurations:
    """What the runs that have ended took, to tell what others will."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._began: dict[str, tuple[float, int]] = {}
        """When each run began in this call, and the step that it went on from."""
        self._ended: list[_Ended] = []
        self._flops: dict[tuple[str, Shape], int] = {}
        """FLOPs of a step: counting them builds the model."""

    def begin(self, run: PlannedRun, step: int = 0) -> None:
        """Record that a run begins, or goes on from a step."""
        self._began[run.name] = (self._clock(), step)

    def end(self, run: PlannedRun, steps: int) -> None:
        """Record a run that has ended after so many steps; one that was stopped early counts up to there."""
        began, first = self._began.pop(run.name, (None, 0))
        work = self._work(run, first, steps)
        if began is not None and work > 0:
            self._ended.append(_Ended(run.scheme, _shape(run), work, self._clock() - began))

    def expected(self, run: PlannedRun, step: int = 0) -> float:
        """Seconds that a run should take from a step on; 0 if no run has ended yet.

        By the pace of the run most like it: of its size, of its scheme, of as much work, and of those the last. The
        first run of a kind also compiles its model, so that the second is expected to take longer than it does.
        """
        work = self._work(run, step, run.config.steps)
        if not self._ended or work <= 0:
            return 0.0
        scheme, shape = run.scheme, _shape(run)
        like = min(reversed(self._ended), key=lambda one: one.distance(scheme, shape, work))
        return _MARGIN * like.seconds * work / like.work

    def _work(self, run: PlannedRun, first: int, last: int) -> float:
        config, kind = run.config, (run.scheme, _shape(run))
        if kind not in self._flops:
            self._flops[kind] = config.batch * config.sequence * config.model.flops_per_token(config.sequence)
        return float(self._flops[kind] * (last - first))


def _shape(run: PlannedRun) -> Shape:
    config = run.config
    return config.model.depth, config.model.dim, config.sequence, config.batch
