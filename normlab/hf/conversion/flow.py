"""A layer's forward pass as data: which of its parts it calls, on what, in which order.

The pass is followed with placeholders in place of tensors, once in training mode and once out of it; nothing is
computed. Its parts (attention, MLP, norms, dropout) stay whole: what happens inside them is nobody's business here.
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

CALL, REST = "call", "**"
"""Names of a layer's arguments beside the state, and among them of all that the signature does not name."""

ADVICE = "pass an adapter that names its branches and norms (docs/guides/converting.md)"
"""What to try with a layer that is not of the usual shape."""

# The library's names for what a decoder with cross-attention reads; without it they are None.
_CROSS = "encoder_"


@dataclass(frozen=True)
class Signature:
    """How a layer is called: what its first argument is called, the others with their defaults, and whether more go."""

    state: str
    defaults: tuple[tuple[str, Any], ...]
    more: bool

    @classmethod
    def of(cls, layer: nn.Module) -> Signature:
        first, *others = inspect.signature(layer.forward).parameters.values()
        named = [one for one in others if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        defaults = tuple((one.name, None if one.default is one.empty else one.default) for one in named)
        return cls(first.name, defaults, any(one.kind is one.VAR_KEYWORD for one in others))

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        """(the state, the other arguments by name) of a call."""
        call = dict(self.defaults)
        names = (self.state, *call)
        given = dict(zip(names, args, strict=False))
        given.update(kwargs)
        state = given.pop(self.state)
        rest = {name: value for name, value in given.items() if name not in names}
        if len(args) > len(names) or (rest and not self.more):
            raise TypeError(f"expected the arguments {', '.join(names)}; got {len(args)} and {', '.join(kwargs)}")
        call.update({name: value for name, value in given.items() if name in names})
        call[REST] = rest
        if any(name.startswith(_CROSS) and value is not None for name, value in call.items()):
            raise NormLabError("a converted layer has no cross-attention; call the model without encoder states")
        return state, call


@dataclass(frozen=True)
class Ref:
    """Stands for the value of an earlier call."""

    name: str


STATE = Ref("state")
"""The hidden state."""


@dataclass(frozen=True)
class TracedCall:
    """One call in a forward pass: of a module or a parameter by its path, of a function, of a tensor's method."""

    name: str
    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def run(self, layer: nn.Module, values: Mapping[str, Any]) -> Any:
        args = [resolve(value, values) for value in self.args]
        kwargs = {name: resolve(value, values) for name, value in self.kwargs}
        kwargs.update(kwargs.pop(REST, {}))
        if self.kind == "call_module":
            return part_of(layer, self.target)(*args, **kwargs)
        if self.kind == "call_method":
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return part_of(layer, self.target) if self.kind == "get_attr" else self.target(*args, **kwargs)


@dataclass(frozen=True)
class Program:
    """Part of a forward pass: from what a branch reads to what it returns."""

    inputs: tuple[str, ...]
    """Values that are given: what the branch reads, under each of its names."""
    calls: tuple[TracedCall, ...]
    output: Ref
    keeps: tuple[str, ...] = ()
    """Values that the layer returns beside its state; they are left among the arguments of the call."""

    def __call__(self, layer: nn.Module, call: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
        values: dict[str, Any] = dict.fromkeys(self.inputs, x)
        values[CALL] = call
        for one in self.calls:
            values[one.name] = one.run(layer, values)
        for name in self.keeps:
            call[name] = values[name]
        return values[self.output.name]


@dataclass(frozen=True)
class ByMode:
    """A program for training and one for the rest: a mode that the layer reads becomes a constant in what it calls."""

    training: Program
    resting: Program

    def __call__(self, layer: nn.Module, call: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
        return (self.training if layer.training else self.resting)(layer, call, x)


def resolve(value: Any, values: Mapping[str, Any]) -> Any:
    """The same with every reference replaced by what it stands for."""
    return _over(value, lambda part: values[part.name] if isinstance(part, Ref) else part)


def refer(value: Any) -> Any:
    """The same with a reference in place of every node: what a layer passes on or returns."""
    return _over(value, lambda part: Ref(part.name) if isinstance(part, fx.Node) else part)


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


def part_of(layer: nn.Module, path: str) -> Any:
    """The module or parameter at a path."""
    found: Any = layer
    for name in path.split("."):
        found = getattr(found, name)
    return found


def call_of(node: fx.Node) -> TracedCall:
    """One node of a traced pass as a record that can be compared, copied and stored."""
    target = path_of(node) if node.op in ("call_module", "get_attr") else node.target
    kwargs = tuple((name, refer(value)) for name, value in node.kwargs.items())
    return TracedCall(node.name, node.op, target, refer(node.args), kwargs)


def path_of(node: fx.Node) -> str:
    """Where in the layer the module or parameter of a node is."""
    return str(node.target).removeprefix("layer.")


def trace(layer: nn.Module, opened: Collection[str], *, training: bool) -> fx.Graph:
    """The calls that a layer makes; modules whose paths are in `opened` are followed inside as well."""
    signature = Signature.of(layer)
    with (
        in_one_line(f"{type(layer).__name__}: its forward pass cannot be followed", ADVICE),
        _mode(layer, training),
    ):
        return _Tracer(opened).trace(_Harness(layer, signature))


def behaves_like(layer: nn.Module, other: nn.Module, opened: Collection[str]) -> bool:
    """Whether two layers surely make the same calls: the same class on the same parts, with the same settings.

    Settings are looked at where a pass is followed, in the layer and in what is opened; `False` is no proof of the
    contrary.
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
    """Looks into the layer and into the modules that are opened, and into no others."""

    def __init__(self, opened: Collection[str]):
        super().__init__()
        self._opened = {f"layer.{path}" for path in opened}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened


class _Harness(nn.Module):
    """Calls a layer with a placeholder for every argument that its signature names, and one for the rest."""

    def __init__(self, layer: nn.Module, signature: Signature):
        super().__init__()
        self.layer, self.signature = layer, signature

    def forward(self, state: torch.Tensor, call: Any) -> Any:
        names = [name for name, _ in self.signature.defaults]
        given = {name: None if name.startswith(_CROSS) else call[name] for name in names}
        rest = {REST: call[REST]} if self.signature.more else {}
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
