"""A live torch module as a target, with the weights it has."""

from __future__ import annotations

from typing import Any

from torch import nn

from normlab.errors import NormLabError
from normlab.probes.blocks import eager, find_stacks
from normlab.probes.probe import LossFn
from normlab.targets.guess_batch import guess_task, notes_on
from normlab.targets.scheme_rules import scheme_of
from normlab.targets.target import Target
from normlab.targets.tasks import FixedBatch, Workload


class ModuleTarget(Target):
    """A live module as a target, with a batch that is given or guessed; `build` returns the module itself."""

    kind = "module"

    def __init__(
        self,
        model: nn.Module,
        *,
        batch: Any = None,
        loss_fn: LossFn | None = None,
        blocks: str | None = None,
        dtype: str = "fp32",
        **for_guess: Any,
    ):
        self.name = type(eager(model)).__name__
        super().__init__(device=str(first_parameter(model, self.name).device), dtype=dtype)
        self.model, self.blocks = model, blocks
        self.depth, self.width = len(find_stacks(model, blocks)[0].blocks), width_of(model)
        self.scheme = scheme_of(model)
        self.task = task_for(model, self.name, batch, loss_fn, **for_guess)
        self.notes = notes_on(model, self.task)

    def build(self, *, depth: int | None = None, width: int | None = None, seed: int = 0) -> nn.Module:
        return self._make(self._allowed("depth", depth, self.depth), self._allowed("width", width, self.width), seed)

    def _make(self, depth: int, width: int | None, seed: int) -> nn.Module:
        return self.model


def task_for(model: nn.Module, name: str, batch: Any, loss_fn: LossFn | None, **sizes: Any) -> Workload:
    """The user's batch and loss if given, otherwise a guessed task."""
    if batch is not None:
        return FixedBatch(batch, loss_fn)
    if loss_fn is not None:
        raise NormLabError(f"{name}: loss_fn came without a batch; pass batch=, what loss_fn(model, batch) gets")
    return guess_task(model, name, **sizes)


def first_parameter(model: nn.Module, name: str) -> nn.Parameter:
    """The first parameter of a module; raises for a module without parameters."""
    found = next(model.parameters(), None)
    if found is None:
        raise NormLabError(f"{name} has no parameters; expected a Transformer, or anything with repeated blocks")
    return found


def width_of(model: nn.Module) -> int | None:
    """Hidden width according to the model's configuration; None if it has none."""
    config = getattr(eager(model), "config", None)
    found = (getattr(config, name, None) for name in ("hidden_size", "dim"))
    return next((width for width in found if isinstance(width, int)), None)
