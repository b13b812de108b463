"""Bound rule: a value (speed, memory, growth, sensitivity), or its ratio to another scheme's, against a bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from normlab.compare.statistics import Difference as Paired
from normlab.compare.statistics import paired_difference
from normlab.errors import NormLabError
from normlab.studies.evidence import Evidence, Key, Sample, unit_of, unpaired
from normlab.studies.finding import Finding, combine_findings, interval_verdict
from normlab.studies.rules.base import VALUE, Rule, interval_text, level_of_each, power_text
from normlab.studies.settling import pairs_to_decide, runs_of_pairs


@dataclass(frozen=True, kw_only=True)
class BoundRule(Rule):
    """The claim: `value` of `scheme`, or its ratio to that of `against`, is at most or at least a bound (or both).

    Decided by the Student interval of its mean, or of the logarithm of a ratio paired by seed, in every arm. `exact`:
    for computed values without sampling noise; every single one must satisfy the bound. `logarithm`: the interval is
    that of the logarithm without `against`, too, as for "A / B" of a run: a positive number has no negative end.
    """

    kind: ClassVar = "bound"

    scheme: str
    against: str | None = None
    also: tuple[str, ...] = ()
    """Further schemes of which the same is claimed."""
    value: str = VALUE
    at_most: float | None = None
    at_least: float | None = None
    exact: bool = False
    logarithm: bool = False
    at_start: bool = False
    """The value is one from before training: runs count whatever became of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.at_most is None and self.at_least is None:
            raise NormLabError("a bound says at_most, at_least or both; try at_least = 0.0")
        if self._is_logarithm and any(end is not None and not end > 0.0 for end in self.claimed):
            raise NormLabError(
                f"the bound of a logarithm or a ratio is positive, got {self.claimed}; try at_least = 1.0"
            )
        if self.exact and self.logarithm:
            raise NormLabError("a bound that is exact has no interval, so no logarithm; leave one of the two out")

    @property
    def _is_logarithm(self) -> bool:
        return self.logarithm or self.against is not None

    @property
    def claimed(self) -> tuple[float | None, float | None]:
        return self.at_least, self.at_most

    @property
    def schemes(self) -> tuple[str, ...]:
        return (self.scheme, *self.also, *([] if self.against is None else [self.against]))

    @property
    def subjects(self) -> tuple[str, ...]:
        return (self.scheme, *self.also)

    @property
    def sentence(self) -> str:
        whose = " and of ".join((self.scheme, *self.also))
        what = f"{self.value} of {whose}" + (f", divided by that of {self.against}," if self.against else "")
        ends = [f"{words} {end:g}" for words, end in (("at least", self.at_least), ("at most", self.at_most))
                if end is not None]  # fmt: skip
        mean = "mean logarithm" if self._is_logarithm else "mean"
        by_mean = self.by_interval(f"by its {mean} over seeds, or over the repeats of a benchmark")
        decided = "each computed number by itself" if self.exact else by_mean
        return f"{what} is {' and '.join(ends)}; {decided}"

    def decide(self, evidence: Evidence) -> Finding:
        arms = evidence.arms(self.arms)
        cases = [(scheme, arm) for arm in arms for scheme in (self.scheme, *self.also)]
        level = level_of_each(self.level, len(cases))
        found = [self._in(evidence, *case, level, self._where(*case, cases)) for case in cases]
        if len(arms) > 1:
            found = [one.placed(arm) for one, (_, arm) in zip(found, cases, strict=True)]
        return combine_findings(found)

    def _where(self, scheme: str, arm: str, cases: list[tuple[str, str]]) -> str:
        """Scheme and arm of a number, as far as there are several."""
        several = [name for name, own in ((scheme, 0), (arm, 1)) if len({case[own] for case in cases}) > 1]
        return f" ({', '.join(several)})" if several else ""

    def _in(self, evidence: Evidence, scheme: str, arm: str, level: float, where: str) -> Finding:
        compared = (scheme,) if self.against is None else (scheme, self.against)
        sample = evidence.at_start if self.at_start else evidence.sample
        samples = [sample(one, arm, self.value) for one in compared]
        problems = [problem for one in samples for problem in one.problems]
        values = samples[0].finished
        if self.against is not None:
            over, under = _pairs(*samples)
            values = {key: over[key] / under[key] for key in over if over[key] > 0.0 and under[key] > 0.0}
            problems += self._without_ratio(samples, len(over) - len(values), len(over))
        elif self.logarithm:
            positive = {key: value for key, value in values.items() if value > 0.0}
            problems += self._without_logarithm(samples[0], len(values) - len(positive))
            values = positive
        if not values:
            return Finding(verdict="open", notes=(*problems, "no number to hold against the bound"))
        unit = unit_of(samples)
        runs = sum(len(one.values) for one in samples)
        found = self._exactly(values, where) if self.exact else self._by_interval(values, runs, level, where, unit)
        return found.noting([*(note for one in samples for note in one.notes), *_pairing(samples)]).unless(problems)

    def _without_ratio(self, samples: list[Sample], missing: int, pairs: int) -> list[str]:
        if not missing:
            return []
        a, b = (one.name for one in samples)
        return [f"{missing} of {pairs} ratios of {a} to {b} do not exist: {self.value} is not positive"]

    def _without_logarithm(self, sample: Sample, missing: int) -> list[str]:
        reason = f"{missing} of {len(sample.values)} numbers of {sample.name} are not positive: they have no logarithm"
        return [reason] if missing else []

    def _exactly(self, values: dict[Key, float], where: str) -> Finding:
        low, high = min(values.values()), max(values.values())
        first, last = self.claimed
        holds = (first is None or low >= first) and (last is None or high <= last)
        shown = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
        number = "" if len(values) == 1 else f"{len(values)} "
        return Finding(
            verdict="reproduced" if holds else "refuted", ours=f"{shown}{where}, {number}computed",
            estimate=low if low == high else None, low=low, high=high, claimed=self.claimed, runs=len(values),
            seeds=len(values), power="computed, not sampled",
        )  # fmt: skip

    def _by_interval(self, values: dict[Key, float], runs: int, level: float, where: str, unit: str) -> Finding:
        is_log = self._is_logarithm
        scaled = {key: math.log(value) for key, value in values.items()} if is_log else values
        found = paired_difference(scaled, dict.fromkeys(scaled, 0.0), level)
        mean, low, high = (_back(end, is_log) for end in (found.mean, found.low, found.high))
        ends = [math.log(end) if is_log and end is not None else end for end in self.claimed]
        return Finding(
            verdict=interval_verdict(low, high, self.claimed),
            ours=f"{mean:.4g}{where}, {interval_text(found, low, high, unit=unit)}",
            estimate=mean, low=low, high=high, claimed=self.claimed, runs=runs,
            runs_to_decide=runs_of_pairs(pairs_to_decide(found, *ends), found, runs),
            seeds=found.n if unit == "seed" else 0, power=_power(found, is_log, unit),
        )  # fmt: skip


def _pairs(a: Sample, b: Sample) -> tuple[dict[Key, float], dict[Key, float]]:
    """Values of both by the seeds that they share; a single one of b is used for all of a."""
    over, under = a.finished, b.finished
    if len(under) == 1:
        under = dict.fromkeys(over, *under.values())
    return {key: value for key, value in over.items() if key in under}, under


def _pairing(samples: Sequence[Sample]) -> list[str]:
    """What is not paired seed by seed in a ratio."""
    if len(samples) < 2:
        return []
    a, b = samples
    if len(b.finished) == 1 and a.finished.keys() - b.finished.keys():
        whose = f"all {len(a.finished)}" if len(a.finished) > 1 else "another"
        return [f"{b.name}: its one {unit_of(samples)} divides {whose} of {a.name}"]
    return unpaired(a, b)


def _back(value: float | None, is_log: bool) -> float | None:
    return math.exp(value) if is_log and value is not None else value


def _power(found: Paired, is_log: bool, unit: str) -> str:
    return power_text(found, "change of the logarithm" if is_log else "distance from the bound", unit)
