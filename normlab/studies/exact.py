"""Exact statistics for small samples: Clopper-Pearson, Fisher's exact test, correlations, orders; no scipy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

from normlab.errors import NormLabError

_HALVINGS = 60


def share_bounds(events: int, runs: int, level: float) -> tuple[float, float]:
    """Lower and upper Clopper-Pearson bound of a proportion, each one-sided at `level`."""
    if not 0 <= events <= runs or runs < 1:
        raise NormLabError(f"a share needs 0 <= events <= runs and at least one run, got {events} of {runs}")
    rest = 1.0 - level
    low = 0.0 if events == 0 else _root(lambda p: at_least(events, runs, p) - rest)
    high = 1.0 if events == runs else _root(lambda p: rest - (1.0 - at_least(events + 1, runs, p)))
    return low, high


def at_least(events: int, runs: int, share: float) -> float:
    """P(X ≥ events) of a binomial X."""
    return math.fsum(math.comb(runs, k) * share**k * (1.0 - share) ** (runs - k) for k in range(events, runs + 1))


def fisher_exact(more: tuple[int, int], fewer: tuple[int, int]) -> float:
    """One-sided p-value of Fisher's exact test: the share of `more` (events, runs) is not above that of `fewer`."""
    (a, n), (b, m) = more, fewer
    events, ways = a + b, 0
    term = math.comb(n, a) * math.comb(m, b)
    for k in range(a, min(n, events) + 1):
        ways += term
        # C(n, k+1) C(m, events-k-1) from C(n, k) C(m, events-k): the division leaves no remainder.
        term = term * (n - k) * (events - k) // ((k + 1) * (m - events + k + 1))
    return ways / math.comb(n + m, events)


def least_p(n: int, m: int) -> float:
    """The smallest possible p-value for these numbers of runs: all of the first, none of the second."""
    return fisher_exact((n, n), (0, m))


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
    """Pearson correlation; 0 if one of them is constant."""
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    a, b = [value - mean_x for value in x], [value - mean_y for value in y]
    size = math.sqrt(math.fsum(v * v for v in a) * math.fsum(v * v for v in b))
    return math.fsum(p * q for p, q in zip(a, b, strict=True)) / size if size else 0.0


def rank_values(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share their mean rank."""
    ordered = sorted(values)
    first = {value: ordered.index(value) for value in set(values)}
    return [first[value] + (ordered.count(value) + 1) / 2 for value in values]


def correlation_interval(r: float, free: float, level: float, *, of_ranks: bool = False) -> tuple[float, float]:
    """Fisher's interval; `free` is the number of points minus three and minus the fitted parameters."""
    inside = max(-1 + 1e-12, min(1 - 1e-12, r))
    half = quantile(level) * correlation_error(free, of_ranks=of_ranks)
    return math.tanh(math.atanh(inside) - half), math.tanh(math.atanh(inside) + half)


def correlation_error(free: float, *, of_ranks: bool = False) -> float:
    """Standard error of Fisher's z; of ranks the variance is 1.06 times as large (Fieller, Hartley, Pearson 1957)."""
    return math.sqrt((1.06 if of_ranks else 1.0) / free)


def quantile(level: float) -> float:
    """z with P(|Z| ≤ z) = level for a standard normal Z."""
    return NormalDist().inv_cdf((1.0 + level) / 2.0)


def kendall_tau(values: Sequence[float]) -> float:
    """Kendall's tau of a sequence against its positions: 1 if it rises throughout, -1 if it falls; ties count zero."""
    pairs = list(itertools.combinations(values, 2))
    return sum((b > a) - (b < a) for a, b in pairs) / len(pairs)


def order_p_values(values: Sequence[float]) -> tuple[float, float]:
    """Shares of all orders of the values whose tau is at least, and at most, that of the given order."""
    tau = kendall_tau(values)
    all_taus = [kendall_tau(order) for order in itertools.permutations(values)]
    return sum(t >= tau for t in all_taus) / len(all_taus), sum(t <= tau for t in all_taus) / len(all_taus)


def _root(rising: Callable[[float], float]) -> float:
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if rising(middle) < 0.0 else (low, middle)
    return (low + high) / 2.0
