"""LadderDesign: what was run. Sizes, budgets, rates, forecast and lost runs; every field may be missing.

It is written beside the rows as `ladder.json`. A table of losses that somebody else's runs have filled has no design:
the page then leaves out what it cannot know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from normlab.utils.records import from_plain, to_plain

Ends = tuple[float, float]
"""Low and high end of an interval."""
Edge = Literal["largest", "smallest"]
Carry = Literal["width", "width+depth", "none"]


@dataclass(frozen=True, kw_only=True)
class SizeFacts:
    """A model size of the ladder."""

    label: str
    depth: int | None = None
    width: int | None = None
    parameters: int | None = None
    embedding_share: float | None = None
    """Share of the parameters in the embedding and head, in [0, 1]."""
    flops_per_token: float | None = None
    seeds: int | None = None


@dataclass(frozen=True, kw_only=True)
class CellFacts:
    """One size trained on one budget of tokens."""

    size: str
    tokens: int
    steps: int | None = None
    epochs: float | None = None
    """How often the training text was seen."""
    batch: int | None = None
    """Tokens a step."""


@dataclass(frozen=True, kw_only=True)
class TriedRate:
    """One learning rate that was tried, and what came of it."""

    lr: float
    loss: float | None = None
    state: str = "done"
    confirmed: int = 0
    """Further seeds that trained at it, where the next larger rate did not."""
    unconfirmed: int = 0
    """Those that did not."""


@dataclass(frozen=True, kw_only=True)
class RateSearchFacts:
    """The rates tried for one scheme at one size and budget."""

    scheme: str
    size: str
    tokens: int
    tried: tuple[TriedRate, ...]
    pick: float | None = None
    edge: Edge | None = None
    """Where the pick lies among the rates tried, if it is not inside them."""


@dataclass(frozen=True, kw_only=True)
class RateRule:
    """How the rate of one scheme is carried from the sizes where it was found to the others."""

    scheme: str
    carry: Carry
    basis: str = "hypothesis"
    """derived, hypothesis, fitted (at the middle size), or for what it is which."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class ForecastCell:
    """The gap that was forecast for one scheme at one size and budget, and the gap that came."""

    scheme: str
    size: str
    tokens: int
    smooth: Ends
    """95 % prediction interval of the smooth estimator."""
    simple_law: Ends | None = None
    """Ends if the gap keeps a simple law."""
    came: float | None = None
    """Measured gap, mean over paired seeds; None before the runs have ended."""
    seeds: int | None = None
    """Number of seeds of `came`."""
    flops: float | None = None

    @property
    def is_hit(self) -> bool | None:
        """Whether the smooth estimator's interval contains what came."""
        return _contains(self.smooth, self.came)

    @property
    def is_simple_law_hit(self) -> bool | None:
        """Whether the simple law's interval contains what came."""
        return _contains(self.simple_law, self.came)


@dataclass(frozen=True, kw_only=True)
class ForecastFacts:
    """The forecast of the held-out size, as a page shows it; `normlab.ladders.forecast` has the stored one."""

    written: str
    """Date and time in ISO format."""
    commit: str | None = None
    hash: str | None = None
    schemes: tuple[str, ...] = ()
    """Schemes that it is of."""
    cells: tuple[ForecastCell, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LostRun:
    """A run that did not train to its end; it enters no fit."""

    name: str
    state: str
    """stuck, diverged, failed."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class LadderDesign:
    """Everything about a ladder that its rows do not say."""

    command: tuple[str, ...] = ()
    date: str | None = None
    commit: str | None = None
    device: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    data: str | None = None
    """Description of the training text."""
    validation: str | None = None
    """Description of the validation text of the rows' loss."""
    unique_tokens: int | None = None
    head: str | None = None
    """Kind of output head, the same for all schemes: tied, own."""
    sizes: tuple[SizeFacts, ...] = ()
    budgets: tuple[int, ...] = ()
    cells: tuple[CellFacts, ...] = ()
    rates: tuple[RateSearchFacts, ...] = ()
    rules: tuple[RateRule, ...] = ()
    held_out: str | None = None
    """Label of the size that was forecast before it was trained."""
    forecast: ForecastFacts | None = None
    further_forecasts: tuple[ForecastFacts, ...] = ()
    """Those of schemes that were added later."""
    lost: tuple[LostRun, ...] = ()
    runs_left: int | None = None
    """Runs that have not ended: a lower bound while rates are searched for."""
    set_aside: tuple[str, ...] = ()
    """Names of stored runs at a rate that is no longer the picked one; they are part of nothing."""
    cautions: tuple[str, ...] = ()
    """Further sentences for the list of cautions."""

    def size_facts(self, label: str) -> SizeFacts | None:
        return next((size for size in self.sizes if size.label == label), None)

    def cell_facts(self, label: str, tokens: int) -> CellFacts | None:
        return next((cell for cell in self.cells if (cell.size, cell.tokens) == (label, tokens)), None)

    def to_dict(self) -> dict[str, Any]:
        """The design as plain values, as `ladder.json` holds it."""
        return to_plain(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Read what `to_dict` returned; raises with the name of the field that is wrong."""
        return from_plain(cls, record, "ladder.json")


def _contains(interval: Ends | None, value: float | None) -> bool | None:
    return None if interval is None or value is None else interval[0] <= value <= interval[1]
