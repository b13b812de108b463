"""Trace a layer's forward pass with torch.fx: which submodules it calls, on what, in which order.

The forward pass is traced symbolically, once in training and once in evaluation mode; nothing is computed. Submodules
(attention, MLP, norms, dropout) are leaves of the graph and are not traced inside.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from normlab.errors import NormLabError, in_one_line

ARGUMENTS, EXTRA_KWARGS = "call", "**"
"""Name of the dictionary of a layer's arguments, and its key for keyword arguments that the signature does not name."""

ADVICE = "pass an adapter that names its branches and norms (docs/guides/converting.md)"
"""Advice in errors about layers of an unusual structure."""

# Prefix of the arguments of cross-attention in transformers; None in models without it.
_CROSS = "encoder_"


@dataclass(frozen=True)
class LayerSignature:
    """Signature of a layer: name of its first argument, the others with defaults, whether it takes **kwargs."""

    state: str
    defaults: tuple[tuple[str, Any], ...]
    more: bool

    @classmethod
    def of(cls, layer: nn.Module) -> LayerSignature:
        first, *others = inspect.signature(layer.forward).parameters.values()
        named = [one for one in others if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        defaults = tuple((one.name, None if one.default is one.empty else one.default) for one in named)
        return cls(first.name, defaults, any(one.kind is one.VAR_KEYWORD for one in others))

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return (hidden state, other arguments by name) of a call."""
        call = dict(self.defaults)
        names = (self.state, *call)
        given = dict(zip(names, args, strict=False))
        given.update(kwargs)
        state = given.pop(self.state)
        rest = {name: value for name, value in given.items() if name not in names}
        if len(args) > len(names) or (rest and not self.more):
            raise TypeError(f"expected the arguments {', '.join(names)}; got {len(args)} and {', '.join(kwargs)}")
        call.update({name: value for name, value in given.items() if name in names})
        call[EXTRA_KWARGS] = rest
        if any(name.startswith(_CROSS) and value is not None for name, value in call.items()):
            raise NormLabError("a converted layer has no cross-attention; call the model without encoder states")
        return state, call


@dataclass(frozen=True)
class ValueRef:
    """Reference to the value of an earlier call."""

    name: str


HIDDEN_STATE = ValueRef("state")
"""Reference to the hidden state."""


@dataclass(frozen=True)
class TracedCall:
    """One node of a traced forward pass: a call of a module, function or tensor method, or a parameter."""

    name: str
    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def run(self, layer: nn.Module, values: Mapping[str, Any]) -> Any:
        args = [resolve_refs(value, values) for value in self.args]
        kwargs = {name: resolve_refs(value, values) for name, value in self.kwargs}
        kwargs.update(kwargs.pop(EXTRA_KWARGS, {}))
        if self.kind == "call_module":
            return get_part(layer, self.target)(*args, **kwargs)
        if self.kind == "call_method":
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return get_part(layer, self.target) if self.kind == "get_attr" else self.target(*args, **kwargs)


@dataclass(frozen=True)
class BranchProgram:
    """The calls of one residual branch, from its input to its output."""

    inputs: tuple[str, ...]
    """Names of values that are equal to the input of the branch."""
    calls: tuple[TracedCall, ...]
    output: ValueRef
    keeps: tuple[str, ...] = ()
    """Values that the layer returns besides the hidden state; stored among the arguments of the call."""

    def __call__(self, layer: nn.Module, call: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
        values: dict[str, Any] = dict.fromkeys(self.inputs, x)
        values[ARGUMENTS] = call
        for one in self.calls:
            values[one.name] = one.run(layer, values)
        for name in self.keeps:
            call[name] = values[name]
        return values[self.output.name]


@dataclass(frozen=True)
class TrainEvalProgram:
    """One program for training and one for evaluation, because tracing turns `self.training` into a constant."""

    training: BranchProgram
    evaluation: BranchProgram

    def __call__(self, layer: nn.Module, call: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
        return (self.training if layer.training else self.evaluation)(layer, call, x)


def resolve_refs(value: Any, values: Mapping[str, Any]) -> Any:
    """Replace every reference in a nested value by what it refers to."""
    return _over(value, lambda part: values[part.name] if isinstance(part, ValueRef) else part)


def replace_nodes(value: Any) -> Any:
    """Replace every fx node in a nested value by a reference."""
    return _over(value, lambda part: ValueRef(part.name) if isinstance(part, fx.Node) else part)


def _over(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple):
        return tuple([_over(part, change) for part in value])
    if isinstance(value, list):
        return [_over(part, change) for part in value]
    if isinstance(value, dict):
        return {name: _over(part, change) for name, part in value.items()}
    if isinstance(value, slice):
        return slice(_over(value.start, change), _over(value.stop, change), _over(value.step, change))
    return change(value)


def get_part(layer: nn.Module, path: str) -> Any:
    """Return the submodule or parameter of a layer at a dotted path."""
    found: Any = layer
    for name in path.split("."):
        found = getattr(found, name)
    return found


def to_traced_call(node: fx.Node) -> TracedCall:
    """Convert an fx node to a record that can be compared, copied and pickled."""
    target = module_path(node) if node.op in ("call_module", "get_attr") else node.target
    kwargs = tuple((name, replace_nodes(value)) for name, value in node.kwargs.items())
    return TracedCall(node.name, node.op, target, replace_nodes(node.args), kwargs)


def module_path(node: fx.Node) -> str:
    """Path of the node's module or parameter within the layer."""
    return str(node.target).removeprefix("layer.")


def trace_layer(layer: nn.Module, opened: Collection[str], *, training: bool) -> fx.Graph:
    """Trace the forward pass of a layer; modules whose paths are in `opened` are traced inside as well."""
    signature = LayerSignature.of(layer)
    with (
        in_one_line(f"{type(layer).__name__}: its forward pass cannot be followed", ADVICE),
        _mode(layer, training),
    ):
        return _Tracer(opened).trace(_Harness(layer, signature))


def makes_same_calls(layer: nn.Module, other: nn.Module, opened: Collection[str]) -> bool:
    """Whether two layers certainly make the same calls: same classes, same submodules, same attributes.

    Attributes are compared for traced modules (the layer and those in `opened`). `False` proves nothing.
    """
    parts, others = dict(layer.named_modules()), dict(other.named_modules())
    if [(path, type(part)) for path, part in parts.items()] != [(path, type(part)) for path, part in others.items()]:
        return False
    return all(_same_settings(parts[path], others[path]) for path in ("", *opened))


def _same_settings(part: nn.Module, other: nn.Module) -> bool:
    ignored = vars(nn.Module()).keys()
    settings, others = ({k: v for k, v in vars(one).items() if k not in ignored} for one in (part, other))
    return settings.keys() == others.keys() and all(_same(value, others[name]) for name, value in settings.items())


def _same(value: Any, other: Any) -> bool:
    plain = isinstance(value, bool | int | float | str) and type(value) is type(other)
    return value is other or (plain and value == other)


class _Tracer(fx.Tracer):
    """Traces the layer and the modules in `opened`; all other modules are leaves."""

    def __init__(self, opened: Collection[str]):
        super().__init__()
        self._opened = {f"layer.{path}" for path in opened}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened


class _Harness(nn.Module):
    """Calls a layer with a placeholder for every named argument, and one for its extra keyword arguments."""

    def __init__(self, layer: nn.Module, signature: LayerSignature):
        super().__init__()
        self.layer, self.signature = layer, signature

    def forward(self, state: torch.Tensor, call: Any) -> Any:
        names = [name for name, _ in self.signature.defaults]
        given = {name: None if name.startswith(_CROSS) else call[name] for name in names}
        rest = {EXTRA_KWARGS: call[EXTRA_KWARGS]} if self.signature.more else {}
        return self.layer.forward(state, **given, **rest)


@contextmanager
def _mode(layer: nn.Module, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in layer.modules()]
    try:
        layer.train(training)
        yield
    finally:
        for module, mode in modes:
            module.training = mode
