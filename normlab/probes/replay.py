"""Record the calls of blocks in a real forward pass, and repeat them with the same or another state."""

# torch annotates hooks, modules and some tensor functions only in part.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normlab.probes.attention import in_backward
from normlab.probes.blocks import BlockStack
from normlab.probes.outputs import first_state, given_state


@dataclass
class RecordedCall:
    """A recorded call of a block, which can be repeated."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Tensor
    """The hidden state among the arguments."""
    width: int
    """Channels of the hidden state, which the state may hold with other things."""

    def with_state(self, state: Tensor) -> RecordedCall:
        """The same call with another state."""
        args, kwargs = (again(value, self.state, state) for value in (self.args, self.kwargs))
        return RecordedCall(self.block, args, kwargs, state, self.width)

    def repeat(self) -> Tensor:
        """Call the block again; returns the next state."""
        args, kwargs = again(self.args), again(self.kwargs)
        return first_state(self.block(*args, **kwargs), args, kwargs)


def capture(stack: BlockStack, blocks: Sequence[nn.Module], run: Callable[[], Any]) -> list[RecordedCall | None]:
    """The first call of each block in a pass."""
    calls: dict[nn.Module, RecordedCall] = {}

    def keep(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if block not in calls and not in_backward():
            # A copy of caches as they are now: the block is about to write into them.
            args, kwargs = again(args), again(kwargs)
            state = given_state(block, args, kwargs)
            if state is not None:
                calls[block] = RecordedCall(block, args, kwargs, state, stack.hidden(state).shape[-1])

    with ExitStack() as hooks, torch.no_grad():
        for block in blocks:
            hooks.callback(block.register_forward_pre_hook(keep, with_kwargs=True).remove)
        run()
    return [calls.get(block) for block in blocks]


def again(value: Any, old: Tensor | None = None, new: Tensor | None = None) -> Any:
    """A copy of arguments: tensors shared, containers new, all else deep-copied; `new` replaces `old`."""
    if isinstance(value, Tensor):
        return new if new is not None and value is old else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(again(part, old, new) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(again(part, old, new) for part in value)
    if type(value) is dict:
        return {name: again(part, old, new) for name, part in value.items()}
    return copy.deepcopy(value)
