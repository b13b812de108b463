"""Gap rule: the gap of two schemes at cells of a ladder, by the ladder's own estimator from all of its cells."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar

from normlab.errors import NormLabError
from normlab.studies.cells import RATES, cell_name
from normlab.studies.evidence import Evidence, Row
from normlab.studies.finding import Finding, combine_findings, interval_verdict
from normlab.studies.rules.base import Rule, level_of_each
from normlab.studies.rules.difference import RANGES, Direction, check_margin, range_words
from normlab.studies.settling import MOST_RUNS

if TYPE_CHECKING:
    from normlab.ladders.rows import LadderRow
    from normlab.ladders.statistics.answer import CellGap, Place, SchemeAnswer
    from normlab.ladders.statistics.more_seeds import GapFit


@dataclass(frozen=True, kw_only=True)
class LadderRule(Rule):
    """A rule on the answer of a ladder for one scheme against another."""

    takes_scheme_at_arm: ClassVar = False

    scheme: str
    against: str
    value: str = "loss"
    """Field of the rows with the loss: loss, or that of a further validation set, as loss_books."""

    @property
    def schemes(self) -> tuple[str, ...]:
        return self.scheme, self.against

    def answer(self, evidence: Evidence, level: float) -> SchemeAnswer:
        """The ladder's answer from the rows of these two schemes, with intervals at this level."""
        # Imported late: numpy's linear algebra is not needed to list studies.
        from normlab.ladders.statistics import answer

        return answer(self._judged(evidence), baseline=evidence.canonical(self.against), level=level).schemes[0]

    def unpaired(self, evidence: Evidence) -> list[str]:
        """A note on runs whose seed the other side lacks at a cell, if there are any."""
        from normlab.ladders.statistics.cautions import unpaired

        own, base = map(evidence.canonical, self.schemes)
        line = unpaired(self._judged(evidence), own, base)
        return [line] if line else []

    def rows(self, evidence: Evidence) -> list[Row]:
        cells = [arm for arm in evidence.arms(self.arms) if not arm.startswith(RATES)]
        return [row for row in evidence.all(self.schemes, cells) if "size" in row] if cells else []

    def runs_to_decide(
        self, found: Finding, evidence: Evidence, level: float, is_decided: Callable[[GapFit], bool]
    ) -> float:
        """Runs in all of an open finding with more seeds at every cell of both schemes; infinite: too many."""
        from normlab.ladders.statistics.more_seeds import GapFit, seeds_to_decide

        own, other = map(evidence.canonical, self.schemes)
        fit = GapFit.of(self._judged(evidence), own, other, level)
        cells = len(fit.places)
        return found.runs + 2 * cells * seeds_to_decide(fit, is_decided, MOST_RUNS // cells)

    def _judged(self, evidence: Evidence) -> list[LadderRow]:
        from normlab.ladders.stored_rows import judged_rows

        rows = self.rows(evidence)
        found = {row["scheme"] for row in rows}
        missing = [scheme for scheme in map(evidence.canonical, self.schemes) if scheme not in found]
        if missing:
            raise NormLabError(f"{' and '.join(missing)} {'have' if len(missing) > 1 else 'has'} no runs on the ladder")
        return judged_rows(rows, self.value)


@dataclass(frozen=True, kw_only=True)
class GapRule(LadderRule):
    """The claim: the gap of `scheme` to `against` at every cell that matches `cell` is below, above or within `by`.

    The interval is that of the ladder's smooth estimator (docs/guides/ladder.md). It pools all cells and is wider
    where there is only one seed, so that a cell with few seeds can be judged.
    """

    kind: ClassVar = "gap"

    cell: str
    """Pattern of cells: size and budget, as 12x768,118M."""
    direction: Direction = "below"
    by: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_margin(self.direction, self.by)

    @property
    def sentence(self) -> str:
        return (
            f"{self.value} of {self.scheme} less that of {self.against} at {self.cell} of the ladder "
            f"{range_words(self.direction, self.by)}, {self.by_interval('by the interval from all cells')}"
        )

    def decide(self, evidence: Evidence) -> Finding:
        cells = [arm for arm in evidence.rows if not arm.startswith(RATES) and fnmatchcase(arm, self.cell)]
        if not cells:
            return Finding(verdict="open", notes=(f"no cell {self.cell} on the ladder yet",))
        level = level_of_each(self.level, len(cells))
        found = self.answer(evidence, level)
        judged = [gap for gap in found.cells if cell_name(gap.size, gap.tokens) in cells]
        if not judged:
            return Finding(verdict="open", notes=(f"{self.scheme} has no run at {self.cell}",))
        whole = combine_findings([self._at(gap) for gap in judged]).noting(self.unpaired(evidence))
        return whole if whole.verdict != "open" else self._with_cost(whole, judged, evidence, level)

    def _with_cost(self, found: Finding, judged: list[CellGap], evidence: Evidence, level: float) -> Finding:
        """An open finding with the number of runs that would decide it; a cell without a gap stays without."""
        if not all(gap.is_usable and gap.gap is not None for gap in judged):
            return replace(found, runs_to_decide=math.inf)
        names = {cell_name(gap.size, gap.tokens) for gap in judged}

        def is_decided(fit: GapFit) -> bool:
            places: list[Place] = [one for one in fit.places if cell_name(one.size, one.tokens) in names]
            verdicts = {
                interval_verdict(own.low, own.high, RANGES[self.direction](self.by)) for own in fit.gaps(places)
            }
            return "refuted" in verdicts or verdicts == {"reproduced"}

        return replace(found, runs_to_decide=self.runs_to_decide(found, evidence, level, is_decided))

    def _at(self, gap: CellGap) -> Finding:
        from normlab.ladders.statistics.answer import FEW_STEPS

        place = cell_name(gap.size, gap.tokens)
        # Where gaps are too large for the estimator, each cell has the interval of its own seeds.
        interval = gap.gap or gap.student
        if interval is None or not gap.is_usable:
            return Finding(verdict="open", notes=(f"{place}: {gap.reason or 'no estimate'}",))
        low, high, mean = interval.low, interval.high, interval.mean
        claimed = RANGES[self.direction](self.by)
        few = f"{place}: fewer than {FEW_STEPS:,} steps, so partly who starts faster"
        spread = "" if gap.seed_sd is None else f"; a difference varies by {gap.seed_sd:.2g} over seeds"
        ends = f"{100 * interval.level:.3g} % interval {low:+.4f} to {high:+.4f}"
        return Finding(
            verdict=interval_verdict(low, high, claimed), ours=f"{mean:+.4f} ({place}), {ends}, {gap.n} seeds",
            estimate=mean, low=low, high=high, claimed=claimed, runs=2 * gap.n, seeds=gap.n,
            power=f"the interval is ±{(high - low) / 2:.2g} wide{spread}",
        ).noting([few] if gap.few_steps else [])  # fmt: skip
