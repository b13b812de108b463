"""Run all structural tests of one live model on a few samples; the model is restored afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from normlab.checks.judge.thresholds import Thresholds
from normlab.checks.structure import batches
from normlab.checks.structure.detached import cut_branches
from normlab.checks.structure.entry_norm import entry_exponent
from normlab.checks.structure.final_norm import logit_exponent
from normlab.checks.structure.leaks import Leak, TokenSlices, find_leak, hides_later_keys
from normlab.checks.structure.scaling import OWN_SIZES, BlockScaling, block_scaling
from normlab.errors import NormLabError, reason
from normlab.probes.blocks import BlockStack, find_stacks
from normlab.probes.replay import capture
from normlab.probes.sharded import is_sharded
from normlab.probes.start import MOST_PARAMETERS, Start, measure_start
from normlab.probes.untouched import at_rest, untouched
from normlab.targets.target import Target
from normlab.targets.tasks import TokenTask


@dataclass
class Structure:
    """Results of the structural tests of one stack. What could not run is None or empty; `missing` has the reason."""

    stack: BlockStack
    scalings: list[BlockScaling | None] = field(default_factory=list)
    """Scaling of each block."""
    logit_exponent: float | None = None
    own_logit_exponent: float | None = None
    """The same at the state's own size."""
    cuts: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Branches that pass no gradient, by block."""
    future: Leak | None = None
    must_hide: bool | None = None
    """Whether later tokens must be hidden; None if unknown."""
    batch: Leak | None = None
    missing: dict[str, str] = field(default_factory=dict)
    """Verdicts that could not be reached, with the reason."""


def inspect_structure(target: Target, model: nn.Module, limits: Thresholds, seed: int = 0) -> list[Structure]:
    """All structural tests except the start, which needs a model of its own: one record a stack, leaks in the first."""
    stacks = find_stacks(model, target.blocks)
    found = [Structure(stack) for stack in stacks]
    if is_sharded(model):
        found[0].missing = dict.fromkeys(("structure", "leaks"), "weights are shared out over processes")
        return found
    batch = _runnable(target, model, next(iter(target.batches(seed))))
    for one in found:
        _attempt(one, "structure", lambda one=one: _blocks(one, target, model, batch, limits))
    if len(stacks) == 1:
        _attempt(found[0], "structure", lambda: _first_block(found[0], target, model, batch, limits))
    _attempt(found[0], "leaks", lambda: _leaks(found[0], target, model, stacks, batch, limits))
    return found


def inspect_start(target: Target, size: str, depth: int | None = None) -> tuple[list[Start], str, bool]:
    """Starts of the models that a target offers, why one was left out, and whether their weights are fresh."""
    found: list[Start] = []
    offered = target.fresh(size, depth)
    for fresh in offered:
        if fresh.parameters > MOST_PARAMETERS:
            least = f"{fresh.parameters / 1e9:.1f}B parameters at {fresh.name}, {MOST_PARAMETERS / 1e9:g}B are built"
            return found, least, fresh.is_fresh
        try:
            found += measure_start(fresh)
        except (Exception, SystemExit) as error:
            return found, f"it does not answer to token ids alone ({reason(error)})", fresh.is_fresh
    return found, "", all(fresh.is_fresh for fresh in offered)


def _runnable(target: Target, model: nn.Module, batch: Any) -> Any:
    """A few samples of a batch, or all of them if the model does not run on fewer."""
    small = batches.cut(batch)
    if small is batch:
        return batch
    try:
        with at_rest(model):
            target.loss(model, small)
    except (Exception, SystemExit):
        return batch
    return small


def _attempt(found: Structure, verdict: str, work: Callable[[], None]) -> None:
    """Run a test that a foreign model may not support: if it raises, the verdict stays open, with the reason."""
    try:
        work()
    except NormLabError as error:
        found.missing[verdict] = str(error)
    except (Exception, SystemExit) as error:
        found.missing[verdict] = reason(error)


def _blocks(found: Structure, target: Target, model: nn.Module, batch: Any, limits: Thresholds) -> None:
    stack = found.stack
    with at_rest(model):
        calls = capture(stack, stack.blocks, lambda: target.loss(model, batch))
        found.scalings = [
            call and block_scaling(call, limits.norm_exponent, is_first=k == 0) for k, call in enumerate(calls)
        ]
        cuts = {place: cut_branches(call) for place, call in enumerate(calls) if call}
        found.cuts = {place: names for place, names in cuts.items() if names}
        logits = lambda: target.logits(model, batch)  # noqa: E731
        found.logit_exponent = logit_exponent(stack, logits)
        found.own_logit_exponent = logit_exponent(stack, logits, OWN_SIZES)


def _first_block(found: Structure, target: Target, model: nn.Module, batch: Any, limits: Thresholds) -> None:
    """Count a norm before the stack as the first block's own, where that is the only block without one."""
    limit = limits.norm_exponent
    bare = [place for place, one in enumerate(found.scalings) if one and not one.has_norm(limit)]
    if bare != [0]:
        return
    with at_rest(model):
        exponent = entry_exponent(model, found.stack, lambda: target.loss(model, batch))
    if exponent is not None and exponent <= limit:
        found.scalings[0] = BlockScaling(None, exponent)


def _leaks(
    found: Structure, target: Target, model: nn.Module, stacks: list[BlockStack], batch: Any, limits: Thresholds
) -> None:
    count, length = batches.samples(batch), batches.length(batch)
    if count is None or count < 2:
        found.missing["leaks"] = "a batch of two samples or more is needed, with the samples in its first dimension"
        return
    with untouched(model):
        run = lambda: target.loss(model, batch)  # noqa: E731
        found.must_hide = _must_hide(target, hides_later_keys(model, run), len(stacks))
        found.batch = find_leak(model, stacks, run, TokenSlices("batch", count, length), limits.leak)
        if found.must_hide is not False and length and length >= 4:
            found.future = find_leak(model, stacks, run, TokenSlices("future", count, length), limits.leak)
    if found.batch is None and found.future is None:
        found.missing["leaks"] = "no module returns a state of all samples"


def _must_hide(target: Target, hidden: list[bool], stacks: int) -> bool | None:
    """Whether later tokens must be hidden: a decoder says so itself, or by attention that hides them somewhere."""
    if target.is_decoder is not None:
        return target.is_decoder
    if isinstance(target.task, TokenTask):
        return True if any(hidden) else None if target.task.has_head else False
    # An encoder with a decoder behind it hides later tokens in one of the two.
    return any(hidden) and stacks == 1
