"""Count rule: the share of a scheme's runs that diverged, failed, were stuck or spiked, with exact bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from normlab.errors import NormLabError
from normlab.studies.evidence import Evidence, Row, has
from normlab.studies.exact import fisher_exact, least_p, share_bounds
from normlab.studies.finding import Finding
from normlab.studies.rules.base import VALUE, Rule
from normlab.studies.settling import counts_to_decide
from normlab.studies.values import row_number

What = Literal["diverged", "failed", "stuck", "spiked", "skipped"]


@dataclass(frozen=True, kw_only=True)
class CountRule(Rule):
    """The claim: `what` happens to at most, or to at least, a share of a scheme's runs, at all rates together.

    at_most:  reproduced if the upper bound of the share is below at_most + margin, refuted if the lower bound is
              above at_most: one event refutes "never" (at_most = 0), and five runs without one reproduce it at 95 %.
    at_least: the same in the other direction.
    less_than another scheme: by Fisher's exact test, one-sided.
    Bounds are one-sided, too: each errs with a chance of 1 - level at most. Runs with the same seed at several rates
    count as independent, although they share their initial weights and batches, and a share over several rates is one
    of that list of rates; so events are named by rate as well.
    """

    kind: ClassVar = "count"
    takes_scheme_at_arm: ClassVar = False

    scheme: str
    what: tuple[What, ...] = ("diverged", "failed", "stuck")
    above: float | None = None
    """A run whose final validation loss is above this counts as well."""
    at_most: float | None = None
    at_least: float | None = None
    less_than: str | None = None
    margin: float = 0.5
    lrs: tuple[float, ...] = ()
    """Rates that are counted; none: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [self.at_most, self.at_least, self.less_than]
        if sum(one is not None for one in given) != 1:
            raise NormLabError("a count says one of at_most, at_least and less_than; try at_most = 0.0")
        if not self.what and self.above is None:
            raise NormLabError("a count says what is counted: what, above or both; try what = ['diverged']")

    @property
    def schemes(self) -> tuple[str, ...]:
        return (self.scheme,) if self.less_than is None else (self.scheme, self.less_than)

    @property
    def sentence(self) -> str:
        counted = ["were stuck" if one == "stuck" else one for one in self.what]
        what = " or ".join([*counted, *([] if self.above is None else [f"ended above {self.above:g}"])])
        if self.less_than is not None:
            return (
                f"fewer runs of {self.scheme} than of {self.less_than} {what}, at all rates together, by Fisher's "
                f"exact test at {100 * self.level:g} %; refuted if more did by the same test"
            )
        share, bound = (self.at_most, "at most") if self.at_most is not None else (self.at_least or 0.0, "at least")
        return (
            f"{bound} {100 * share:g} % of the runs of {self.scheme} {what}, at all rates together; reproduced if the "
            f"exact bound of the share, one-sided at {100 * self.level:g} %, is within {100 * self.margin:g} points of "
            f"that, refuted if the other one is beyond it"
        )

    def decide(self, evidence: Evidence) -> Finding:
        rows = [self._rows(evidence, scheme) for scheme in self.schemes]
        if not all(rows):
            return Finding(verdict="open", notes=("there are no runs to count",))
        counts = [(sum(map(self._happened, own)), len(own)) for own in rows]
        found = self._judge(*counts)
        more = counts_to_decide(counts, self._is_decided) if found.verdict == "open" else None
        found = replace(found, runs_to_decide=more, seeds=min(len({row["seed"] for row in own}) for own in rows))
        by_rate = [self._by_rate(scheme, own) for scheme, own in zip(self.schemes, rows, strict=True)]
        return found.noting([text for text in by_rate if text])

    def _judge(self, *counts: tuple[int, int]) -> Finding:
        return self._against(*counts) if self.less_than else self._share(*counts[0])

    def _is_decided(self, *counts: tuple[int, int]) -> bool:
        return self._judge(*counts).verdict != "open"

    def _rows(self, evidence: Evidence, scheme: str) -> list[Row]:
        rows = evidence.all([scheme], self.arms)
        return [row for row in rows if not self.lrs or row["lr"] in self.lrs]

    def _happened(self, row: Row) -> bool:
        value = row_number(row, VALUE)
        high = self.above is not None and value is not None and value > self.above
        return high or any(has(row, what) for what in self.what)

    def _by_rate(self, scheme: str, rows: Sequence[Row]) -> str:
        """Events at each rate as text; empty if there is one rate or no event."""
        by_rate: dict[float, list[bool]] = {}
        tuned = [row for row in rows if row.get("lr") is not None]
        for row in sorted(tuned, key=lambda row: row["lr"]):
            by_rate.setdefault(row["lr"], []).append(self._happened(row))
        if len(by_rate) < 2 or not any(map(any, by_rate.values())):
            return ""
        counts = ", ".join(f"{sum(own)} of {len(own)} at {lr:g}" for lr, own in by_rate.items())
        return f"{scheme} by rate: {counts}"

    def _share(self, events: int, runs: int) -> Finding:
        low, high = share_bounds(events, runs, self.level)
        if self.at_most is not None:
            claimed, shown, against = (None, self.at_most), high <= self.at_most + self.margin, low > self.at_most
        else:
            least = self.at_least or 0.0
            claimed, shown, against = (least, None), low >= least - self.margin, high < least
        return Finding(
            verdict="refuted" if against else "reproduced" if shown else "open",
            ours=f"{events} of {runs} runs; true share {low:.2f} to {high:.2f}, each end at {100 * self.level:g} %",
            estimate=events / runs, low=low, high=high, claimed=claimed, runs=runs,
            power=f"{runs} runs without one would bound the share by {share_bounds(0, runs, self.level)[1]:.2f}",
        )  # fmt: skip

    def _against(self, own: tuple[int, int], other: tuple[int, int]) -> Finding:
        fewer, more = fisher_exact(other, own), fisher_exact(own, other)
        limit = 1.0 - self.level
        names = f"{self.scheme} {own[0]} of {own[1]}, {self.less_than} {other[0]} of {other[1]}"
        return Finding(
            verdict="reproduced" if fewer < limit else "refuted" if more < limit else "open",
            ours=f"{names}; p = {fewer:.3g}", runs=own[1] + other[1],
            power=f"so many runs could have shown p = {least_p(other[1], own[1]):.2g} at best",
        )  # fmt: skip
