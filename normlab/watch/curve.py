"""A loss curve of bounded size: means over as many steps as needed to keep at most a few hundred points."""

from __future__ import annotations

from typing import Any

from normlab.pages.numbers import finite_or_none
from normlab.train.monitor.summary import digits

POINTS = 400
"""Most points of a curve."""


class LossCurve:
    """Mean loss and largest gradient norm of every `every` steps; `every` doubles when there are too many points."""

    def __init__(self, most: int = POINTS):
        self.every, self._most = 1, most
        self._bins: dict[int, _Bin] = {}

    def add(self, step: int, tokens: int | None, loss: Any, grad_norm: Any = None) -> None:
        """Add one step. A loss that is not finite leaves a gap if its bin has no other."""
        place = (step - 1) // self.every
        if place not in self._bins:
            self._bins[place] = _Bin()
        self._bins[place].add(step, tokens, loss, grad_norm)
        while len(self._bins) > self._most:
            self._double()

    def _double(self) -> None:
        self.every *= 2
        halves, self._bins = self._bins, {}
        for place in sorted(halves):
            self._bins.setdefault(place // 2, _Bin()).merge(halves[place])

    def columns(self) -> dict[str, list[float | None]]:
        """The points by column: step and tokens at their end, loss, grad_norm."""
        points = [self._bins[place] for place in sorted(self._bins)]
        return {
            "step": [point.step for point in points],
            "tokens": [point.tokens for point in points],
            "loss": [digits(point.total / point.count) if point.count else None for point in points],
            "grad_norm": [digits(point.grad_norm) for point in points],
        }


class _Bin:
    """Steps that share a point."""

    def __init__(self) -> None:
        self.step, self.tokens = 0, None
        self.total, self.count = 0.0, 0
        self.grad_norm: float | None = None

    def add(self, step: int, tokens: int | None, loss: Any, grad_norm: Any) -> None:
        self.step, self.tokens = max(self.step, step), tokens if step >= self.step else self.tokens
        if (known := finite_or_none(loss)) is not None:
            self.total, self.count = self.total + known, self.count + 1
        self._largest(finite_or_none(grad_norm))

    def merge(self, other: _Bin) -> None:
        self.step, self.tokens = other.step, other.tokens
        self.total, self.count = self.total + other.total, self.count + other.count
        self._largest(other.grad_norm)

    def _largest(self, norm: float | None) -> None:
        if norm is not None:
            self.grad_norm = norm if self.grad_norm is None else max(self.grad_norm, norm)
