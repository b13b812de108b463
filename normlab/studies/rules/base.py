"""What all rules share: a level of confidence, the arms that they look at, and the schemes that they name."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from normlab.compare.statistics import Difference, bonferroni_level, minimum_detectable
from normlab.errors import NormLabError
from normlab.studies.evidence import Evidence
from normlab.studies.finding import Finding

VALUE = "value"
"""The field of a row that a comparison is judged by: the validation loss, or the accuracy."""


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """How rows decide a claim. `level` is the probability that all intervals of the rule hold together."""

    kind: ClassVar[str]
    """Its name in TOML files."""

    level: float = 0.95
    arms: tuple[str, ...] = ()
    """Patterns of the arms that it is about; none: all."""

    def __post_init__(self) -> None:
        if not 0.5 < self.level < 1.0:
            raise NormLabError(f"the level of a rule lies between 0.5 and 1, got {self.level}; try 0.95")

    @abstractmethod
    def decide(self, evidence: Evidence) -> Finding:
        """The verdict on the rows."""

    @property
    @abstractmethod
    def schemes(self) -> tuple[str, ...]:
        """The schemes that the rule names."""

    @property
    def words(self) -> str:
        """The rule as it was filled in, for people."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        given = {f.name: fields[f.name] for f in dataclasses.fields(self) if fields[f.name] != f.default}
        return ", ".join(f"{name} = {_shown(value)}" for name, value in given.items())


def _shown(value: Any) -> str:
    """Tiers as "a before b, c", other values as they are."""
    if not isinstance(value, tuple):
        return str(value)
    nested = any(isinstance(entry, tuple) for entry in value)
    return (" before " if nested else ", ").join(map(_shown, value))


def each(level: float, intervals: int) -> float:
    """The level of each of several intervals that hold together with probability `level`."""
    return bonferroni_level(level, intervals + 1)


def interval(found: Difference, low: float | None, high: float | None, digits: int = 4) -> str:
    """An interval with its level and pairs, in words."""
    if low is None or high is None:
        return "no interval: one seed"
    return f"{100 * found.level:.3g} % interval {low:.{digits}g} to {high:.{digits}g}, {found.n} seeds"


def power_of(found: Difference, what: str = "difference") -> str:
    """The true difference that the runs would have shown."""
    if found.sd is None:
        return "one seed shows nothing"
    least = minimum_detectable(found.n, found.sd, found.level)
    return f"a true {what} of {least:.2g} would be shown four times out of five"
