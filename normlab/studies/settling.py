"""Cost of settling an open claim: how many runs like those made would decide it, if means and scatter stay."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from normlab.compare.statistics import POWER, Difference, minimum_detectable
from normlab.utils.text import counted

if TYPE_CHECKING:
    from normlab.studies.evidence import Row
    from normlab.studies.finding import Finding

_RARE = 1e-5
"""Probability of a draw below which it is left out."""
MOST_RUNS = 500
"""Runs of each scheme beyond which no number is given."""


def pairs_to_decide(found: Difference, *ends: float | None) -> float | None:
    """Pairs whose interval would exclude the nearest of the ends four times out of five.

    Infinite: more than `MOST_RUNS`; None: unknown, because there is no scatter to go by.
    """
    distances = [abs(found.mean - end) for end in ends if end is not None]
    if not found.sd or not distances:
        return None
    enough = (n for n in _growing(found.n) if minimum_detectable(n, found.sd, found.level) <= min(distances))
    return next(enough, math.inf)


def runs_of_pairs(pairs: float | None, found: Difference, runs: int) -> float | None:
    """The same as runs, of which `runs` made the pairs that were found."""
    return None if pairs is None else runs * pairs / found.n


def counts_to_decide(counts: Sequence[tuple[int, int]], decided: Callable[..., bool]) -> float:
    """Runs in all with which (events, runs) of every scheme would be decided four times out of five.

    That is if the shares of events so far are the true ones, and runs are independent.
    """
    most = max(runs for _, runs in counts)
    sizes = [[math.ceil(runs * n / most) for _, runs in counts] for n in _growing(most)]
    # More runs decide more often, so that the numbers can be halved; summing over draws is slow.
    first = bisect.bisect_left(sizes, POWER, key=lambda grown: _share_decided(counts, grown, decided))
    return sum(sizes[first]) if first < len(sizes) else math.inf


def _share_decided(counts: Sequence[tuple[int, int]], grown: Sequence[int], decided: Callable[..., bool]) -> float:
    """Probability that binomial counts of so many runs are decided."""
    shares = [(events / runs, more) for (events, runs), more in zip(counts, grown, strict=True)]
    # Where not even the expected counts decide, most draws do not either.
    if not decided(*((round(share * more), more) for share, more in shares)):
        return 0.0
    draws = itertools.product(*(_likely(*one) for one in shares))
    likely = ((draw, math.prod(p for _, p in draw)) for draw in draws)
    return math.fsum(p for draw, p in likely if p > _RARE and decided(*(count for count, _ in draw)))


def _likely(share: float, runs: int) -> list[tuple[tuple[int, int], float]]:
    """Counts of a binomial distribution within three standard deviations of its mean, with their probabilities."""
    mean, reach = share * runs, 3.0 * math.sqrt(share * (1.0 - share) * runs)
    events = range(max(0, math.floor(mean - reach)), min(runs, math.ceil(mean + reach)) + 1)
    # At most MOST_RUNS: larger binomial coefficients are no floats.
    return [((k, runs), math.comb(runs, k) * share**k * (1.0 - share) ** (runs - k)) for k in events]


def _growing(now: int) -> Iterator[int]:
    """Numbers above `now`, each about 5 % larger than the one before."""
    n = now + 1
    while n <= MOST_RUNS:
        yield n
        n = max(n + 1, round(1.05 * n))


def settling_text(found: Finding, rows: Sequence[Row]) -> str:
    """What an open claim would take, with the time of runs like its own; empty for other verdicts, or if unknown."""
    if found.verdict != "open" or found.runs_to_decide is None:
        return ""
    if math.isinf(found.runs_to_decide):
        return f"not by up to {MOST_RUNS} runs of each scheme like these"
    more = max(math.ceil(found.runs_to_decide) - found.runs, 1)
    timed = [row for row in rows if row.get("seconds")]
    took = f" ({_time(more, timed)})" if timed else ""
    return f"about {counted(more, 'more run')}{took}, if means and scatter stay as they are"


def _time(runs: int, rows: Sequence[Row]) -> str:
    minutes = max(1, round(runs * fmean(float(row["seconds"]) for row in rows) / 60.0))
    devices = " or ".join(dict.fromkeys(str(row["device"]) for row in rows if row.get("device")))
    time = counted(minutes, "minute") if minutes < 120 else f"{minutes / 60.0:.0f} hours"
    return f"{time} on {devices}" if devices else time
