"""Difference rule: whether one scheme's result is below, above or within a margin of another's, paired by seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from normlab.compare.statistics import Difference, paired_difference
from normlab.errors import NormLabError
from normlab.studies.evidence import Evidence, Sample, unit_of, unpaired
from normlab.studies.finding import Finding, interval_verdict
from normlab.studies.rules.base import VALUE, Rule, interval_text, power_text
from normlab.studies.settling import pairs_to_decide, runs_of_pairs

Direction = Literal["below", "above", "within"]

RANGES: dict[str, Callable[[float], tuple[float | None, float | None]]] = {
    "below": lambda by: (None, -by), "above": lambda by: (by, None), "within": lambda by: (-by, by),
}  # fmt: skip
"""The range that a direction and its margin claim."""


@dataclass(frozen=True, kw_only=True)
class PairedRule(Rule):
    """A claim on `value` of `scheme` less that of `against`, paired by seed, decided by a Student interval."""

    scheme: str
    against: str
    direction: Direction = "below"
    by: float = 0.0
    value: str = VALUE

    def __post_init__(self) -> None:
        super().__post_init__()
        check_margin(self.direction, self.by)

    @property
    def schemes(self) -> tuple[str, ...]:
        return self.scheme, self.against

    def finding(self, samples: Sequence[Sample], found: Difference, where: str, what: str = "difference") -> Finding:
        """The verdict on an interval of all `samples`; `where` follows its mean."""
        unit, claimed = unit_of(samples), RANGES[self.direction](self.by)
        runs = sum(len(one.values) for one in samples)
        return Finding(
            verdict=interval_verdict(found.low, found.high, claimed),
            ours=f"{found.mean:+.4f}{where}, {interval_text(found, found.low, found.high, unit=unit)}",
            estimate=found.mean, low=found.low, high=found.high, claimed=claimed,
            runs=runs, runs_to_decide=runs_of_pairs(pairs_to_decide(found, *claimed), found, runs),
            seeds=found.n if unit == "seed" else 0, power=power_text(found, what, unit),
        ).noting([note for one in samples for note in one.notes]).unless(problems_of(samples))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DifferenceRule(PairedRule):
    """The claim: `value` of `scheme` less that of `against` is below -`by`, above `by`, or within ±`by`.

    Reproduced if the paired Student interval is inside that range in every arm (corrected for their number); refuted if
    it is outside in one; open otherwise, and if a run failed, diverged or was stuck.
    """

    kind: ClassVar = "difference"

    @property
    def sentence(self) -> str:
        return (
            f"{self.value} of {self.scheme} less that of {self.against} {range_words(self.direction, self.by)}, "
            f"{self.by_interval('paired over seeds')}"
        )

    def decide(self, evidence: Evidence) -> Finding:
        return self.in_every_arm(evidence, self._in)

    def _in(self, evidence: Evidence, arm: str, level: float, named: bool) -> Finding:
        a, b = samples = [evidence.sample(scheme, arm, self.value) for scheme in self.schemes]
        if not a.finished.keys() & b.finished.keys():
            nothing = f"{a.name} and {b.name} share no finished {unit_of(samples)}"
            return Finding(verdict="open", notes=(*problems_of(samples), nothing))
        found = paired_difference(a.values, b.values, level)
        return self.finding(samples, found, f" ({arm})" if named else "").noting(unpaired(a, b))


def problems_of(samples: Sequence[Sample]) -> list[str]:
    """The problems of all samples, in order."""
    return [problem for one in samples for problem in one.problems]


def check_margin(direction: Direction, by: float) -> None:
    """Raise for a margin that is no size."""
    if by < 0.0 or (direction == "within" and not by > 0.0):
        raise NormLabError(f"by is a size, and positive where the direction is 'within', got {by}; try 0.01")


def range_words(direction: Direction, by: float) -> str:
    """The claimed range in words."""
    if direction == "within":
        return f"is between −{by:g} and +{by:g}"
    return f"is {direction} {'−' if direction == 'below' and by else ''}{by:g}"
