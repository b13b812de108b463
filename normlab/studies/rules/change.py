"""Change rule: how the difference of two schemes changes from one arm (length, budget, size) to others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from normlab.compare.statistics import paired_difference
from normlab.studies.evidence import Evidence, Key, Sample, unit_of, unpaired
from normlab.studies.finding import Finding, combine_findings
from normlab.studies.rules.base import level_of_each
from normlab.studies.rules.difference import Direction, PairedRule, problems_of, range_words


@dataclass(frozen=True, kw_only=True)
class ChangeRule(PairedRule):
    """The claim: `value` of `scheme` less that of `against`, in an arm less in the arm `start`, lies in a range.

    below: it falls by more than `by`; above: it rises by more; within: it changes by less. Decided by the Student
    interval of the change over seeds, in every arm but `start`.
    """

    kind: ClassVar = "change"
    takes_scheme_at_arm: ClassVar = False

    start: str
    """The arm that changes are measured from."""
    direction: Direction = "within"
    by: float = 0.01

    @property
    def sentence(self) -> str:
        return (
            f"{self.value} of {self.scheme} less that of {self.against}, less the same at {self.start}, "
            f"{range_words(self.direction, self.by)}, {self.by_interval('paired over seeds', every=True)}"
        )

    def decide(self, evidence: Evidence) -> Finding:
        arms = [arm for arm in evidence.arms(self.arms) if arm != self.start]
        if not arms:
            return Finding(verdict="open", notes=(f"there is no arm besides {self.start}",))
        return combine_findings([self._to(evidence, arm, level_of_each(self.level, len(arms))) for arm in arms])

    def _to(self, evidence: Evidence, arm: str, level: float) -> Finding:
        # Their names have the arm, and so have the notes on them.
        named = [f"{scheme}@{place}" for place in (arm, self.start) for scheme in self.schemes]
        samples = [evidence.sample(name, arm, self.value) for name in named]
        unit = unit_of(samples)
        now, then = (
            Sample(place, _differences(*pair), unit=unit)
            for place, pair in ((arm, samples[:2]), (self.start, samples[2:]))
        )
        if not then.finished.keys() & now.finished.keys():
            nothing = f"{arm} and {self.start} share no finished {unit}"
            return Finding(verdict="open", notes=(*problems_of(samples), nothing))
        found = paired_difference(now.values, then.values, level)
        notes = [*unpaired(*samples[:2]), *unpaired(*samples[2:]), *unpaired(now, then)]
        return self.finding(samples, found, f" from {self.start} to {arm}", "change").noting(notes)


def _differences(a: Sample, b: Sample) -> dict[Key, float | None]:
    """By the seeds that both have; None where a run of either has no result."""
    known = a.finished.keys() & b.finished.keys()
    return {key: a.finished[key] - b.finished[key] if key in known else None for key in a.values if key in b.values}
