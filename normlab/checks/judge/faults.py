"""Verdicts on single faults: blocks, attention heads and activations that differ from all others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from normlab.checks.judge.blame import beside, blame
from normlab.checks.judge.thresholds import Thresholds
from normlab.checks.judge.verdict import Snapshot, Verdict, over, plain, unmeasured, upper
from normlab.probes.profile import LOW_ENTROPY, Number, Series

_LARGEST_TURN = 100.0
"""Limit of the tangent: beyond it nothing is left of the block's input."""

UNSEEN = "no softmax over keys was seen in a block"
"""Why attention was not measured: no known attention function was called."""

_NAMED = 6
"""Largest number of blocks whose heads are listed."""

Head = tuple[int, int]
"""Block and head."""


def low_entropy(view: Snapshot, limits: Thresholds) -> Verdict:
    """Whether heads attend to a single key: many heads of a block, or any head if all others are far from it."""
    shares = view.mean(lambda profile: profile.attn_entropy_low_share)
    if not any(share is not None for share in shares):
        return unmeasured("attention", UNSEEN)
    label = "share of heads that see one key"
    verdict = upper("attention", "low entropy", label, shares, view, limits.low_entropy_heads)
    heads = _heads(view)
    low = [head for head, entropy in heads.items() if entropy < LOW_ENTROPY]
    rest = min((entropy for entropy in heads.values() if entropy >= LOW_ENTROPY), default=0.0)
    if verdict.level == "ok" and low and rest >= limits.entropy_gap * LOW_ENTROPY:
        return _apart(low, heads, rest, view)
    blamed = [head for head in low if head[0] in verdict.layers]
    return dataclasses.replace(verdict, words=verdict.words + _listed(blamed)) if blamed else verdict


def uneven(view: Snapshot, limits: Thresholds) -> Verdict:
    """Whether one block differs from its neighbours in its update, angle, gradient gain or weights.

    What the first block does counts by its weights alone: the rest depends on the size of the embeddings.
    """
    matrices = {f"matrix {path}": beside(sizes) for path, sizes in _matrices(view).items()}
    # Weights that differ are the cause of all else that does.
    at_fault = any(over(factor, limits.uneven) for factors in matrices.values() for factor in factors)
    judged = matrices if at_fault else matrices | _functions(view)
    found = [(factor, kind) for kind, factors in judged.items() for factor in factors if factor is not None]
    if not found:
        return unmeasured("uneven")
    largest, kind = max(found)
    factors = [max((x for x in place if x is not None), default=None) for place in zip(*judged.values(), strict=True)]
    layers = tuple(place for place, factor in enumerate(factors) if over(factor, limits.uneven))
    words = f"a block's {kind} differs from all its neighbours' by a factor of {largest:.3g}"
    words += f" ({limits.uneven:g} is the limit) at step {view.step}{blame(layers, view.depth)}"
    return Verdict(
        name="uneven",
        finding="uneven" if layers else "fine",
        level="warn" if layers else "ok",
        value=plain(largest),
        threshold=limits.uneven,
        layers=layers,
        words=words,
    )


def _heads(view: Snapshot) -> dict[Head, float]:
    """The entropy of every head, mean over seeds."""
    found: dict[Head, list[float]] = {}
    for profile in view.profiles:
        for block, entropies in enumerate(profile.attn_heads):
            for head, entropy in enumerate(entropies):
                found.setdefault((block, head), []).extend([] if entropy is None else [entropy])
    return {head: sum(values) / len(values) for head, values in found.items() if values}


def _apart(low: Sequence[Head], heads: Mapping[Head, float], rest: float, view: Snapshot) -> Verdict:
    layers = tuple(dict.fromkeys(block for block, _ in low))
    least = min(heads[head] for head in low)
    counted = "1 head sees" if len(low) == 1 else f"{len(low)} heads see"
    words = f"{counted} one key, entropy {least:.3g} ({LOW_ENTROPY:g} is the least) and above {rest:.2f} for all others"
    return Verdict(
        name="attention",
        finding="low entropy",
        level="warn",
        value=least,
        threshold=LOW_ENTROPY,
        layers=layers,
        words=f"{words} at step {view.step}{blame(layers, view.depth)}{_listed(low)}",
    )


def _listed(heads: Sequence[Head]) -> str:
    """Heads as text: (block 5: head 2; block 7: heads 0, 3)."""
    groups = [(block, [head for _, head in group]) for block, group in groupby(heads, key=lambda pair: pair[0])]
    named = [f"block {b}: head{'s' if len(h) > 1 else ''} {', '.join(map(str, h))}" for b, h in groups[:_NAMED]]
    return f" ({'; '.join(named)}{'; ...' if len(groups) > _NAMED else ''})"


def _functions(view: Snapshot) -> dict[str, Series]:
    """Ratio of each block's update, gradient gain and angle to those of its neighbours, without the first block."""
    kinds = {
        "increment": view.mean(lambda profile: profile.branch_rms),
        "gradient gain": [None, *view.mean(lambda profile: profile.gain)[1:]],
        "turn": [_tangent(angle) for angle in view.mean(lambda profile: profile.ang)],
    }
    return {kind: [None, *beside(series)[1:]] for kind, series in kinds.items()}


def _tangent(angle: Number) -> Number:
    """Tangent of the angle by which a block turns tokens: the update orthogonal to the state over the state."""
    if angle is None:
        return None
    return math.tan(angle) if angle < math.atan(_LARGEST_TURN) else _LARGEST_TURN


def _matrices(view: Snapshot) -> dict[str, Series]:
    """The RMS of every matrix of a block, from block to block."""
    paths = view.profiles[0].weight_rms
    missing: Series = [None] * view.depth
    return {path: view.mean(lambda profile, path=path: profile.weight_rms.get(path, missing)) for path in paths}
