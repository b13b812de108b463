"""Find branches that read a detached state: no gradient flows back from them, as after a stray detach().

A branch is cut where the output of its last matrix depends on the block's state, and autograd has no path back to it.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from normlab.probes.branches import find_branches
from normlab.probes.replay import RecordedCall

_MOVE = 1e-2
"""Relative change of the state."""


def cut_branches(call: RecordedCall) -> tuple[str, ...]:
    """The branches of a block that pass no gradient to its input."""
    branches = find_branches(call)
    ends = [end for branch in branches for end in branch.ends.values()]
    state = call.state.detach().requires_grad_()
    with torch.enable_grad():
        outputs = _outputs(call.with_state(state), ends)
        cut = {end for end, output in outputs.items() if not _leads_to(output, state)}
    if not cut:
        return ()
    with torch.no_grad():
        noise = torch.randn(state.shape, generator=torch.Generator().manual_seed(0)).to(state)
        moved = _outputs(call.with_state(state + _MOVE * state.std() * noise), ends)
    cut = {end for end in cut if end in moved and not torch.equal(moved[end], outputs[end])}
    return tuple(branch.name for branch in branches if set(branch.ends.values()) <= cut)


def _outputs(call: RecordedCall, ends: list[nn.Module]) -> dict[nn.Module, Tensor]:
    """The last output of each module."""
    found: dict[nn.Module, Tensor] = {}

    def keep(end: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            found[end] = output

    with ExitStack() as hooks:
        for end in ends:
            hooks.callback(end.register_forward_hook(keep).remove)
        call.repeat()
    return found


def _leads_to(output: Tensor, state: Tensor) -> bool:
    """Whether a gradient of `output` would reach the leaf `state`: a walk through the graph, nothing is computed."""
    waiting, seen = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if getattr(node, "variable", None) is state:
            return True
        seen.add(node)
        waiting += [after for after, _ in node.next_functions]
    return False
