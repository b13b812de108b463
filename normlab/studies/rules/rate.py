"""Rate rule: whether the best learning rates of a scheme in several arms (sizes, widths, depths) agree."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from normlab.compare.tuning import grid_edge, group_by_rate, lost_above
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
    two arms, if a best rate is the largest or smallest tried, or if best rates are further apart but others, whose
    losses are within `tie` of the best, are not: the few seeds that tune a rate give no interval. `each_seed`: open,
    too, where they agree with all tuning seeds together, but not with one of them alone.
    """

    kind: ClassVar = "rate"
    takes_scheme_at_arm: ClassVar = False

    scheme: str
    factor: float = math.sqrt(2.0)
    """Of a search whose steps are √2: one step."""
    tie: float = 0.01
    """Difference in the loss that the seeds of a search do not show."""
    each_seed: bool = False

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
            f"further apart, and so are all rates within {self.tie:g} of the best loss; open if only the best are, "
            f"{'if one seed alone has them further apart, ' if self.each_seed else ''}or if a best rate is an end of "
            f"those tried"
        )

    def decide(self, evidence: Evidence) -> Finding:
        tuned = {
            arm: [row for row in evidence.of(self.scheme, arm) if row["role"] == "tune"]
            for arm in evidence.arms(self.arms)
        }
        known = {arm: best for arm, rows in tuned.items() if (best := _best(rows, self.tie)) is not None}
        if len(known) < 2:
            return Finding(
                verdict="open", notes=(f"rates of {self.scheme} are known in {len(known)} arms, not in two",)
            )
        apart = _apart([best.lr for best in known.values()])
        nearest = min(map(_apart, itertools.product(*(best.tied for best in known.values()))))
        edges = [f"{arm}: the best rate is the {best.edge} tried ({best.lr:.3g})"
                 for arm, best in known.items() if best.edge]  # fmt: skip
        seeds = min(len({row["seed"] for row in tuned[arm]}) for arm in known)
        alone = _apart_by_seed([tuned[arm] for arm in known], self.tie)
        found = Finding(
            verdict="reproduced" if self._agree(apart) else "refuted",
            ours=f"a factor of {apart:.3g}: " + ", ".join(f"{best.lr:.3g} ({arm})" for arm, best in known.items()),
            estimate=apart, claimed=(None, self.factor), seeds=seeds, runs=sum(len(tuned[arm]) for arm in known),
            power=f"{counted(seeds, 'seed')} for each rate: the factor has no interval{_of_seeds(alone)}",
            notes=tuple(f"{arm}: {best.lost_above}" for arm, best in known.items() if best.lost_above),
        )  # fmt: skip
        single = [f"with seed {seed} alone the best rates are a factor of {factor:.3g} apart"
                  for seed, factor in alone.items() if not self._agree(factor)]  # fmt: skip
        if self.each_seed and self._agree(apart) and single:
            # More seeds may decide this; how many is not known, since the factor has no interval.
            found = replace(found.noting(single), verdict="open")
        is_tied = self._agree(nearest) and not self._agree(apart)
        ties = [f"rates within {self.tie:g} of the best loss are a factor of {nearest:.3g} apart"] if is_tied else []
        return found.unless(edges + ties)

    def _agree(self, apart: float) -> bool:
        return apart <= _ROUNDING * self.factor


@dataclass(frozen=True)
class _Best:
    lr: float
    edge: str | None
    """Whether it is an end of the rates tried."""
    tied: tuple[float, ...]
    """The rates that are as good, itself included."""
    lost_above: str
    """Runs at the next larger rate that did not train, as text."""


def _best(tuned: Sequence[Mapping[str, Any]], tie: float) -> _Best | None:
    """The rate that the tune runs pick; None if no run trained."""
    tried = group_by_rate([{**row, "lr": row.get("base_lr", row["lr"])} for row in tuned], "tune")
    if not any(own.trained for own in tried.values()):
        return None
    metric = metric_named(tuned[0]["metric"])
    scores = {lr: own.score(metric) for lr, own in tried.items()}
    lr = min(scores, key=lambda lr: (scores[lr], lr))
    tied = [one for one, own in scores.items() if own.lost == scores[lr].lost and own.mean <= scores[lr].mean + tie]
    return _Best(lr, grid_edge(lr, tried), tuple(tied), lost_above(lr, tried))


def _apart_by_seed(arms: Sequence[Sequence[Mapping[str, Any]]], tie: float) -> dict[int, float]:
    """Factor between the best rates of all arms with each seed alone, for seeds that all arms have."""
    shared = set.intersection(*({row["seed"] for row in rows} for rows in arms))
    found = {seed: [_best([row for row in rows if row["seed"] == seed], tie) for rows in arms] for seed in shared}
    rates = {seed: [best.lr for best in own if best is not None] for seed, own in sorted(found.items())}
    return {seed: _apart(own) for seed, own in rates.items() if len(own) == len(arms)}


def _of_seeds(alone: Mapping[int, float]) -> str:
    return f"; by single seeds it is {', '.join(f'{one:.3g}' for one in alone.values())}" if len(alone) > 1 else ""


def _apart(rates: Iterable[float]) -> float:
    known = list(rates)
    return max(known) / min(known)
