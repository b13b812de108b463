"""A factory as a target: a function of depth and width that returns a module; `module:factory` on the command line."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from normlab.errors import NormLabError, in_one_line
from normlab.models.estimate import count_parameters
from normlab.models.memory_check import BYTES_IN_TRAINING, check_memory_for_blocks, check_memory_for_parameters
from normlab.probes.blocks import find_stacks
from normlab.schemes.catalog.reference import looking_in
from normlab.targets.guess_batch import notes_on
from normlab.targets.module import first_parameter, task_for, width_of
from normlab.targets.scheme_rules import scheme_of
from normlab.targets.target import Target
from normlab.utils import machine
from normlab.utils.seeded import seeded

SIZES = {"depth": 12, "width": 64}
"""Depth and width if neither the user nor the factory's defaults give them."""

_SHALLOW = 16
"""Parameters of models more than twice this deep are extrapolated from this depth and twice this depth."""
_VOCABULARY = 2**18
"""A large vocabulary, for an upper estimate of embedding and head."""
_NOTICEABLE = 0.05
"""Share of the free memory above which a factory's model is laid out on the meta device before it is built."""

_FORM = "expected factory(depth, width) that returns a module, or (module, batch), or (module, batch, loss_fn)"
_NAME = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_SPELLING = re.compile(rf"(?P<module>{_NAME}):(?P<factory>{_NAME})")


class Made(NamedTuple):
    """Return value of a factory."""

    model: nn.Module
    batch: Any = None
    loss_fn: Callable[..., torch.Tensor] | None = None


class FactoryTarget(Target):
    """A factory as a target; `depth` and `width` can be changed if the factory takes them."""

    kind = "factory"

    def __init__(
        self,
        factory: Callable[..., Any],
        *,
        name: str | None = None,
        depth: int | None = None,
        width: int | None = None,
        batch: Any = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        blocks: str | None = None,
        device: str = "cpu",
        dtype: str = "fp32",
        **for_guess: Any,
    ):
        super().__init__(device=device, dtype=dtype)
        self.name, self.blocks = name or getattr(factory, "__qualname__", type(factory).__name__), blocks
        self._factory, self._defaults = factory, defaults(factory)
        wished = {"depth": depth, "width": width}
        size = {what: wished[what] or default or SIZES[what] for what, default in self._defaults.items()}
        self._check_memory(size)
        # A batch that the factory draws is the same at every call, and no random number of the caller's is used up.
        with seeded(0):
            made = self._call(size)
        self.depth = size.get("depth") or len(find_stacks(made.model, blocks)[0].blocks)
        self.width = size.get("width") or width_of(made.model)
        self.resizable, self.scheme = frozenset(size), scheme_of(made.model)
        self._check_depth(made.model, self.depth)
        brought = (made.batch, made.loss_fn or loss_fn) if batch is None else (batch, loss_fn or made.loss_fn)
        self.task = task_for(made.model, self.name, *brought, **for_guess)
        self.notes = notes_on(made.model, self.task)
        if self.width in _float_widths(next(self.batches())):
            # The batch has the width of the model in it: no other width can read it.
            self.resizable -= {"width"}
        self.try_out(f"{self.name}: does not run", "pass batch= and loss_fn=, or return them from the factory")

    def _make(self, depth: int, width: int | None, seed: int) -> nn.Module:
        made = self._call(self._size(depth, width))
        self._check_depth(made.model, depth)
        return made.model

    def _size(self, depth: int, width: int | None) -> dict[str, Any]:
        sizes = {"depth": depth, "width": width}
        return {what: sizes[what] for what in self._defaults}

    def check_room(self, *, depth: int | None = None, width: int | None = None) -> None:
        self._check_memory(self._size(depth or self.depth, width or self.width))

    def _check_memory(self, size: Mapping[str, Any]) -> None:
        """Raise if a model of this size cannot be trained here, from its parameters on the meta device."""
        shown = f"{self.name}({_shown(size)})"
        check_memory_for_blocks(size.get("depth", 0), shown, "a smaller --depth")
        free = machine.free_memory(self.device)
        if free is None or (size and BYTES_IN_TRAINING * _guess_parameters(**size) < _NOTICEABLE * free):
            return
        parameters = self._parameters(size)
        if parameters is not None:
            what = f"{shown} with {parameters / 1e9:.1f}B parameters"
            check_memory_for_parameters(parameters, self.device, what, "smaller --depths or --width")

    def _parameters(self, size: Mapping[str, Any]) -> int | None:
        depth = size.get("depth", 0)
        if depth <= 2 * _SHALLOW:
            return self._laid_out(size)
        low, high = (self._laid_out({**size, "depth": part}) for part in (_SHALLOW, 2 * _SHALLOW))
        return None if low is None or high is None else high + (high - low) * (depth - 2 * _SHALLOW) // _SHALLOW

    def _laid_out(self, size: Mapping[str, Any]) -> int | None:
        """Number of parameters, counted on the meta device; None for a factory that cannot run there."""
        try:
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                return count_parameters(self._call(size).model)
        except NormLabError:
            # If the size is what is wrong, the build itself will say so.
            return None

    def _call(self, size: Mapping[str, Any]) -> Made:
        shown = _shown(size)
        with looking_in(os.getcwd()), in_one_line(f"{self.name}({shown}) failed", _FORM):
            returned = _call(self._factory, size)
        parts = returned if isinstance(returned, tuple) else (returned,)
        if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
            raise NormLabError(f"{self.name}({shown}) returned an object of type {type(returned).__name__}; {_FORM}")
        first_parameter(parts[0], self.name)
        return Made(*parts)

    def _check_depth(self, model: nn.Module, depth: int) -> None:
        built = len(find_stacks(model, self.blocks)[0].blocks)
        if built != depth:
            raise NormLabError(
                f"{self.name}: asked for {depth} blocks, it built {built}; expected depth to be the number of repeated "
                f"blocks, or name them, e.g. --blocks 'layers.*'"
            )


