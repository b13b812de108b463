"""The `Verdict` record, the profiles it is made from, and the common rule: a series must stay below a threshold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from normlab.checks.judge.blame import blame
from normlab.probes.profile import Number, Profile, Series

Level = Literal["ok", "warn", "fail"]
LEVELS: tuple[Level, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One verdict: what was judged, what was found, value, threshold, and one line of text."""

    name: str
    """What was judged: "forward", "backward", ..."""
    finding: str
    """What was found: "exploding", "bounded", "fine", "not measured", ..."""
    level: Level
    value: Number = None
    """The measured number that decides; None if it is missing or not finite."""
    threshold: Number = None
    """Threshold of that number."""
    layers: tuple[int, ...] = ()
    """The blocks to blame; -1 stands for what comes before the first block."""
    depth: int | None = None
    """Number of blocks of the stack that `layers` are counted in; None: of the stack that is judged."""
    module: str = ""
    """Path of the module to blame; empty if unknown."""
    words: str = ""
    """One line: value, threshold, step, blocks."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self) | {"layers": list(self.layers)}


@dataclass(frozen=True)
class Snapshot:
    """The deepest stack at one snapshot: profiles over seeds."""

    profiles: Sequence[Profile]

    @property
    def depth(self) -> int:
        return self.profiles[0].depth

    @property
    def step(self) -> int:
        return max(profile.step for profile in self.profiles)

    @property
    def trained(self) -> bool:
        return self.profiles[0].when == "after"

    def mean(self, read: Callable[[Profile], Series]) -> Series:
        """A series of each seed, averaged place by place over the seeds that have a number there."""
        return [mean(place) for place in zip(*map(read, self.profiles), strict=True)]

    def number(self, read: Callable[[Profile], Number]) -> Number:
        """A number of each seed, averaged."""
        return mean([read(profile) for profile in self.profiles])


def level(verdicts: Sequence[Verdict]) -> Level:
    """The worst level among the verdicts."""
    return LEVELS[max((LEVELS.index(verdict.level) for verdict in verdicts), default=0)]


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict with the highest level; of equals the latest that was measured."""
    return max(
        enumerate(verdicts),
        key=lambda pair: (LEVELS.index(pair[1].level), pair[1].finding != "not measured", pair[0]),
    )[1]


def unmeasured(name: str, why: str = "") -> Verdict:
    words = f"not measured{': ' + why if why else ''}"
    return Verdict(name=name, finding="not measured", level="ok", words=words)


def upper(
    name: str,
    finding: str,
    label: str,
    series: Series,
    view: Snapshot,
    warn: float,
    fail: float = math.inf,
    *,
    first: int = 0,
) -> Verdict:
    """The verdict on a series that must stay below a threshold; `first` is the block that its first place names."""
    known = [x for x in series if x is not None]
    if not known:
        return unmeasured(name)
    largest = max(known)
    limit = fail if largest > fail else warn
    layers = tuple(place + first for place, x in enumerate(series) if over(x, limit))
    return Verdict(
        name=name,
        finding=finding if layers else "fine",
        level="fail" if largest > fail else "warn" if layers else "ok",
        value=plain(largest),
        threshold=limit,
        layers=layers,
        words=f"{label} {largest:.3g} ({limit:g} is the limit) at step {view.step}{blame(layers, view.depth)}",
    )


def over(x: Number, limit: float) -> bool:
    return x is not None and x > limit


def mean(values: Sequence[Number]) -> Number:
    known = [x for x in values if x is not None]
    return float(np.mean(known)) if known else None


def plain(x: float) -> Number:
    """The number, or None if it is not finite."""
    return x if math.isfinite(x) else None
