"""Order rule: whether several schemes have the claimed order, with intervals of all pairs that hold jointly."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product
from typing import ClassVar, Literal

from normlab.compare.statistics import paired_difference
from normlab.errors import NormLabError
from normlab.studies.evidence import Evidence, Sample, unit_of, unpaired
from normlab.studies.finding import Finding
from normlab.studies.rules.base import VALUE, Rule, level_of_each, power_of_pairs
from normlab.studies.settling import pairs_to_decide

Tier = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class OrderRule(Rule):
    """The claim: every scheme of a tier is better than every scheme of the tiers after it.

    Reproduced if this is significant for every pair of neighbouring tiers; refuted if any pair is significant in the
    other direction; all intervals hold jointly. With two tiers, the first of one scheme, that scheme is claimed to be
    the best.
    """

    kind: ClassVar = "order"

    tiers: tuple[Tier, ...]
    better: Literal["lower", "higher"] = "lower"
    value: str = VALUE

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.tiers) < 2 or not all(self.tiers):
            raise NormLabError(
                "tiers are at least two lists of schemes, best first, none of them empty; try [['peri'], ['pre']]"
            )

    @property
    def schemes(self) -> tuple[str, ...]:
        return tuple(scheme for tier in self.tiers for scheme in tier)

    @property
    def subjects(self) -> tuple[str, ...]:
        return self.tiers[0]

    @property
    def sentence(self) -> str:
        order = ", then ".join(" and ".join(tier) for tier in self.tiers)
        return (
            f"{self.value} is {self.better} in this order: {order}; reproduced if every pair of neighbouring tiers is "
            f"apart by an interval (all at {100 * self.level:g} % together), refuted if any pair is the other way round"
        )

    def decide(self, evidence: Evidence) -> Finding:
        return self.in_every_arm(evidence, self._in)

    def _in(self, evidence: Evidence, arm: str, level: float, named: bool) -> Finding:
        samples = {scheme: evidence.sample(scheme, arm, self.value) for scheme in self.schemes}
        pairs = [(i, j, a, b) for i, j in combinations(range(len(self.tiers)), 2)
                 for a, b in product(self.tiers[i], self.tiers[j])]  # fmt: skip
        of_pair = level_of_each(level, len(pairs))
        shown = {(i, j, a, b): self._pair(samples[a], samples[b], of_pair) for i, j, a, b in pairs}
        neighbours = [one for (i, j, _, _), one in shown.items() if j == i + 1]
        refuted = any(one.verdict == "refuted" for one in shown.values())
        holds = all(one.verdict == "reproduced" for one in neighbours)
        verdict = "refuted" if refuted else "reproduced" if holds else "open"
        runs = sum(len(s.values) for s in samples.values())
        return Finding(
            verdict=verdict, ours=_means(samples, self.better) + (f" ({arm})" if named else ""),
            runs=runs, runs_to_decide=self._runs_to_decide(list(shown.values()), neighbours, runs),
            seeds=_seeds(list(samples.values())), parts=tuple(shown.values()),
            power=_power([samples[a] for _, _, a, _ in pairs], [samples[b] for _, _, _, b in pairs], of_pair),
            notes=tuple(one.ours for one in shown.values()),
        ).noting([
            *(note for s in samples.values() for note in s.notes),
            *(note for _, _, a, b in pairs for note in unpaired(samples[a], samples[b])),
        ]).unless(
            [problem for s in samples.values() for problem in s.problems]
        )  # fmt: skip

    def _runs_to_decide(self, pairs: list[Finding], neighbours: list[Finding], runs: int) -> float | None:
        """One pair the other way round refutes the order; all pairs of neighbours must hold for it to be reproduced."""
        contrary = [one for one in pairs if self._sign * (one.estimate or 0.0) > 0.0]
        undecided = [one for one in contrary or neighbours if one.verdict == "open"]
        grown = [one.runs_to_decide / one.runs for one in undecided if one.runs_to_decide is not None]
        if not grown or len(grown) < len(undecided):
            return None
        return runs * (min(grown) if contrary else max(grown))

    @property
    def _sign(self) -> float:
        return 1.0 if self.better == "lower" else -1.0

    def _pair(self, a: Sample, b: Sample, level: float) -> Finding:
        if not a.finished.keys() & b.finished.keys():
            return Finding(verdict="open", ours=f"{a.name} and {b.name} share no finished {unit_of([a, b])}")
        found = paired_difference(a.values, b.values, level)
        holds = not found.spans_zero and (self._sign * found.mean < 0.0)
        verdict = "open" if found.spans_zero else "reproduced" if holds else "refuted"
        ends = "" if found.low is None else f" ({found.low:+.4f} to {found.high:+.4f})"
        return Finding(
            verdict=verdict, ours=f"{a.name} less {b.name}: {found.mean:+.4f}{ends}", estimate=found.mean, runs=found.n,
            runs_to_decide=pairs_to_decide(found, 0.0),
        )  # fmt: skip


def _power(better: list[Sample], worse: list[Sample], level: float) -> str:
    paired = [(a, b) for a, b in zip(better, worse, strict=True) if a.finished.keys() & b.finished.keys()]
    return power_of_pairs([paired_difference(a.values, b.values, level) for a, b in paired])


def _seeds(samples: list[Sample]) -> int:
    return min(len(one.finished) for one in samples) if unit_of(samples) == "seed" else 0


def _means(samples: dict[str, Sample], better: str) -> str:
    means = {name: sum(s.finished.values()) / len(s.finished) for name, s in samples.items() if s.finished}
    ordered = sorted(means, key=lambda name: means[name], reverse=better == "higher")
    return ", ".join(f"{name} {means[name]:.4f}" for name in ordered)
