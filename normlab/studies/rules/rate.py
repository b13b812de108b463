"""Rate rule: whether the best learning rates of a scheme in several arms (sizes, widths, depths) agree."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from normlab.compare.tuning import edge_text, grid_edge, group_by_rate, lost_above_text
from normlab.errors import NormLabError
from normlab.pages.numbers import join_names
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
    too, where they agree with all tuning seeds together, but not with one of them alone; it refutes nothing.
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
        alone = _single_seeds([tuned[arm] for arm in known], self.tie)
        seeds = min(len({row["seed"] for row in tuned[arm]}) for arm in known)
        found = Finding(
            verdict="reproduced" if self._agree(apart) else "refuted",
            ours=f"a factor of {apart:.3g}: " + ", ".join(f"{best.lr:.3g} ({arm})" for arm, best in known.items()),
            estimate=apart, claimed=(None, self.factor), seeds=seeds, runs=sum(len(tuned[arm]) for arm in known),
            power=f"{counted(seeds, 'seed')} for each rate: the factor has no interval{_of_seeds(alone)}",
            notes=tuple(f"{arm}: {best.lost_above}" for arm, best in known.items() if best.lost_above),
        )  # fmt: skip
        if self.each_seed:
            found = found.noting(_not_alone([tuned[arm] for arm in known], alone))
        if self.each_seed and self._agree(apart) and (other := self._disagreeing(alone)):
            # More seeds may decide this; how many is not known, since the factor has no interval.
            found = replace(found.noting(other), verdict="open")
        return found.unless(self._obstacles(known, apart))

    def _disagreeing(self, alone: Mapping[int, _SingleSeed]) -> list[str]:
        """Seeds with which alone the best rates, and those as good, are further apart, or which did not train."""
        lost = [f"seed {seed} trained at no rate in an arm" for seed, one in alone.items() if one.apart is None]
        return lost + [
            f"with seed {seed} alone the best rates are a factor of {one.words} apart"
            for seed, one in alone.items() if one.nearest is not None and not self._agree(one.nearest)
        ]  # fmt: skip

    def _obstacles(self, known: Mapping[str, _Best], apart: float) -> list[str]:
        """Best rates at an end of those tried, or apart only by what the seeds do not tell apart."""
        found = [f"{arm}: the best rate ({best.lr:.3g}) is {best.edge}" for arm, best in known.items() if best.edge]
        nearest = _nearest(known.values())
        if self._agree(nearest) and not self._agree(apart):
            found.append(f"rates within {self.tie:g} of the best loss are a factor of {nearest:.3g} apart")
        return found

    def _agree(self, apart: float) -> bool:
        return apart <= _ROUNDING * self.factor


@dataclass(frozen=True)
class _Best:
    lr: float
    edge: str | None
    """"the largest tried", if it or one as good is an end of the rates."""
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
    edge = grid_edge(lr, tried)
    return _Best(lr, edge and edge_text(lr, edge, tried), tuple(tied), lost_above_text(lr, tried))


@dataclass(frozen=True)
class _SingleSeed:
    """What one tuning seed alone says of the best rates of all arms."""

    apart: float | None
    """Factor between the best rates; None if it trained at no rate in some arm."""
    nearest: float | None
    """The same between rates that are as good."""
    is_least: bool
    """Whether a best rate is an end of those tried: then they may be further apart."""

    @property
    def words(self) -> str:
        if self.apart is None:
            return "none"
        return f"at least {self.apart:.3g}" if self.is_least else f"{self.apart:.3g}"


def _single_seeds(arms: Sequence[Sequence[Mapping[str, Any]]], tie: float) -> dict[int, _SingleSeed]:
    """What each seed that all arms have says alone."""
    shared = set.intersection(*({row["seed"] for row in rows} for rows in arms))
    return {seed: _single_seed([[row for row in rows if row["seed"] == seed] for rows in arms], tie)
            for seed in sorted(shared)}  # fmt: skip


def _not_alone(arms: Sequence[Sequence[Mapping[str, Any]]], alone: Mapping[int, _SingleSeed]) -> list[str]:
    """A note on seeds that did not tune in every arm."""
    others = sorted({row["seed"] for rows in arms for row in rows} - alone.keys())
    if not others:
        return []
    names = f"{'seed' if len(others) == 1 else 'seeds'} {join_names(map(str, others))}"
    return [f"{names} did not tune in every arm: {'it says' if len(others) == 1 else 'they say'} nothing alone"]


def _single_seed(arms: Sequence[Sequence[Mapping[str, Any]]], tie: float) -> _SingleSeed:
    found = [_best(rows, tie) for rows in arms]
    known = [best for best in found if best is not None]
    if len(known) < len(found):
        return _SingleSeed(None, None, is_least=False)
    return _SingleSeed(_apart([best.lr for best in known]), _nearest(known), any(best.edge for best in known))


def _of_seeds(alone: Mapping[int, _SingleSeed]) -> str:
    return f"; by single seeds it is {', '.join(one.words for one in alone.values())}" if len(alone) > 1 else ""


def _nearest(known: Iterable[_Best]) -> float:
    """The smallest factor between rates that are as good as the best."""
    return min(map(_apart, itertools.product(*(best.tied for best in known))))


def _apart(rates: Iterable[float]) -> float:
    known = list(rates)
    return max(known) / min(known)
