"""Rank rule: whether schemes come in the order that a theory gives, by Kendall's tau and all permutations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from normlab.errors import NormLabError
from normlab.studies.evidence import Evidence, uneven, unit_of
from normlab.studies.exact import kendall_tau, order_p_values
from normlab.studies.finding import Finding
from normlab.studies.rules.base import VALUE, Rule

_MOST = 8
"""Schemes whose orders can all be tried: 8! = 40,320."""


@dataclass(frozen=True, kw_only=True)
class RankRule(Rule):
    """The claim: the schemes, sorted by their mean `value`, come in the order `expected` (smallest value first).

    Reproduced if an agreement (Kendall's tau) as good as the measured one is rarer than 1 - level among all orders;
    refuted if a disagreement as bad is. Differences between neighbours need not be shown: for that there is `order`.
    """

    kind: ClassVar = "rank"

    expected: tuple[str, ...]
    value: str = VALUE

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 4 <= len(self.expected) <= _MOST or len({*self.expected}) < len(self.expected):
            raise NormLabError(
                f"expected is an order of 4 to {_MOST} different schemes, got {list(self.expected)}; "
                "for fewer, try a rule of kind order"
            )

    @property
    def schemes(self) -> tuple[str, ...]:
        return self.expected

    @property
    def subjects(self) -> tuple[str, ...]:
        return self.expected

    @property
    def sentence(self) -> str:
        return (
            f"{self.value} rises in this order: {', '.join(self.expected)}; reproduced if an agreement (Kendall's tau) "
            f"as good has a chance below {100 * (1.0 - self.level):.3g} % among all orders, refuted if one as bad has"
        )

    def decide(self, evidence: Evidence) -> Finding:
        return self.in_every_arm(evidence, self._in)

    def _in(self, evidence: Evidence, arm: str, level: float, named: bool) -> Finding:
        samples = [evidence.sample(scheme, arm, self.value) for scheme in self.expected]
        problems = [problem for one in samples for problem in one.problems]
        if not all(one.finished for one in samples):
            return Finding(verdict="open", notes=tuple(problems))
        means = [sum(one.finished.values()) / len(one.finished) for one in samples]
        tau, (better, worse) = kendall_tau(means), order_p_values(means)
        shown = sorted(zip(self.expected, means, strict=True), key=lambda pair: pair[1])
        limit, where = 1.0 - level, f" ({arm})" if named else ""
        return Finding(
            verdict="reproduced" if better < limit else "refuted" if worse < limit else "open",
            ours=f"τ = {tau:+.2f}{where}, p = {better:.3g}: " + ", ".join(f"{name} {mean:.3g}" for name, mean in shown),
            # Of six schemes there are 720 orders, whatever the number of seeds.
            estimate=tau, claimed=(0.0, None), runs_to_decide=math.inf, runs=sum(len(one.values) for one in samples),
            seeds=min(len(one.finished) for one in samples) if unit_of(samples) == "seed" else 0,
            power=f"perfect agreement would have p = {order_p_values(range(len(means)))[0]:.2g}",
        ).noting([*(note for one in samples for note in one.notes), *uneven(samples)]).unless(problems)  # fmt: skip