def import_factory(spelling: str) -> Callable[..., Any]:
    """Import `module:factory`; modules in the current folder are found, as by `python -m`."""
    match = _SPELLING.fullmatch(spelling)
    if not match:
        raise NormLabError(f"cannot read {spelling!r} as module:factory; expected e.g. my_package.models:build")
    module_name, path = match["module"], match["factory"]
    if os.path.isfile(module_name):
        raise NormLabError(f"{module_name} is not a Python file; expected file.py:factory or my_package.models:build")
    with looking_in(os.getcwd()), in_one_line(f"{module_name} cannot be imported", "check the name and where you are"):
        found: Any = importlib.import_module(module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            raise NormLabError(f"{module_name} has no {path!r}; expected a function there: factory(depth, width)")
        found = getattr(found, name)
    if not callable(found):
        raise NormLabError(f"{spelling} is of type {type(found).__name__} and cannot be called; {_FORM}")
    return found


def defaults(factory: Callable[..., Any]) -> dict[str, int | None]:
    """Defaults of the arguments depth and width, found by name or as the first two arguments."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return dict.fromkeys(SIZES)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict.fromkeys(SIZES)
    named = {what: parameters[what].default for what in SIZES if what in parameters}
    places = [p.default for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    found = named or dict(zip(SIZES, places, strict=False))
    return {what: default if isinstance(default, int) else None for what, default in found.items()}


def _shown(size: Mapping[str, Any]) -> str:
    return ", ".join(f"{what}={value}" for what, value in size.items())


def _guess_parameters(depth: int = SIZES["depth"], width: int = SIZES["width"]) -> int:
    """Parameters of a plain Transformer with a large vocabulary: a quick upper estimate."""
    return 12 * depth * width**2 + 2 * _VOCABULARY * width


def _call(factory: Callable[..., Any], size: Mapping[str, Any]) -> Any:
    try:
        inspect.signature(factory).bind(**size)
    except (TypeError, ValueError):
        return factory(*size.values())
    return factory(**size)


def _float_widths(batch: Any) -> set[int]:
    """Last dimensions of the tensors in a batch that are not ids."""
    if isinstance(batch, torch.Tensor):
        return {batch.shape[-1]} if batch.is_floating_point() and batch.ndim else set()
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return {width for part in parts for width in _float_widths(part)}
