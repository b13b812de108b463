"""Losses of one scheme that contradict each other: a rise with tokens or size, or a fall that quickens with tokens.

More text and a larger model lower the loss, and each doubling of the text lowers it by less than the one before. Where
a ladder says otherwise, one of the runs had other settings than its neighbours (a rate, a batch, a restart), or saw its
text too often. With one seed nothing else shows it, and a gap there is not one between schemes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from normlab.ladders.rows import LadderRow
from normlab.ladders.statistics.cells import MeanLoss, mean_losses
from normlab.pages.numbers import format_count

LEAST_RISE = 0.01
"""Nats; a run varies by 0.005 to 0.007, and two neighbours differ by ten times that."""
LEAST_STEP = 1.1
"""Factor of compute from which more must help: two shapes of one size may differ by more than `LEAST_RISE`."""
LEAST_BULGE = 0.02
"""Nats of the middle of three losses above the chord between the others; a law lies below the chord."""
MOST_NAMED = 3
"""Places that are named of each scheme."""


def implausible_losses(rows: Sequence[LadderRow], minimum_steps: int) -> list[str]:
    """A line for each scheme whose losses contradict each other; cells with a bad run are left out."""
    lines = []
    for scheme in dict.fromkeys(row.scheme for row in rows):
        means = mean_losses(rows, scheme)
        found = [text for group in _groups(means) for text in _contradictions(group, minimum_steps)]
        if found:
            more = f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
            lines.append(
                f"Losses of {scheme} contradict each other: {'; '.join(found[:MOST_NAMED])}{more}. A run there may "
                "have had other settings than its neighbours, and gaps with it mislead."
            )
    return lines


def _groups(means: Iterable[MeanLoss]) -> Iterator[list[MeanLoss]]:
    """Cells of one size by tokens, and cells of one budget by size."""
    sizes, budgets = defaultdict(list), defaultdict(list)
    for cell in means:
        sizes[cell.place.size].append(cell)
        budgets[cell.tokens].append(cell)
    yield from (sorted(own, key=lambda cell: cell.tokens) for own in sizes.values())
    yield from (sorted(own, key=lambda cell: cell.parameters) for own in budgets.values())


def _contradictions(cells: Sequence[MeanLoss], minimum_steps: int) -> Iterator[str]:
    for first, second in pairwise(cells):
        if second.loss - first.loss > LEAST_RISE and second.flops >= LEAST_STEP * first.flops:
            places = f"{first.place.name} to {second.loss:.3f} at {second.place.name}"
            yield f"the loss rises from {first.loss:.3f} at {places}"
    # In its first steps a run may well fall faster and faster.
    settled = [cell for cell in cells if cell.place.steps is None or cell.place.steps >= minimum_steps]
    for first, middle, last in zip(settled, settled[1:], settled[2:], strict=False):
        is_one_size = first.place.size == last.place.size
        if is_one_size and middle.loss < first.loss and _bulge(first, middle, last) > LEAST_BULGE:
            early, late = _fall(first, middle), _fall(middle, last)
            yield (
                f"for each doubling of tokens it falls by {early:.3f} up to {middle.place.name}, and by {late:.3f} "
                f"from there to {format_count(last.tokens)}"
            )


def _bulge(first: MeanLoss, middle: MeanLoss, last: MeanLoss) -> float:
    """Nats of the middle loss above the straight line over ln tokens between the others."""
    return (_fall(middle, last) - _fall(first, middle)) / (
        1.0 / math.log2(last.tokens / middle.tokens) + 1.0 / math.log2(middle.tokens / first.tokens)
    )


def _fall(first: MeanLoss, second: MeanLoss) -> float:
    """Nats for each doubling of tokens."""
    return (first.loss - second.loss) / math.log2(second.tokens / first.tokens)
