"""Rate rule: whether the best learning rates of a scheme in several arms (sizes, widths, depths) agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from normlab.compare.tuning import grid_edge, group_by_rate, pick_rate
from normlab.errors import NormLabError
from normlab.studies.evidence import Evidence
from normlab.studies.finding import Finding
from normlab.studies.rules.base import Rule
from normlab.train.metrics import metric_named
from normlab.utils.text import counted

_ROUNDING = 1.05


@dataclass(frozen=True, kw_only=True)
class RateRule(Rule):
    """The claim: the best rates of `scheme` in all arms are within a `factor` of each other.

    Best is the rate that its tune runs pick in an arm, before any factor for the batch. Open if there are fewer than
    two arms, or if a best rate is the largest or smallest tried. The few seeds that tune a rate give no interval.
    """

    kind: ClassVar = "rate"
    takes_scheme_at_arm: ClassVar = False

    scheme: str
    factor: float = math.sqrt(2.0)
    """Of a search whose steps are √2: one step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.factor >= 1.0:
            raise NormLabError(f"the factor between two rates is at least 1, got {self.factor}; try 1.42")

    @property
    def schemes(self) -> tuple[str, ...]:
        return (self.scheme,)

    @property
    def sentence(self) -> str:
        arms = ", ".join(self.arms) or "all arms"
        return (
            f"the best rates of {self.scheme} in {arms} are within a factor of {self.factor:.3g}; refuted if they are "
            f"further apart, open if a best rate is an end of those tried"
        )

    def decide(self, evidence: Evidence) -> Finding:
        tuned = {
            arm: [row for row in evidence.of(self.scheme, arm) if row["role"] == "tune"]
            for arm in evidence.arms(self.arms)
        }
        known = {arm: best for arm, rows in tuned.items() if (best := _best(rows)) is not None}
        if len(known) < 2:
            return Finding(
                verdict="open", notes=(f"rates of {self.scheme} are known in {len(known)} arms, not in two",)
            )
        rates = [lr for lr, _ in known.values()]
        apart = max(rates) / min(rates)
        edges = [f"{arm}: the best rate is the {edge} tried ({lr:.3g})" for arm, (lr, edge) in known.items() if edge]
        seeds = min(len({row["seed"] for row in tuned[arm]}) for arm in known)
        return Finding(
            verdict="reproduced" if apart <= _ROUNDING * self.factor else "refuted",
            ours=f"a factor of {apart:.3g}: " + ", ".join(f"{lr:.3g} ({arm})" for arm, (lr, _) in known.items()),
            estimate=apart, claimed=(None, self.factor), seeds=seeds, runs=sum(len(tuned[arm]) for arm in known),
            power=f"{counted(seeds, 'seed')} for each rate: the factor has no interval",
        ).unless(edges)  # fmt: skip


def _best(tuned: Sequence[Mapping[str, Any]]) -> tuple[float, str | None] | None:
    """The rate that the tune runs pick, and whether it is an end of those tried."""
    tried = group_by_rate([{**row, "lr": row.get("base_lr", row["lr"])} for row in tuned], "tune")
    lr = pick_rate(tried, metric_named(tuned[0]["metric"])) if tried else None
    return None if lr is None else (lr, grid_edge(lr, tried))
