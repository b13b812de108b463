"""Which module gave the first value that is not finite.

Every module notes, on the device, the ends of what it returned: one read of each activation, no waiting. The
first that is not, in the order in which modules finish, made it: children finish before their parents.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from normlab.probes.attention import in_backward
from normlab.probes.block_hooks import tensors
from normlab.probes.blocks import eager, walk
from normlab.probes.ledger import Ledger
from normlab.probes.measures import extremes
from normlab.probes.sharded import local


class ModuleWatch:
    """Listens to all modules of a model."""

    def __init__(self, model: nn.Module, ledger: Ledger):
        self.model, self.ledger = eager(model), ledger
        self._heard: list[tuple[str, int]] = []
        self._calls: Counter[str] = Counter()

    def listen(self, hooks: ExitStack) -> None:
        """Install the hooks; `hooks` takes them off."""
        named: dict[nn.Module, str] = {}
        for path, module in walk(self.model, ""):
            named.setdefault(module, path)
        named.setdefault(self.model, type(self.model).__name__)
        for module, name in named.items():
            hooks.callback(module.register_forward_hook(self._keeper(name)).remove)

    def _keeper(self, name: str):
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            if not in_backward():
                self._note(name, output)

        return keep

    @torch.no_grad()
    def _note(self, name: str, output: Any) -> None:
        self._calls[name] += 1
        label = name if self._calls[name] == 1 else f"{name} (call {self._calls[name]})"
        for tensor in tensors(output):
            if tensor.numel():
                self._heard.append((label, self.ledger.write(extremes(local(tensor)))))

    def first(self) -> str | None:
        """The first module that returned a value that is not finite, once the ledger is closed."""
        return next((name for name, place in self._heard if not self.ledger.tensor(place).isfinite().all()), None)
