"""Train a model for a few steps on one batch and record the RMS of every module's output, and of its change.

As in mup's coord_check the batch is the same at every step, so that h_t - h_0 is the effect of training alone. Outputs
are measured in a pass of their own, in evaluation mode: dropout would be taken for a change.

A module inside blocks is recorded once for all blocks, as the root mean square over them, under its path with a star in
place of the block's number. The hidden state is recorded after the last block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from normlab.checks.coordinates.records import LOGITS
from normlab.checks.judge.verdict import plain
from normlab.probes.blocks import BlockStack, eager, find_stacks, walk
from normlab.probes.hidden_state import spaced
from normlab.probes.measures import rms
from normlab.probes.outputs import first_state, tensors
from normlab.probes.profile import Number
from normlab.probes.untouched import at_rest
from normlab.targets.target import Target

LAST = "(last)"
"""Suffix of a stack's name that stands for its state after the last block."""

Outputs = dict[str, list[torch.Tensor]]
"""Outputs by module name, a sample of their tokens: one tensor for each block and call."""

_TOKENS = 256
"""Largest number of tokens compared; those of step 0 are kept for every module."""


@dataclass(frozen=True)
class ModuleTrace:
    """RMS of a module's output at steps 0 to T, and of its change since step 0 at steps 1 to T."""

    sizes: tuple[Number, ...]
    changes: tuple[Number, ...]


@dataclass(frozen=True)
class _Output:
    """A module whose output is recorded, and how its hidden state is read."""

    name: str
    read: Callable[[torch.Tensor], torch.Tensor]


def trace(target: Target, model: nn.Module, optimiser: Optimizer, *, steps: int, seed: int) -> dict[str, ModuleTrace]:
    """Take `steps` optimiser steps on the first batch of the seed; traces by module, in the order of the forward pass.

    A loss or gradient that is not finite ends the training: later values are None.
    """
    batch = next(target.batches(seed))
    places = _places(model, target.blocks)
    start = _look(target, model, batch, places)
    rows = [_compare(start, start)]
    for _ in range(steps):
        if not _step(target, model, optimiser, batch):
            break
        rows.append(_compare(_look(target, model, batch, places), start))
    return {name: _traced([row[name] for row in rows], steps) for name in rows[0] if all(name in row for row in rows)}


def _step(target: Target, model: nn.Module, optimiser: Optimizer, batch: Any) -> bool:
    """One optimiser step; returns False, without a step, if the loss or a gradient is not finite."""
    optimiser.zero_grad()
    loss = target.loss(model, batch)
    loss.backward()
    norms = [parameter.grad.abs().max() for parameter in model.parameters() if parameter.grad is not None]
    if not bool(torch.isfinite(torch.stack([loss.detach(), *(norm.to(loss.device) for norm in norms)])).all()):
        return False
    optimiser.step()
    target.after_step(model)
    return True


def _places(model: nn.Module, pattern: str | None) -> dict[nn.Module, _Output]:
    """Modules to record: all with parameters of their own, and the last block of every stack."""
    model, stacks = eager(model), find_stacks(model, pattern)
    found: dict[nn.Module, _Output] = {}
    for path, module in walk(model, ""):
        if next(module.parameters(recurse=False), None) is not None:
            found.setdefault(module, _Output(_starred(path, stacks), _as_it_is))
    # A block that has parameters of its own is recorded as a state.
    return found | {stack.blocks[-1]: _Output(f"{stack.name} {LAST}", stack.hidden) for stack in stacks}


def _starred(path: str, stacks: list[BlockStack]) -> str:
    for stack in stacks:
        block = stack.block_of(path)
        if block is not None:
            return f"{stack.name}.*{path.removeprefix(stack.names[block])}"
    return path


def _as_it_is(output: torch.Tensor) -> torch.Tensor:
    return output


def _look(target: Target, model: nn.Module, batch: Any, places: dict[nn.Module, _Output]) -> Outputs:
    """Outputs of one forward pass, by module name: one for each call of the module."""
    seen: Outputs = {}

    def keep(place: _Output) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if next(tensors(output), None) is not None:
                seen.setdefault(place.name, []).append(_sample(place.read(first_state(output, args, kwargs))))

        return hook

    with at_rest(model), torch.no_grad(), ExitStack() as hooks:
        for module, place in places.items():
            hooks.callback(module.register_forward_hook(keep(place), with_kwargs=True).remove)
        logits = target.logits(model, batch)
        if logits is None:
            target.loss(model, batch)
    return seen if logits is None else _with_logits(seen, _sample(logits))


def _with_logits(seen: Outputs, logits: torch.Tensor) -> Outputs:
    """Outputs with the logits last, in place of the head's if it returned them; hidden states are not logits."""
    same = {name for name, found in seen.items() if len(found) == 1 and torch.equal(found[0], logits)}
    if any(name.endswith(LAST) for name in same):
        return seen
    return {name: found for name, found in seen.items() if name not in same} | {LOGITS: [logits]}


def _sample(output: torch.Tensor) -> torch.Tensor:
    """At most 256 tokens of an output, as a copy: a later module may change it in place."""
    rows = output.detach().reshape(-1, output.shape[-1])
    if len(rows) > _TOKENS:
        rows = rows[spaced(len(rows), _TOKENS, rows.device)]
    return rows.float().clone()


def _compare(now: Outputs, start: Outputs) -> dict[str, tuple[float, float]]:
    """(size, change) of every output, over all blocks and calls."""
    return {
        name: (_pooled(now[name]), _pooled([a - b for a, b in zip(now[name], first, strict=True)]))
        for name, first in start.items()
        # Experts may get other tokens than at the start: their outputs cannot be compared.
        if [output.shape for output in now.get(name, [])] == [output.shape for output in first]
    }


def _pooled(outputs: list[torch.Tensor]) -> float:
    """Root mean square over all outputs; NaN if one of them is not finite."""
    if not all(bool(torch.isfinite(output).all()) for output in outputs):
        return math.nan
    return math.sqrt(sum(float(rms(output)) ** 2 for output in outputs) / len(outputs))


def _traced(rows: list[tuple[float, float]], steps: int) -> ModuleTrace:
    values = rows + [(math.nan, math.nan)] * (steps + 1 - len(rows))
    return ModuleTrace(tuple(plain(size) for size, _ in values), tuple(plain(change) for _, change in values[1:]))
