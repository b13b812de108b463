"""The scale test: scale the last matrix of one branch and measure how the gradient through the branch changes.

In x + F(x) the gradient through F is proportional to F's last matrix; with a norm behind F it does not depend on it at
all; with a norm behind the sum it is something in between. So the test tells which kind of scheme a block uses, in any
model, without knowing its name. One branch at a time, with the block's input as a real pass left it (enlarged
where it is small): were all branches scaled at once, the state would grow with them and hide what happens.

For each branch the others are held fixed, and the skip around it is left out:

    gain(c) = ‖Jᵀv‖ / ‖v‖,    J = derivative of the block's output by its input, through this branch alone, v random
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normlab.checks.judge.blame import blocks as named
from normlab.checks.judge.verdict import plain
from normlab.checks.theory.records import ScaleFinding, ScaleRow
from normlab.probes import measures
from normlab.probes.blocks import BlockStack
from normlab.probes.branches import Branch, detached, find_branches, vjp
from normlab.probes.outputs import tensors
from normlab.probes.replay import RecordedCall, again, capture
from normlab.probes.untouched import at_rest

FACTORS = (0.5, 1.0, 2.0, 4.0)

SCALE_FREE, PROPORTIONAL = 0.05, 0.95
"""A slope below the first is scale-free, one above the second proportional."""

_LEAST = 0.1
"""Least RMS of a branch in the test: its norm's epsilon is then 10⁻³ of its variance at most, for 10⁻⁵ and less."""

_LEAST_STATE = 0.5
"""Least RMS of the state: a branch that drowns its skip would look scale-free behind any norm."""

_SEED = 2510


