"""Correlation rule: the correlation of two values over many runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from normlab.studies.evidence import Evidence, Row, is_sound
from normlab.studies.exact import correlation_error, correlation_interval, pearson, quantile, rank_values
from normlab.studies.finding import Finding, interval_verdict
from normlab.studies.rules.base import VALUE, Rule
from normlab.studies.values import row_number

if TYPE_CHECKING:
    import numpy as np

_LEAST = 5
"""Points needed for an interval, in addition to the fitted parameters."""


@dataclass(frozen=True, kw_only=True)
class CorrelationRule(Rule):
    """The claim: `x` and `y` correlate over all finished runs, positively or negatively, by more than `at_least`.

    `within` subtracts the mean of each scheme, arm or rate from both first, so that differences between these do not
    count. `across` does so for a second grouping at once: with ("arm", "seed") what schemes share with a seed, their
    batches, does not count, either. Decided by Fisher's interval; runs that failed or were stuck are excluded and
    listed.
    """

    kind: ClassVar = "correlation"
    takes_scheme_at_arm: ClassVar = False

    x: str
    y: str = VALUE
    sign: Literal["positive", "negative"] = "positive"
    at_least: float = 0.0
    ranks: bool = False
    within: tuple[Literal["scheme", "arm", "lr"], ...] = ()
    across: tuple[Literal["scheme", "arm", "lr", "seed"], ...] = ()
    only: tuple[str, ...] = ()
    """Schemes whose runs are used; none: all."""

    @property
    def schemes(self) -> tuple[str, ...]:
        return self.only

    @property
    def sentence(self) -> str:
        ways = [f"within each {' and '.join(names)}" for names in (self.within, self.across) if names]
        within = f", {' and '.join(ways)}" if ways else ""
        least = f" of more than {self.at_least:g}" if self.at_least else ""
        return (
            f"{self.x} and {self.y} have a {self.sign} correlation{least} over runs{within}: reproduced if the whole "
            f"{100 * self.level:g} % interval has it, refuted if none of it does"
        )

    def decide(self, evidence: Evidence) -> Finding:
        rows = evidence.all(self.only, self.arms)
        pairs = {id(row): (row_number(row, self.x), row_number(row, self.y)) for row in rows if is_sound(row)}
        known = [row for row in rows if None not in pairs.get(id(row), (None,))]
        left_out = len(rows) - len(known)
        notes = (f"{left_out} of {len(rows)} runs failed, were stuck or lack a number, and are left out",)
        groups = [[tuple(row.get(name) for name in names) for row in known] for names in (self.within, self.across)]
        free = len(known) - 2 - _means_taken(groups)
        if free < _LEAST - 3:
            return Finding(verdict="open", runs=len(known), notes=(*notes, "too few runs for a correlation"))
        found = self._over(known, [pairs[id(row)] for row in known], groups, free)  # type: ignore[arg-type]
        return found.noting(notes if left_out else ())

    def _over(
        self, rows: Sequence[Row], pairs: list[tuple[float, float]], groups: Sequence[Sequence[tuple]], free: int
    ) -> Finding:
        columns = [list(column) for column in zip(*pairs, strict=True)]
        x, y = (_centred(rank_values(column) if self.ranks else column, groups) for column in columns)
        r = pearson(x, y)
        low, high = correlation_interval(r, free, self.level, of_ranks=self.ranks)
        claimed = (self.at_least, None) if self.sign == "positive" else (None, -self.at_least)
        least = math.tanh((quantile(self.level) + quantile(0.6)) * correlation_error(free, of_ranks=self.ranks))
        return Finding(
            runs_to_decide=len(rows) + _more_points(r, claimed, least, free),
            verdict=interval_verdict(low, high, claimed), estimate=r, low=low, high=high, claimed=claimed,
            runs=len(rows), seeds=len({row["seed"] for row in rows}),
            ours=f"r = {r:+.2f}, {100 * self.level:g} % interval {low:+.2f} to {high:+.2f}, {len(rows)} runs",
            power=f"a true correlation of {least:.2f} would be shown four times out of five",
        )  # fmt: skip


def _more_points(r: float, claimed: tuple[float | None, float | None], least: float, free: int) -> float:
    """Points to add until the correlation's distance from the bound is what would be shown four times out of five."""
    bound = next(end for end in claimed if end is not None)
    if max(abs(r), abs(bound)) >= 1.0:
        return math.inf
    distance = abs(math.atanh(r) - math.atanh(bound))
    return free * ((math.atanh(least) / distance) ** 2 - 1.0) if distance else math.inf


def _centred(values: Sequence[float], groups: Sequence[Sequence[tuple]]) -> list[float]:
    """What is left of the values when the means of all groups have been subtracted, by least squares."""
    import numpy as np

    members = _members(groups)
    means = np.linalg.lstsq(members, np.array(values), rcond=None)[0]
    return (np.array(values) - members @ means).tolist()


def _means_taken(groups: Sequence[Sequence[tuple]]) -> int:
    """Number of independent means: every group that is crossed with others shares one with them."""
    import numpy as np

    return int(np.linalg.matrix_rank(_members(groups))) if groups[0] else 0


def _members(groups: Sequence[Sequence[tuple]]) -> np.ndarray:
    """A column for each group, 1 where a run belongs to it."""
    import numpy as np

    columns = [[float(own == group) for own in owners] for owners in groups for group in dict.fromkeys(owners)]
    return np.array(columns).T
