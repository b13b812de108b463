"""Cells of a ladder: paired differences over seeds between a scheme and the baseline, and why a cell is left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from normlab.errors import NormLabError, unknown
from normlab.ladders.rows import LadderRow
from normlab.ladders.statistics.answer import Place
from normlab.pages.numbers import format_count

LARGEST_GAP = 0.3
"""A gap of this many nats lies outside the estimators' priors: its scheme is judged cell by cell, without a fit."""

Key = tuple[str, int]
"""Name of the size and tokens. Not parameters: a scheme may need some of its own at the same size."""


@dataclass(frozen=True)
class _AtPlace:
    """What is known at one size and budget."""

    place: Place

    @property
    def parameters(self) -> int:
        return self.place.parameters

    @property
    def tokens(self) -> int:
        return self.place.tokens

    @property
    def flops(self) -> float:
        return self.place.flops


@dataclass(frozen=True)
class Cell(_AtPlace):
    """One scheme against the baseline at one size and budget."""

    differences: dict[int, float]
    """Loss of the scheme less loss of the baseline, by seed."""
    trunk: str
    """Cells with the same text are branches of one trunk."""
    reason: str | None
    """Why the cell is not part of a fit."""
    speed_ratio: float | None = None
    """Tokens per second of the scheme over the baseline's."""
    flops_ratio: float = 1.0
    """FLOPs of the baseline over those of the scheme: less than one where the scheme needs more for the same tokens."""
    runs: int = 0
    """Runs of the scheme."""
    lost: int = 0
    """Those of them that did not train."""

    @property
    def is_usable(self) -> bool:
        return self.reason is None

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.differences.values())))


@dataclass(frozen=True)
class MeanLoss(_AtPlace):
    """Mean loss of one scheme at one cell."""

    loss: float
    n: int
    trunk: str


def largest_gap(cells: Sequence[Cell]) -> float:
    """Largest mean gap at a usable cell, in absolute value; zero without one."""
    return max((abs(cell.mean) for cell in cells if cell.is_usable), default=0.0)


def reasons_of(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Cells that are left out, by reason."""
    found: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.reason is not None:
            found[cell.reason].append(cell)
    return dict(found)


def check_rows(rows: Sequence[LadderRow], baseline: str) -> None:
    """Raise unless the baseline is there and every run is listed once."""
    schemes = {row.scheme for row in rows}
    if not rows:
        raise NormLabError("the ladder has no rows; expected one for each scheme, size, budget and seed")
    if baseline not in schemes:
        raise unknown("baseline", baseline, schemes)
    seen: set[tuple[str, str, int, int]] = set()
    for row in rows:
        key = (row.scheme, row.size, row.tokens, row.seed)
        if key in seen:
            raise NormLabError(
                f"{row.scheme} at {row.size} with {row.tokens:,} tokens and seed {row.seed} is listed twice; keep one"
            )
        seen.add(key)


def cells_of(rows: Sequence[LadderRow], scheme: str, baseline: str) -> list[Cell]:
    """All cells at which the scheme has rows, smallest compute first."""
    own, base = _by_cell(rows, scheme), _by_cell(rows, baseline)
    branched = branched_sizes(row for row in rows if row.scheme in (scheme, baseline))
    cells = [_cell(key, own[key], base.get(key, []), branched) for key in own]
    return sorted(cells, key=lambda cell: (cell.flops, cell.tokens, cell.place.size))


def mean_losses(rows: Sequence[LadderRow], scheme: str) -> list[MeanLoss]:
    """Mean losses of a scheme over its usable runs, smallest compute first; a cell with a bad run is left out."""
    found = []
    branched = branched_sizes(row for row in rows if row.scheme == scheme)
    for key, own in _by_cell(rows, scheme).items():
        if all(row.is_usable for row in own):
            losses = [row.loss for row in own if row.loss is not None]
            found.append(MeanLoss(_place(own[0]), float(np.mean(losses)), len(losses), _trunk(key, branched)))
    return sorted(found, key=lambda cell: (cell.flops, cell.tokens))


def branched_sizes(rows: Iterable[LadderRow]) -> set[str]:
    """Sizes whose budgets branch from one trunk."""
    budgets: dict[tuple[str, str], set[int]] = defaultdict(set)
    for row in rows:
        if row.trunk is not None:
            budgets[row.size, row.trunk].add(row.tokens)
    return {size for (size, _), own in budgets.items() if len(own) > 1}


def _by_cell(rows: Sequence[LadderRow], scheme: str) -> dict[Key, list[LadderRow]]:
    grouped: dict[Key, list[LadderRow]] = defaultdict(list)
    for row in rows:
        if row.scheme == scheme:
            grouped[row.size, row.tokens].append(row)
    return {key: sorted(own, key=lambda row: row.seed) for key, own in grouped.items()}


def _cell(key: Key, own: list[LadderRow], base: list[LadderRow], branched: set[str]) -> Cell:
    first, second = (_losses(side) for side in (own, base))
    differences = {seed: first[seed] - second[seed] for seed in first if seed in second}
    # The place is the baseline's, whatever parameters and FLOPs of its own the scheme needs.
    place = _place(base[0] if base else own[0])
    return Cell(
        place, differences, _trunk(key, branched), _reason(own, base, differences), _speed_ratio(own, base),
        place.flops / own[0].flops, len(own), sum(not row.is_usable for row in own),
    )  # fmt: skip


def _losses(rows: list[LadderRow]) -> dict[int, float]:
    return {row.seed: row.loss for row in rows if row.is_usable and row.loss is not None}


def _reason(own: list[LadderRow], base: list[LadderRow], differences: dict[int, float]) -> str | None:
    bad = [f"seed {row.seed} of {row.scheme} {_state(row)}" for row in (*own, *base) if not row.is_usable]
    if bad:
        return f"unreliable: {', '.join(bad)}"
    if not base:
        return "no runs of the baseline"
    return None if differences else "no seed in both the scheme and the baseline"


def _state(row: LadderRow) -> str:
    return "has no loss" if row.state == "done" else row.state


def _trunk(key: Key, branched: set[str]) -> str:
    return key[0] if key[0] in branched else f"{key[0]}:{key[1]}"


def _place(row: LadderRow) -> Place:
    return Place(
        name=f"{row.size} with {format_count(row.tokens)} tokens", size=row.size, parameters=row.parameters,
        tokens=row.tokens, flops=row.flops, steps=row.steps,
    )  # fmt: skip


def _speed_ratio(own: list[LadderRow], base: list[LadderRow]) -> float | None:
    speeds = [[row.tokens_per_s for row in side if row.tokens_per_s and row.is_usable] for side in (own, base)]
    return float(np.mean(speeds[0]) / np.mean(speeds[1])) if all(speeds) else None
