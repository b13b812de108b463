"""LadderReport: rows, answer and design of a ladder, and what pages, tables and sentences look up in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from normlab.ladders.report.design import LadderDesign, LostRun
from normlab.ladders.rows import LadderRow
from normlab.ladders.statistics.answer import (
    FEW_STEPS,
    CellGap,
    HeldOut,
    Interval,
    LadderAnswer,
    Place,
    SchemeAnswer,
    place_name,
)

Side = Literal["better", "worse", "open"]


@dataclass(frozen=True)
class LadderReport:
    """What a report of a ladder is made from; a table of somebody else's runs has no design."""

    rows: Sequence[LadderRow]
    answer: LadderAnswer
    design: LadderDesign = field(default_factory=LadderDesign)
    sets: Mapping[str, LadderAnswer] = field(default_factory=dict)
    """The answers on further validation sets, by name."""

    @cached_property
    def schemes(self) -> list[str]:
        """Names of all schemes; the baseline is first, and those that only learning rates were tried for are last."""
        answered = [self.answer.baseline, *(own.scheme for own in self.answer.schemes)]
        return list(dict.fromkeys([*answered, *(search.scheme for search in self.design.rates if search.tried)]))

    @cached_property
    def sizes(self) -> list[str]:
        """Names of all sizes, smallest first."""
        return list(dict.fromkeys(row.size for row in sorted(self.rows, key=lambda row: row.parameters)))

    @cached_property
    def budgets(self) -> list[int]:
        """Budgets of tokens, smallest first."""
        return sorted({row.tokens for row in self.rows})

    @cached_property
    def cells(self) -> list[LadderCell]:
        """All cells with a row, by size and budget."""
        first = {(row.size, row.tokens): row for row in reversed(self.rows)}
        places = sorted(first, key=lambda place: (self.sizes.index(place[0]), place[1]))
        return [self._cell(first[place]) for place in places]

    def _cell(self, row: LadderRow) -> LadderCell:
        facts = self.design.cell_facts(row.size, row.tokens)
        answered = [c for own in self.answer.schemes for c in own.cells if (c.size, c.tokens) == (row.size, row.tokens)]
        steps = [facts and facts.steps, row.steps, *(cell.steps for cell in answered)]
        epochs = [facts and facts.epochs, *(cell.epochs for cell in answered)]
        return LadderCell(
            size=row.size, tokens=row.tokens, parameters=row.parameters, flops=row.flops,
            steps=next((found for found in steps if found is not None), None),
            epochs=next((found for found in epochs if found is not None), None),
            batch=facts.batch if facts else None, is_held_out=row.size == self.design.held_out,
        )  # fmt: skip

    @cached_property
    def top(self) -> LadderCell | None:
        """The cell with the most compute at which a gap is known."""
        known = {(c.size, c.tokens) for own in self.answer.schemes for c in own.cells if c.is_usable}
        return max((c for c in self.cells if (c.size, c.tokens) in known), key=lambda c: c.flops, default=None)

    @property
    def top_words(self) -> str:
        """What `top` may be called: where the largest cell has no gap, what is left is not the top of the ladder."""
        is_whole = self.top is not None and self.top.flops >= max(cell.flops for cell in self.cells)
        return "the top of the ladder" if is_whole else "the largest cell with a gap"

    @cached_property
    def lost(self) -> list[LostRun]:
        """Runs that did not train, with the names and reasons of the design where it has them."""
        if self.design.lost:
            return list(self.design.lost)
        return [
            LostRun(name=f"{row.scheme}, {place_name(row.size, row.tokens)}, seed {row.seed}", state=row.state)
            for row in self.rows
            if not row.is_usable
        ]

    @cached_property
    def held_out(self) -> list[HeldOut]:
        """Forecasts beside what came: the answer's, or those of the design."""
        answered = [entry for own in self.answer.schemes for entry in own.held_out]
        stored = self.design.forecast
        if answered or stored is None:
            return answered
        known = {(cell.size, cell.tokens): cell for cell in self.cells}
        return [
            HeldOut(
                scheme=cell.scheme,
                place=self._place(cell.size, cell.tokens, cell.flops, known.get((cell.size, cell.tokens))),
                seeds=cell.seeds or 0, forecast=_interval(cell.smooth, self.answer.level_each),
                simple_law=_interval(cell.simple_law, self.answer.level_each) if cell.simple_law else None,
                measured=cell.came, is_hit=cell.is_hit, is_simple_law_hit=cell.is_simple_law_hit,
            )
            for cell in stored.cells
            if cell.scheme in self.schemes
        ]  # fmt: skip

    def _place(self, size: str, tokens: int, flops: float | None, cell: LadderCell | None) -> Place:
        facts = self.design.size_facts(size)
        parameters = cell.parameters if cell else (facts.parameters if facts else None)
        a_token = facts.flops_per_token if facts else None
        return Place(
            name=place_name(size, tokens), size=size, parameters=parameters or 0, tokens=tokens,
            flops=flops or (cell.flops if cell else (a_token or 0.0) * tokens),
        )  # fmt: skip

    def has_trained(self, scheme: str, cell: LadderCell) -> bool:
        """Whether a scheme has a usable run at a cell."""
        return any(
            row.is_usable and (row.scheme, row.size, row.tokens) == (scheme, cell.size, cell.tokens)
            for row in self.rows
        )


@dataclass(frozen=True, kw_only=True)
class LadderCell:
    """A size and a budget, with how it was trained."""

    size: str
    tokens: int
    parameters: int
    flops: float
    steps: int | None
    epochs: float | None
    batch: int | None
    is_held_out: bool

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.parameters

    @property
    def is_short(self) -> bool:
        """Whether the runs had fewer steps than a gap needs to mean more than a fast start."""
        return self.steps is not None and self.steps < FEW_STEPS

    @property
    def name(self) -> str:
        return place_name(self.size, self.tokens)


def cell_at(own: SchemeAnswer, cell: LadderCell | Place) -> CellGap | None:
    """The gap of a scheme at a cell."""
    return next((gap for gap in own.cells if (gap.size, gap.tokens) == (cell.size, cell.tokens)), None)


def mean_gap(cell: CellGap) -> float | None:
    """Mean over the paired seeds."""
    return sum(cell.differences.values()) / len(cell.differences) if cell.differences else None


def best_interval(cell: CellGap) -> Interval | None:
    """The interval from all cells together; without a fit the one from this cell alone."""
    return cell.gap or cell.student


def side(interval: Interval | None) -> Side:
    """Which side of zero an interval of a gap lies on; negative is better."""
    if interval is None or interval.spans_zero:
        return "open"
    return "better" if interval.high < 0 else "worse"


def _interval(ends: tuple[float, float], level: float) -> Interval:
    return Interval(low=ends[0], high=ends[1], mean=sum(ends) / 2, level=level)
