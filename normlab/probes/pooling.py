"""Pool the passes of one step (gradient accumulation) into one profile, as if their batches had been one.

Formula    rms, branch_rms, logits_rms             √ mean of squares
           grad_h                                  √ sum of squares
           max_abs, logit_max                      largest
           outlier_ratio, branch_ratio, kurtosis   from the pooled moments
           all others                              mean
           passes are weighted by their tokens

Equal to one large batch except where a number compares the tokens of a batch with one another: var_data is the mean
over passes, and so is cos_rest; ranks are of the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from normlab.probes.attention import entropy, low_share
from normlab.probes.block_hooks import BlockCall, Boundary, Pass
from normlab.probes.ledger import Ledger
from normlab.probes.measures import ranks
from normlab.probes.profile import BLOCK, BOUNDARY
from normlab.utils.threads import one_thread

Numbers = dict[str, float | None]


def pool(passes: Sequence[Pass], ledger: Ledger) -> dict[str, Any]:
    """Series for a `Profile`, by name."""
    weights = [one.tokens for one in passes]
    # Eigenvalues for the ranks: 4 ms for a matrix of 256 on one thread, ten times as long on many.
    with one_thread():
        boundaries = [_boundary(row, weights, ledger) for row in zip(*map(_boundaries, passes), strict=True)]
    blocks = [_block(row, weights, ledger) for row in zip(*(one.calls for one in passes), strict=True)]
    for before, block in zip(boundaries, blocks, strict=False):
        block["branch_ratio"] = _ratio(block.get("branch_rms"), before.get("rms"))
    series: dict[str, Any] = {name: [row.get(name) for row in boundaries] for name in BOUNDARY}
    series |= {name: [row.get(name) for row in blocks] for name in BLOCK}
    series["top_channels"] = [_channels(row, ledger) for row in zip(*map(_boundaries, passes), strict=True)]
    series["attn_heads"] = [_heads(row, weights, ledger) for row in zip(*(one.calls for one in passes), strict=True)]
    return series


def _boundaries(one: Pass) -> list[Boundary]:
    found = [one.before, *(call.after for call in one.calls)]
    return [boundary for boundary in found if boundary is not None]


def _boundary(row: Sequence[Boundary], weights: Sequence[int], ledger: Ledger) -> Numbers:
    if not all(boundary.values for boundary in row):
        return {}
    looks = [_look(boundary, ledger) for boundary in row]
    pooled: Numbers = {name: mean([look[name] for look in looks], weights) for name in looks[0]}
    pooled["rms"] = root_mean_square([look["rms"] for look in looks], weights)
    pooled["erank"], pooled["stable_rank"] = _ranks(row[0].values.get("gram"), ledger)
    pooled["erank_rest"], _ = _ranks(row[0].values.get("rest_gram"), ledger)
    if "max_abs" in pooled:
        pooled["max_abs"] = _largest([look["max_abs"] for look in looks])
        pooled["outlier_ratio"] = _ratio(pooled["max_abs"], pooled["rms"])
    if "kurtosis" in pooled and len(looks) > 1:
        fourth = mean([look["kurtosis"] * _power(look["rms"], 4) for look in looks], weights)
        pooled["kurtosis"] = _ratio(fourth, _power(pooled["rms"], 4))
    gradients = [_read(boundary.gradient, ledger) for boundary in row if boundary.gradient]
    if gradients:
        pooled["grad_h"] = math.hypot(*(look["grad_h"] for look in gradients))
        pooled["grad_broken"] = mean([look["grad_broken"] for look in gradients], [1] * len(gradients))
    return pooled


def _block(row: Sequence[BlockCall], weights: Sequence[int], ledger: Ledger) -> Numbers:
    pooled: Numbers = {}
    if all(call.values for call in row):
        looks = [_read(call.values, ledger) for call in row]
        pooled = {name: mean([look[name] for look in looks], weights) for name in looks[0]}
        pooled["branch_rms"] = root_mean_square([look["branch_rms"] for look in looks], weights)
    stats = [stats for call in row for stats in call.attention]
    weighed = [weight for call, weight in zip(row, weights, strict=True) for _ in call.attention]
    heads = [ledger.row(one["heads"]) for one in stats]
    pooled["attn_entropy"] = _mean_known([entropy(one) for one in heads], weighed)
    pooled["attn_entropy_low_share"] = _mean_known([low_share(one) for one in heads], weighed)
    pooled |= {name: _mean_known([ledger[one[name]] for one in stats], weighed) for name in ("sink", "theta_p")}
    pooled["logit_max"] = max(_known([ledger[one["logit_max"]] for one in stats]), default=None)
    return pooled


def _heads(row: Sequence[BlockCall], weights: Sequence[int], ledger: Ledger) -> list[float | None]:
    """Entropy of each head: minimum over a block's attention calls (self and cross), mean over passes."""
    passes = [[ledger.row(stats["heads"]) for stats in call.attention] for call in row]
    unknown = math.nan
    least = [[min(_known(head), default=unknown) for head in zip_longest(*one, fillvalue=unknown)] for one in passes]
    return [_mean_known(head, weights) for head in zip_longest(*least, fillvalue=unknown)]


