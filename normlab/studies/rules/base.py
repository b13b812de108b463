"""Rule: base class of the rules, with confidence level, arms and schemes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from normlab.compare.statistics import Difference, bonferroni_level, minimum_detectable
from normlab.errors import NormLabError
from normlab.studies.evidence import VALUE, Evidence, Row
from normlab.studies.finding import Finding, combine_findings

__all__ = ["VALUE", "Rule", "interval_text", "level_of_each", "power_of_pairs", "power_text"]


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """A rule that tests a claim on rows. `level` is the joint confidence level of all its intervals."""

    kind: ClassVar[str]
    """Its name in TOML files."""
    takes_scheme_at_arm: ClassVar[bool] = True
    """Whether a scheme may be one of another arm, as "pre@no-decay"; not where rows are taken from arms by pattern."""

    level: float = 0.95
    arms: tuple[str, ...] = ()
    """Patterns of the arms that it uses; none: all."""

    def __post_init__(self) -> None:
        if not 0.5 < self.level < 1.0:
            raise NormLabError(f"the level of a rule lies between 0.5 and 1, got {self.level}; try 0.95")
        placed = [] if self.takes_scheme_at_arm else [scheme for scheme in self.schemes if "@" in scheme]
        if placed:
            name, _, arm = placed[0].partition("@")
            raise NormLabError(
                f"{placed[0]!r} names an arm, which a rule of kind {self.kind} does not take with a scheme; write "
                f"{name!r} and arms = [{arm!r}]"
            )

    @abstractmethod
    def decide(self, evidence: Evidence) -> Finding:
        """The verdict on the rows."""

    def rows(self, evidence: Evidence) -> list[Row]:
        """The rows of the schemes and arms that it is about."""
        return evidence.all([scheme.partition("@")[0] for scheme in self.schemes], self.arms)

    def in_every_arm(self, evidence: Evidence, decide: Callable[[Evidence, str, float, bool], Finding]) -> Finding:
        """What `decide` finds in each arm, combined; it gets the arm, its level, and whether to name the arm."""
        arms = evidence.arms(self.arms)
        level, named = level_of_each(self.level, len(arms)), len(arms) > 1
        found = {arm: decide(evidence, arm, level, named) for arm in arms}
        return combine_findings([one.placed(arm) if named else one for arm, one in found.items()])

    @property
    @abstractmethod
    def schemes(self) -> tuple[str, ...]:
        """The schemes that the rule refers to."""

    @property
    def subjects(self) -> tuple[str, ...]:
        """The schemes that something is claimed of, without those that they are compared with."""
        return self.schemes[:1]

    @property
    @abstractmethod
    def sentence(self) -> str:
        """What must hold for "reproduced", in plain words."""

    def by_interval(self, kind: str, *, every: bool = False) -> str:
        """How an interval decides; `every`: there are several arms whatever the patterns say."""
        several = every or len(self.arms) > 1 or any("*" in arm for arm in self.arms)
        where = f"{kind}, in every arm" if several else kind
        return (
            f"{where}: reproduced if the whole {100 * self.level:g} % interval lies there, refuted if none of it does, "
            f"open otherwise and where a run failed"
        )


def level_of_each(level: float, intervals: int) -> float:
    """Level of each of several intervals that hold jointly with probability `level`."""
    return bonferroni_level(level, intervals + 1)


def interval_text(found: Difference, low: float | None, high: float | None, digits: int = 4, unit: str = "seed") -> str:
    """Format an interval with its level and number of pairs."""
    if low is None or high is None:
        return f"no interval: one {unit}" if found.n < 2 else f"no interval: {found.n} {unit}s without scatter"
    return f"{100 * found.level:.3g} % interval {low:.{digits}g} to {high:.{digits}g}, {found.n} {unit}s"


def power_text(found: Difference, what: str = "difference", unit: str = "seed") -> str:
    """The true difference that these runs would detect."""
    if found.sd is None:
        return f"one {unit} shows nothing" if found.n < 2 else f"{unit}s without scatter show nothing"
    return f"a true {what} of {_detectable(found):.2g} would be shown four times out of five"


def power_of_pairs(found: Sequence[Difference]) -> str:
    """The same for the differences of several pairs of schemes."""
    known = sorted(_detectable(one) for one in found if one.sd is not None)
    if not known:
        return "pairs without scatter show nothing"
    shown = dict.fromkeys(f"{end:.2g}" for end in (known[0], known[-1]))
    return f"true differences of {' to '.join(shown)}, by pair, would be shown four times out of five"


def _detectable(found: Difference) -> float:
    return minimum_detectable(found.n, found.sd or 0.0, found.level)
