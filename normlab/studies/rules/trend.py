"""Trend rule: whether the gap of two schemes shrinks, grows, crosses or stays within a ladder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from normlab.errors import NormLabError
from normlab.studies.cells import cell_name
from normlab.studies.evidence import Evidence
from normlab.studies.finding import Finding, Verdict, interval_verdict
from normlab.studies.rules.difference import RANGES
from normlab.studies.rules.gap import LadderRule

if TYPE_CHECKING:
    from normlab.ladders.statistics.answer import CellGap, SchemeAnswer, TrendTest
    from normlab.ladders.statistics.more_seeds import GapFit

Way = Literal["shrinks", "grows", "crosses", "constant"]


@dataclass(frozen=True, kw_only=True)
class TrendRule(LadderRule):
    """The claim: along an axis of the ladder the gap of `scheme` to `against` moves in one of the `ways`.

    The way is the ladder's own verdict, which is "not shown" where its interval leaves several: then the claim is open.
    So it is where a cell at an end of the axis has no gap: the ladder's verdict is then on a shorter part of it.
    """

    kind: ClassVar = "trend"

    ways: tuple[Way, ...]
    axis: Literal["compute", "tokens", "sizes"] = "compute"
    """From the smallest cell to the largest, over budgets at the largest size, or over sizes at the largest budget."""
    top: Literal["below", "above", "any"] = "any"
    """On which side of zero the gap at the top of the axis must be: below, the scheme is better there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ways:
            raise NormLabError(
                "a trend names the ways that the claim allows (shrinks, grows, crosses, constant); try ['shrinks']"
            )

    @property
    def sentence(self) -> str:
        ways = " or ".join("is constant" if way == "constant" else way for way in self.ways)
        side_of_zero = "" if self.top == "any" else f" and is {self.top} 0 at the top, with its whole interval"
        return (
            f"the gap in {self.value} of {self.scheme} to {self.against} {ways} over {self.axis}{side_of_zero}; "
            f"refuted if the ladder shows otherwise, open if it shows neither"
        )

    def decide(self, evidence: Evidence) -> Finding:
        found = self.answer(evidence, self.level)
        test = getattr(found.trend, self.axis)
        if test is None:
            large = [reason.text for reason in found.identified.reasons if reason.rule == "gap too large"]
            return Finding(verdict="open", notes=(*large, f"the ladder has no two cells along {self.axis} yet")[:1])
        change = test.change
        seeds = min(cell.n for cell in found.cells if cell.is_usable)
        finding = Finding(
            verdict=self._verdict(test), estimate=change.mean, low=change.low, high=change.high, seeds=seeds,
            runs=2 * sum(cell.n for cell in found.cells),
            ours=f"{test.verdict}: {test.gap_bottom.mean:+.4f} at {test.bottom.name}, {test.gap_top.mean:+.4f} at "
            f"{test.top.name}; change {change.low:+.4f} to {change.high:+.4f}",
            power=f"a change below {test.margin:.2g} counts as constant; the interval is ±{change.width / 2:.2g} wide",
        ).noting([*_reasons(found.cells), *self.unpaired(evidence)])  # fmt: skip
        lost = self._lost_ends(found, test)
        return finding.unless(lost) if lost or finding.verdict != "open" else self._with_cost(finding, evidence)

    def _with_cost(self, found: Finding, evidence: Evidence) -> Finding:
        """An open finding with the number of runs that would decide it."""

        def is_decided(fit: GapFit) -> bool:
            return self._verdict(getattr(fit.trend(), self.axis)) != "open"

        return replace(found, runs_to_decide=self.runs_to_decide(found, evidence, self.level, is_decided))

    def _lost_ends(self, found: SchemeAnswer, test: TrendTest) -> list[str]:
        """Cells without a gap before the first or after the last one that the trend is about."""
        line = {"compute": found.cells, "tokens": [cell for cell in found.cells if cell.size == test.top.size],
                "sizes": [cell for cell in found.cells if cell.tokens == test.top.tokens]}[self.axis]  # fmt: skip
        # A larger size that has no gap at all would be the line itself.
        ends = [cell for cell in line if cell.flops < test.bottom.flops]
        ends += [cell for cell in found.cells if cell.flops > test.top.flops]
        names = [cell_name(cell.size, cell.tokens) for cell in ends if not cell.is_usable]
        return [f"no gap at {'; '.join(names)}, an end of the ladder"] if names else []

    def _verdict(self, test: TrendTest) -> Verdict:
        top = test.gap_top
        at_top = "reproduced" if self.top == "any" else interval_verdict(top.low, top.high, RANGES[self.top](0.0))
        moves = "open" if test.verdict == "not shown" else "reproduced" if test.verdict in self.ways else "refuted"
        both = {at_top, moves}
        return "refuted" if "refuted" in both else "open" if "open" in both else "reproduced"


def _reasons(cells: Sequence[CellGap]) -> list[str]:
    """Why cells have no gap, each reason once."""
    places: dict[str, list[str]] = {}
    for cell in cells:
        if cell.reason:
            places.setdefault(cell.reason, []).append(cell_name(cell.size, cell.tokens))
    return [f"{'; '.join(names)}: {reason}" for reason, names in places.items()]