def _look(boundary: Boundary, ledger: Ledger) -> dict[str, float]:
    """The measures of a sample of tokens, corrected by the extremes of all entries."""
    look = {name: ledger[place] for name, place in boundary.values.items() if name in BOUNDARY}
    if boundary.extremes is not None:
        ends = [abs(x) for x in ledger.row(boundary.extremes)]
        if all(map(math.isfinite, ends)):
            look["max_abs"] = max(ends) if boundary.entries else look["max_abs"]
        else:
            # One entry at least, even if no token of the sample holds it.
            look["broken"] = max(look["broken"], 1.0 / boundary.entries)
    return look


def _ranks(place: int | None, ledger: Ledger) -> tuple[float, float] | tuple[None, None]:
    if place is None:
        return None, None
    products = ledger.tensor(place)
    return ranks(products.float().view(math.isqrt(len(products)), -1))


def _channels(row: Sequence[Boundary], ledger: Ledger) -> list[int]:
    rows = [ledger.row(boundary.values["top_channels"]) for boundary in row if "top_channels" in boundary.values]
    return list(dict.fromkeys(int(channel) for found in rows for channel in found if channel >= 0))


def _known(values: Sequence[float]) -> list[float]:
    """Drop NaNs, which stand for attention calls without a row of two visible keys."""
    return [value for value in values if not math.isnan(value)]


def _mean_known(values: Sequence[float], weights: Sequence[int]) -> float | None:
    pairs = [(value, weight) for value, weight in zip(values, weights, strict=True) if not math.isnan(value)]
    return mean(*zip(*pairs, strict=True)) if pairs else None


def _read(places: Mapping[str, int], ledger: Ledger) -> dict[str, float]:
    return {name: ledger[place] for name, place in places.items()}


def mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """Σ w·x / Σ w."""
    # Divided first: sums of huge numbers would overflow.
    total = max(sum(weights), 1)
    return sum(value * (weight / total) for value, weight in zip(values, weights, strict=True))


def root_mean_square(values: Sequence[float], weights: Sequence[int]) -> float:
    """√(Σ w·x² / Σ w)."""
    total = max(sum(weights), 1)
    return math.hypot(*(value * math.sqrt(weight / total) for value, weight in zip(values, weights, strict=True)))


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


def _power(value: float | None, exponent: int) -> float:
    try:
        return math.nan if value is None else value**exponent
    except OverflowError:
        return math.inf


def _ratio(over: float | None, under: float | None) -> float | None:
    if over is None or under is None:
        return None
    if under == 0.0:
        return 0.0 if over == 0.0 else math.inf
    return over / under
