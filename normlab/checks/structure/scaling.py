"""Skip gain and norms of a block, measured: how its output depends on the size of the state it is given.

A block is run on the same state at two sizes c, far above the size of what its branches add, and its output is split
into what is proportional to the state and the rest:

    f(c·h) = a·c·h + r(c)

- a is the gain of the skip: 1 for a plain residual block, 0 where a norm stands behind the sum;
- r(c) is what the branches add. Behind a norm, before the branch or after it, it does not depend on c. Without one it
  grows at least like c. It is taken from f(f(c·h)): a block may rely on the norm at the end of the one before it.
  A skip that is no multiple of the state (streams that are mixed, a gate for each channel) leaves a part that grows as
  well, so a rest that grows counts only if a branch's last matrix returns more the larger the state is.

A norm whose epsilon is far above the square of the state works at these sizes, and does nothing at the state's own. So
the same is asked there, of what single branches add to f(f(c·h)) for c = 1 and 2.

Nothing here knows a scheme or a class of norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normlab.norms import widen
from normlab.probes.branches import find_branches
from normlab.probes.replay import RecordedCall

SIZES = (100.0, 1000.0)
"""RMS of the state: large enough to drown what a normalised branch adds, small enough for fp32."""

OWN_SIZES = 1.0, 2.0
"""Factors on the state's own size."""

_KEPT = 2e-5
"""Relative change of a token's length that counts as rounding: such a block only rotates tokens."""

_NO_SKIP = 0.01
"""A gain below this counts as no skip: a norm after the addition leaves 1/c of the state."""

_NOTHING = 1e-30
"""An RMS below this counts as zero."""

_IDLE = 1e-4
"""A branch that adds less than this share of the state is switched off (outputs that start at zero)."""


@dataclass(frozen=True)
class BlockScaling:
    """How the output of one block scales with its input."""

    gain: float | None
    """Gain a of the skip; None if the sum is normalised, the block only rotates, or branches scale with the state."""
    exponent: float
    """Exponent of r(c): 0 with a norm in every branch, 1 without one."""
    branches: tuple[str, ...] = ()
    """Branches that scale with the state."""
    own: Mapping[str, float] = field(default_factory=dict)
    """Exponent of each branch at the state's own size, where norms may be switched off by their epsilon."""

    def has_norm(self, limit: float) -> bool:
        return self.exponent <= limit

    def bounds_state(self, limit: float) -> bool:
        """Whether the block sets or keeps the size of the state, so that nothing behind it needs to."""
        return self.gain is None and self.has_norm(limit)


@torch.no_grad()
def block_scaling(call: RecordedCall, limit: float, *, is_first: bool = False) -> BlockScaling | None:
    """The scaling of the block of a recorded call; None if it cannot be measured. `limit`: exponent with a norm."""
    state = widen(call.state)
    unit = state / state.square().mean().sqrt().clamp_min(1e-30)
    # Embeddings are small until they have been trained: the first block's state is taken as at least of size one.
    own = state if not is_first or state.square().mean() > 1.0 else unit
    inputs = [size * unit for size in SIZES]
    once = [_run(call, x) for x in inputs]
    if any(y.shape != unit.shape for y in once):
        # A first layer that makes several streams of its state cannot be run on what it returns.
        return None
    twice = [_run(call, y) for y in once]
    if any(y.shape != unit.shape or not y.isfinite().all() for y in (*once, *twice)):
        return None
    first, second = _Split(inputs[-1], once[-1]), [_Split(x, y) for x, y in zip(once, twice, strict=True)]
    exponent = _exponent([split.rest for split in second])
    if exponent > limit:
        if _keeps_length(once[-1], inputs[-1]):
            return BlockScaling(None, 0.0)
        growth = _branch_exponents(call, unit)
        following = tuple(name for name, of_branch in growth.items() if of_branch > limit)
        if following or not growth:
            return BlockScaling(None, exponent, following)
        exponent = max(growth.values())
    # A stream whose size the block resets has no skip, whatever its direction has in common with the one before.
    skips = [b for a, b in zip(first.gains, second[-1].gains, strict=True) if abs(a) > _NO_SKIP]
    gain = max(skips, key=lambda gain: abs(gain - 1.0), default=None)
    return BlockScaling(gain, exponent, own=_own_exponents(call, own))


