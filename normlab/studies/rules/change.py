"""Change rule: how the difference of two schemes changes from one arm (length, budget, size) to others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from normlab.compare.statistics import paired_difference
from normlab.studies.evidence import Evidence, Key, unit_of
from normlab.studies.finding import Finding, combine_findings, interval_verdict
from normlab.studies.rules.base import VALUE, Rule, interval_text, level_of_each, power_text
from normlab.studies.rules.difference import RANGES, Direction, check_margin, range_words
from normlab.studies.settling import pairs_to_decide, runs_of_pairs


@dataclass(frozen=True, kw_only=True)
class ChangeRule(Rule):
    """The claim: `value` of `scheme` less that of `against`, in an arm less in the arm `start`, lies in a range.

    below: it falls by more than `by`; above: it rises by more; within: it changes by less. Decided by the Student
    interval of the change over seeds, in every arm but `start`.
    """

    kind: ClassVar = "change"
    takes_scheme_at_arm: ClassVar = False

    scheme: str
    against: str
    start: str
    """The arm that changes are measured from."""
    direction: Direction = "within"
    by: float = 0.01
    value: str = VALUE

    def __post_init__(self) -> None:
        super().__post_init__()
        check_margin(self.direction, self.by)

    @property
    def schemes(self) -> tuple[str, ...]:
        return self.scheme, self.against

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
        samples = [evidence.sample(scheme, place, self.value) for place in (arm, self.start) for scheme in self.schemes]
        problems = [problem for one in samples for problem in one.problems]
        notes = [note for one in samples for note in one.notes]
        then, now = (_differences(a.finished, b.finished) for a, b in (samples[2:], samples[:2]))
        unit = unit_of(samples)
        if not then.keys() & now.keys():
            return Finding(verdict="open", notes=(*problems, f"{arm} and {self.start} share no finished {unit}"))
        found = paired_difference(now, then, level)
        claimed, ends = RANGES[self.direction](self.by), interval_text(found, found.low, found.high, unit=unit)
        runs = sum(len(one.values) for one in samples)
        return Finding(
            verdict=interval_verdict(found.low, found.high, claimed),
            ours=f"{found.mean:+.4f} from {self.start} to {arm}, {ends}",
            estimate=found.mean, low=found.low, high=found.high, claimed=claimed,
            runs=runs, runs_to_decide=runs_of_pairs(pairs_to_decide(found, *claimed), found, runs),
            seeds=found.n if unit == "seed" else 0, power=power_text(found, "change", unit),
        ).noting(notes).unless(problems)  # fmt: skip


def _differences(a: dict[Key, float], b: dict[Key, float]) -> dict[Key, float | None]:
    return {key: a[key] - b[key] for key in a if key in b}
