"""What a reader of a ladder's answer must know: cells left out, missing seeds, few steps, cells that contradict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from normlab.ladders.rows import LadderRow
from normlab.ladders.statistics.answer import SchemeAnswer, place_name
from normlab.ladders.statistics.cells import Cell, reasons_of
from normlab.ladders.statistics.estimators.fit import estimate, sample_of
from normlab.pages.numbers import format_count
from normlab.utils.text import counted

FAR_OFF = 3.0
"""Standard deviations from the smooth estimate at which a cell is listed."""
ROUNDING = 1e-7
"""Nats by which the gaps of two seeds must differ: far below what any table rounds to, far above what sums lose."""
UNEVEN = 2.0
"""Ratio of the scatter over seeds at two budgets from which on it is said."""
UNEVEN_ERRORS = 1.25
"""Its power of tokens must be so many of its errors: with two seeds chance alone makes one path in six `UNEVEN`."""
OWN_FLOPS = 0.02
"""Share of the baseline's FLOPs from which on a difference is said."""


def find_cautions(
    by_scheme: Mapping[str, Sequence[Cell]], answers: Sequence[SchemeAnswer], minimum_steps: int, level: float
) -> list[str]:
    """All cautions, scheme by scheme."""
    found: list[str] = []
    for own in answers:
        cells = by_scheme[own.scheme]
        found += _left_out(own.scheme, cells) + _single_seeds(own.scheme, cells) + _equal_seeds(own.scheme, cells)
        found += _uneven_scatter(own, cells) + _far_off(own)
        found += _own_flops(own.scheme, cells)
        found += _without_few_steps(own, cells, minimum_steps, level)
    return found


def unpaired(rows: Sequence[LadderRow], scheme: str, baseline: str) -> str:
    """Runs whose seed the other side of a gap lacks at that cell, in words; empty: none."""
    sides = [{_cell_seed(row): row for row in rows if row.scheme == name} for name in (scheme, baseline)]
    # A cell that one side has not been trained at is named elsewhere.
    shared = {cell for cell, _ in sides[0]} & {cell for cell, _ in sides[1]}
    alone = [side[key] for side in sides for key in side if key[0] in shared and not all(key in s for s in sides)]
    if not alone:
        return ""
    first = f"{alone[0].scheme} at {place_name(alone[0].size, alone[0].tokens)}, seed {alone[0].seed}"
    more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
    what = f"{counted(len(alone), 'run')} without a partner of the same seed, part of no gap"
    return f"{scheme} against {baseline}: {what} ({first}{more})"


def _cell_seed(row: LadderRow) -> tuple[tuple[str, int], int]:
    return (row.size, row.tokens), row.seed


def _left_out(scheme: str, cells: Sequence[Cell]) -> list[str]:
    """Cells that are left out, grouped by reason: a trunk that did not train loses all budgets of its size."""
    return [
        f"{scheme}, {'; '.join(cell.place.name for cell in own)}: {reason}; left out."
        for reason, own in reasons_of(cells).items()
    ]


def _single_seeds(scheme: str, cells: Sequence[Cell]) -> list[str]:
    usable = [cell for cell in cells if cell.is_usable]
    single = [cell.place.name for cell in usable if len(cell.differences) == 1]
    if usable and len(single) == len(usable):
        return [f"{scheme} has one seed at every cell: the noise of seeds is assumed, not measured."]
    return [f"{scheme} has one seed at {', '.join(single)}."] if single else []


def _equal_seeds(scheme: str, cells: Sequence[Cell]) -> list[str]:
    """Seeds scatter: where they do not, a table may hold one run several times, and its intervals are too narrow."""
    several = [own for cell in cells if cell.is_usable and len(own := list(cell.differences.values())) > 1]
    equal = sum(max(own) - min(own) < ROUNDING for own in several)
    if 2 * equal <= len(several):
        return []
    return [
        f"All seeds of {scheme} have the same gap at {equal} of {len(several)} cells: if one run is listed as several "
        "seeds, the intervals are too narrow."
    ]


def _uneven_scatter(own: SchemeAnswer, cells: Sequence[Cell]) -> list[str]:
    """Where scatter is seen to depend on tokens, intervals at some budgets are wider for it."""
    known = {cell.tokens: cell.seed_sd for cell in own.cells if cell.seed_sd is not None}
    if not known:
        return []
    widest, least = (choose(known, key=known.__getitem__) for choose in (max, min))
    noise = sample_of(cells).noise
    if known[widest] < UNEVEN * known[least] or abs(noise.exponent) < UNEVEN_ERRORS * noise.exponent_error:
        return []
    return [
        f"Gaps of {own.scheme} vary over seeds by {known[widest]:.2g} nats at {format_count(widest)} tokens and by "
        f"{known[least]:.2g} at {format_count(least)}; intervals are wider where they vary more."
    ]


def _own_flops(scheme: str, cells: Sequence[Cell]) -> list[str]:
    """A caution where a scheme needs other FLOPs than the baseline: gaps are at equal size and tokens."""
    taken = [1.0 / cell.flops_ratio for cell in cells if cell.is_usable]
    if not taken or max(abs(times - 1.0) for times in taken) < OWN_FLOPS:
        return []
    low, high = (f"{choose(taken):.3g}" for choose in (min, max))
    times = low if low == high else f"{low} to {high}"
    return [
        f"{scheme} takes {times} times the baseline's FLOPs for the same tokens: gaps are at equal tokens, compute "
        "multipliers count its own FLOPs."
    ]


def _far_off(own: SchemeAnswer) -> list[str]:
    far = [cell for cell in own.cells if cell.off_sd is not None and cell.off_sd > FAR_OFF]
    return [
        f"{own.scheme}, {place_name(cell.size, cell.tokens)}: {cell.off_sd:.1f} standard deviations of its mean off "
        "the smooth curve through all cells."
        for cell in far
    ]


def _without_few_steps(own: SchemeAnswer, cells: Sequence[Cell], minimum_steps: int, level: float) -> list[str]:
    """The gap at the top from cells with enough steps alone."""
    usable = [cell for cell in cells if cell.is_usable]
    enough = [cell for cell in usable if cell.place.steps is None or cell.place.steps >= minimum_steps]
    if len(enough) == len(usable):
        return []
    text = f"{own.scheme}: {len(usable) - len(enough)} of {len(usable)} cells have fewer than {minimum_steps:,} steps"
    if len(enough) < 2 or not own.projections:
        return [f"{text}; their gaps are partly those of early training."]
    top = max(usable, key=lambda cell: cell.flops)
    gap = estimate(sample_of(enough), [top.place])[0].interval(level)
    return [f"{text}; without them the gap at the top is {gap.mean:+.3f} ({gap.low:+.3f} to {gap.high:+.3f})."]
