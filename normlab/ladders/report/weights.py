"""Bars of weights: which axis drives the gap, and which family of simple laws fits it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from normlab.ladders.report.content import LadderReport
from normlab.ladders.statistics.estimators.simple_law import AXES


@dataclass(frozen=True)
class Segment:
    name: str
    share: float
    """In [0, 1]."""
    tone: int
    """Place of the shade, from 0 to 4."""

    @property
    def percent(self) -> str:
        return f"{100 * self.share:.0f} %"


@dataclass(frozen=True)
class WeightBar:
    """The weights of one scheme as segments of a bar."""

    scheme: str
    place: int
    axis: tuple[Segment, ...]
    forms: tuple[Segment, ...]


def weight_bars(content: LadderReport) -> list[WeightBar]:
    """One bar for each scheme with a fit; a path has one axis and therefore no bar of axes."""
    bars = [
        WeightBar(own.scheme, content.schemes.index(own.scheme), _axis(own.axis_weights), _forms(own.form_weights))
        for own in content.answer.schemes
    ]
    return [bar for bar in bars if bar.axis or bar.forms]


def _axis(weights: Mapping[str, float]) -> tuple[Segment, ...]:
    if len(weights) < 2:
        return ()
    # From size alone to tokens alone.
    order = [name for name in AXES if name in weights] + [name for name in weights if name not in AXES]
    return tuple(Segment(name, weights[name], k % 5) for k, name in enumerate(order))


def _forms(weights: Mapping[str, float]) -> tuple[Segment, ...]:
    return tuple(Segment(name, share, 1 + 2 * (k % 2)) for k, (name, share) in enumerate(weights.items()))


def words(segments: tuple[Segment, ...]) -> str:
    """Weights in words, largest first: tokens alone 80 %, compute 15 %."""
    known = sorted(segments, key=lambda segment: -segment.share)
    return ", ".join(f"{segment.name} {segment.percent}" for segment in known if segment.share >= 0.05)
