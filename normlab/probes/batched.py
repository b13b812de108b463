"""Batch small measurements with vmap, to save kernel launches on a GPU.

On a CPU every call runs at once. On a GPU calls wait for others of the same shapes until they hold `ROOM` entries, or
until `finish`; then each operation runs once for all of them. A callback takes each result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from normlab.probes.hidden_state import HiddenState
from normlab.probes.measures import Like

Numbers = dict[str, Tensor]

ROOM = 2**25
"""Largest number of entries waiting on a GPU: 64 MiB in half precision, about ten times that when they run."""


class Together:
    """Collects calls of `function`, which returns tensors by name, and runs calls of equal shapes as one batch."""

    def __init__(self, function: Callable[..., Numbers]):
        self._function = function
        self._waiting: dict[object, list[_Asked]] = {}

    def ask(self, then: Callable[[Numbers], None], *inputs: Like) -> None:
        """Call `then(function(*inputs))` now or later. Inputs that may change meanwhile must come from `kept`."""
        tensors = [x for x in inputs if isinstance(x, Tensor) and gathers(x.device)]
        if len(tensors) < len(inputs):
            self._tell([_Asked(inputs, then)])
            return
        kind = tuple((x.shape, x.dtype, x.device) for x in tensors)
        waiting = self._waiting.setdefault(kind, [])
        waiting.append(_Asked(inputs, then))
        if len(waiting) * sum(x.numel() for x in tensors) >= ROOM:
            self._tell(self._waiting.pop(kind))

    def finish(self) -> None:
        """Run all calls that are still waiting."""
        waiting, self._waiting = self._waiting, {}
        for calls in waiting.values():
            self._tell(calls)

    def _tell(self, calls: list[_Asked]) -> None:
        for call, answer in zip(calls, self._answer(calls), strict=True):
            call.then(answer)

    def _answer(self, calls: list[_Asked]) -> list[Numbers]:
        with torch.no_grad(), torch.autocast(calls[0].inputs[0].device.type, enabled=False):
            if len(calls) == 1:
                return [self._function(*calls[0].inputs)]
            columns = zip(*(call.inputs for call in calls), strict=True)
            answers = torch.vmap(self._function)(*(torch.stack(column) for column in columns))
        return [{name: rows[place] for name, rows in answers.items()} for place in range(len(calls))]


class _Asked(NamedTuple):
    inputs: tuple[Like, ...]
    then: Callable[[Numbers], None]


def kept(part: Tensor, whole: Tensor) -> Like:
    """An input for `ask` that is not changed later: a copy if calls wait, otherwise the `HiddenState` of `part`.

    A `HiddenState` caches what several measures have in common.
    """
    if not gathers(part.device):
        return HiddenState(part)
    shares = part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    return part.clone() if shares else part


def gathers(device: torch.device) -> bool:
    """Whether calls are collected into batches on this device."""
    return device.type == "cuda"