def _own_exponents(call: RecordedCall, state: Tensor) -> dict[str, float]:
    """By branch, the power of the state's size with which what it adds grows, at the size that the state has."""
    with torch.enable_grad():
        branches = find_branches(call)
    inputs = [_run(call, size * state) for size in OWN_SIZES]
    whole = [_run(call, x) for x in inputs]
    found: dict[str, float] = {}
    for branch in branches:
        with ExitStack() as hooks:
            for end in branch.ends.values():
                hooks.callback(end.register_forward_hook(_nothing).remove)
            added = [_spread(y - _run(call, x)) for x, y in zip(inputs, whole, strict=True)]
        # A branch that starts at zero adds nothing; one behind a norm without an epsilon cannot be switched off.
        if all(_NOTHING < size < math.inf for size in added):
            found[branch.name] = math.log(added[1] / added[0]) / math.log(OWN_SIZES[1] / OWN_SIZES[0])
    return found


def _nothing(_end: nn.Module, _args: Any, output: Any) -> Any:
    return torch.zeros_like(output) if isinstance(output, Tensor) else output


def _spread(update: Tensor) -> float:
    """RMS without the mean over tokens, which removes biases."""
    rows = update.flatten(0, -2)
    return float((rows - rows.mean(0)).square().mean().sqrt())


class _Split:
    """f(x) = a·x + rest, with one gain a for every stream, and the RMS of the rest."""

    def __init__(self, state: Tensor, output: Tensor):
        x, y = _streams(state), _streams(output)
        gains = (y * x).sum(1) / x.square().sum(1).clamp_min(1e-30)
        self.gains: list[float] = gains.tolist()
        self.rest = float((y - gains[:, None] * x).square().mean().sqrt())


def _run(call: RecordedCall, state: Tensor) -> Tensor:
    return widen(call.with_state(state.to(call.state.dtype)).repeat())


def _streams(x: Tensor) -> Tensor:
    """(streams, numbers) of a state (B, T, D), or (B, T, S, D) with several streams."""
    return x.movedim(-2, 0).flatten(1) if x.ndim > 3 else x.reshape(1, -1)


def _exponent(rests: Sequence[float]) -> float:
    small, large = (max(rest, 1e-30) for rest in rests)
    if large < _IDLE * SIZES[-1] and small < _IDLE * SIZES[0]:
        return 0.0
    return math.log(large / small) / math.log(SIZES[-1] / SIZES[0])


def _keeps_length(output: Tensor, state: Tensor) -> bool:
    before, after = (x.norm(dim=-1) for x in (state, output))
    return bool(((after / before.clamp_min(1e-30) - 1.0).abs() < _KEPT).all())


def _branch_exponents(call: RecordedCall, unit: Tensor) -> dict[str, float]:
    """By branch, the power of the state's size with which the outputs of its last matrices grow; empty: none found."""
    with torch.enable_grad():
        branches = find_branches(call)
    sizes: dict[nn.Module, list[float]] = {end: [] for branch in branches for end in branch.ends.values()}

    def keep(end: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            sizes[end].append(float(widen(output).square().mean().sqrt()))

    with ExitStack() as hooks:
        for end in sizes:
            hooks.callback(end.register_forward_hook(keep).remove)
        for size in SIZES:
            _run(call, size * unit)
    grown = {end: _exponent(found) for end, found in sizes.items() if len(found) == len(SIZES)}
    return {
        branch.name: max(grown[end] for end in ends)
        for branch in branches
        if (ends := [end for end in branch.ends.values() if end in grown])
    }
