"""Between two looks: which block was the first to return a value that is not finite, and at which step.

Every block notes the ends of what it returned: one read of each hidden state, well below a percent of a step. The notes
travel to the host on their own time; they are read when they have arrived, so that nothing ever waits for them.
Compiled code is not listened to, for that would split it or compile it anew; there the loss says that something broke.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn

from normlab.probes.attention import in_backward
from normlab.probes.block_hooks import tensors
from normlab.probes.blocks import find_stacks
from normlab.probes.measures import extremes
from normlab.probes.probe import loss_and_logits
from normlab.probes.sharded import local
from normlab.utils.host_copy import HostCopy

_LOSS = "the loss"


class Broken(NamedTuple):
    """Where and when something was not finite."""

    step: int
    where: str


class Alarm:
    """Listens to the blocks of a model, and to the losses that it is told."""

    def __init__(self, model: nn.Module, pattern: str | None = None):
        self._model = model
        stacks = find_stacks(model, pattern)
        named = {block: name for stack in stacks for name, block in zip(stack.names, stack.blocks, strict=True)}
        self._named = {} if _is_compiled(model) else named
        self._heard: list[tuple[str, torch.Tensor]] = []
        self._travelling: deque[_Notes] = deque()

    def listen(self, hooks: ExitStack) -> None:
        """Install the hooks for one step; `hooks` takes them off."""
        for block, name in self._named.items():
            hooks.callback(block.register_forward_hook(self._keeper(name)).remove)
        hooks.callback(self._model.register_forward_hook(self._on_output).remove)

    def tell(self, loss: torch.Tensor) -> None:
        """What is said of a loss counts as well."""
        self._heard.append((_LOSS, extremes(loss.detach().reshape(-1))))

    def send(self, step: int) -> None:
        """The step is over: let its notes travel."""
        by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
        for name, ends in self._heard:
            by_device.setdefault(ends.device, []).append((name, ends))
        for heard in by_device.values():
            self._travelling.append(_Notes(step, heard))
        self._heard = []

    @property
    def travelling(self) -> int:
        """How many notes were sent and not heard yet."""
        return len(self._travelling)

    def arrived(self, wait: bool = False, most: int | None = None) -> Broken | None:
        """The first of what is not finite among the notes that are there by now, or among all (at most `most`)."""
        for _ in range(self.travelling if most is None else most):
            if not (wait or self._travelling[0].sent.is_there):
                break
            notes = self._travelling.popleft()
            if (where := notes.first_broken()) is not None:
                return Broken(notes.step, where)
        return None

    def _on_output(self, _model: nn.Module, _args: Any, output: Any) -> None:
        loss, _ = loss_and_logits(output)
        if loss is not None and not torch.compiler.is_compiling():
            self.tell(loss)

    def _keeper(self, name: str):
        def keep(_block: nn.Module, _args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling() and not in_backward():
                self._heard.extend((name, extremes(local(tensor))) for tensor in tensors(output))

        return keep


class _Notes:
    """The ends of what one step's blocks returned, on their way to the host."""

    def __init__(self, step: int, heard: list[tuple[str, torch.Tensor]]):
        self.step, self.names = step, [name for name, _ in heard]
        self.sent = HostCopy(torch.stack([ends.float() for _, ends in heard]))

    def first_broken(self) -> str | None:
        fine = self.sent.wait().isfinite().all(-1).tolist()
        return next((name for name, is_fine in zip(self.names, fine, strict=True) if not is_fine), None)


def _is_compiled(model: nn.Module) -> bool:
    return any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules())