def scale_test(
    model: nn.Module, stack: BlockStack, run: Callable[[], Any], *, blocks: Sequence[int] | None = None
) -> list[ScaleRow]:
    """The rows of all branches of some blocks (the first, the middle and the last one) in the pass that `run` makes.

    The model is restored afterwards; dropout and checkpointing are off meanwhile.
    """
    depth = len(stack.blocks)
    places = sorted(set(blocks if blocks is not None else (0, depth // 2, depth - 1)))
    with at_rest(model):
        calls = capture(stack, [stack.blocks[place] for place in places], run)
        return [row for place, call in zip(places, calls, strict=True) if call for row in _rows(place, call)]


def summary(rows: Sequence[ScaleRow]) -> str:
    """The scale test in one line."""
    known = [row for row in rows if row.slope is not None]
    if not known:
        return "no branch could be tested: " + ("all of them return zero" if rows else "no last matrix was found")
    groups = [[row for row in known if row.finding == finding] for finding in _MEANINGS]
    return "; ".join(_group_words(group, len(known)) for group in groups if group)


_MEANINGS: dict[ScaleFinding, str] = {
    "scale-free": "their gradient does not follow the size of the last matrix: weight growth cannot blow it up",
    "partly normalised": "their gradient follows the last matrix in part, as with a norm behind the sum",
    "proportional": "their gradient grows with the last matrix, as in Pre-Norm",
}


def _group_words(rows: Sequence[ScaleRow], count: int) -> str:
    finding = rows[0].finding
    slopes = [row.slope for row in rows if row.slope is not None]
    low, high = f"{min(slopes):z.2f}", f"{max(slopes):z.2f}"
    span = f"slope {low}" if low == high else f"slopes {low} to {high}"
    who = f"all {count} branches tested" if len(rows) == count else f"{len(rows)} of {count} branches"
    if len(rows) < count:
        where = sorted({row.block for row in rows})
        who += f" ({named(where, max(where) + 2)})"
    return f"{who} {finding} ({span}): {_MEANINGS[finding]}"


def _rows(place: int, call: RecordedCall) -> Iterator[ScaleRow]:
    branches = find_branches(call)
    for branch in branches:
        others = [end for other in branches if other is not branch for end in other.ends.values()]
        yield _row(place, branch, others, call)


@dataclass
class _Cut:
    """Hooks that isolate one branch of a block, and record the inputs of its last matrices."""

    factor: float = 1.0
    before: list[Tensor] = field(default_factory=list)
    """Inputs of the last matrices, with their autograd graph."""
    leaves: list[Tensor] = field(default_factory=list)
    """The same values as leaves of the graph."""
    sizes: list[Tensor] = field(default_factory=list)
    """RMS of the branch's output, unscaled."""

    def enter(self, _end: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        entering = next(tensors((args, kwargs)), None)
        if entering is None:
            return args, kwargs
        self.before.append(entering)
        self.leaves.append(entering.detach().requires_grad_())
        return again(args, entering, self.leaves[-1]), again(kwargs, entering, self.leaves[-1])

    def leave(self, end: nn.Module, _args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):
            return output
        self.sizes.append(measures.rms(output.detach()))
        if self.factor == 1.0:
            return output
        bias = getattr(end, "bias", None)
        bias = bias if isinstance(bias, Tensor) and bias.shape == output.shape[-1:] else 0.0
        return (output - bias) * self.factor + bias


def _row(place: int, branch: Branch, others: Sequence[nn.Module], call: RecordedCall) -> ScaleRow:
    gain, _ = branch_gain(call, branch, others, 1.0)
    call = call.with_state(call.state * _lift(float(measures.rms(call.state)), _LEAST_STATE))
    _, size = branch_gain(call, branch, others, 1.0)
    factors = tuple(_lift(FACTORS[0] * size, _LEAST) * factor for factor in FACTORS)
    gains = [branch_gain(call, branch, others, factor)[0] for factor in factors]
    fit = all(math.isfinite(g) and g > 0.0 for g in gains)
    slope = float(np.polyfit(np.log(factors), np.log(gains), 1)[0]) if fit else None
    return ScaleRow(
        block=place,
        branch=branch.name,
        gain=plain(gain),
        factors=factors,
        gains=tuple(map(plain, gains)),
        slope=slope,
        finding=_finding(slope),
    )


def _lift(size: float, least: float) -> float:
    """The smallest power of two, at least 1, that lifts a size to the least one; 1 where there is nothing to lift."""
    return 2.0 ** max(0, math.ceil(math.log2(least / size))) if 0.0 < size < math.inf else 1.0


def branch_gain(call: RecordedCall, branch: Branch, others: Sequence[nn.Module], factor: float) -> tuple[float, float]:
    """(‖Jᵀv‖ / ‖v‖ of the branch alone with its last matrices scaled, RMS of what it returns unscaled)."""
    cut = _Cut(factor)
    with ExitStack() as hooks, torch.enable_grad():
        for end in branch.ends.values():
            hooks.callback(end.register_forward_pre_hook(cut.enter, with_kwargs=True).remove)
            hooks.callback(end.register_forward_hook(cut.leave).remove)
        for end in others:
            hooks.callback(end.register_forward_hook(lambda _end, _args, output: detached(output)).remove)
        state = call.state.detach().requires_grad_()
        result = call.with_state(state).repeat()
        v = torch.randn(result.shape, generator=torch.Generator().manual_seed(_SEED)).to(result)
        back = vjp([result], cut.leaves, [v])
        pairs = [(z, g) for z, g in zip(cut.before, back, strict=True) if g is not None and z.requires_grad]
        gradient = vjp([z for z, _ in pairs], [state], [g for _, g in pairs])[0] if pairs else None
    size = float(torch.stack(cut.sizes).max()) if cut.sizes else 0.0
    if gradient is None:
        return 0.0, size
    return float(measures.norm(gradient) / measures.norm(v)), size


def _finding(slope: float | None) -> ScaleFinding:
    if slope is None:
        return "not measured"
    if slope < SCALE_FREE:
        return "scale-free"
    return "proportional" if slope > PROPORTIONAL else "partly normalised"
