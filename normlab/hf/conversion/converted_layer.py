"""A layer of the library's whose step is ours: its own parts as branches of a scheme's block.

The layer stays the object it was, with its attributes, hooks and name; its class becomes a subclass of its own class.
So it is checkpointed, sharded, recorded and called as before, and only what `forward` does is different.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import nn

from normlab.errors import NormLabError
from normlab.hf.conversion.anatomy import Anatomy
from normlab.roles import Spec
from normlab.schemes.contract.blocks import Block
from normlab.schemes.contract.bound_scheme import BoundScheme


@dataclass(frozen=True)
class Conversion:
    """What a model was converted to."""

    bound: BoundScheme
    residual_only: bool = False
    """Whether what the scheme needs inside the sublayers was left out."""
    roles: Mapping[str, Spec] = field(default_factory=dict)
    """What the user said of matrices that cannot be named."""


class Wiring(nn.Module):
    """The scheme's part of a layer: its block, and its entry or exit at the ends of the stack."""

    def __init__(self, conversion: Conversion, anatomy: Anatomy, block: Block):
        super().__init__()
        self.conversion, self.anatomy = conversion, anatomy
        self.entry: nn.Module = nn.Identity()
        self.block = block
        self.exit: nn.Module = nn.Identity()

    def forward(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        state, call = self.anatomy.signature.bind(args, kwargs)
        state = self.block(self.entry(state), self.anatomy.branches(layer, call))
        return self.anatomy.output(self.exit(state), call)


class ConvertedLayer(nn.Module):
    """What a converted layer is beside the class that it was."""

    normlab: Wiring

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.normlab(self, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class was made here and has no place in a module where pickle could find it.
        return _empty, (type(self).__mro__[2],), self.__dict__


def adopt(layer: nn.Module, wiring: Wiring) -> None:
    """Make a layer one of ours, in place; its norms have moved into the wiring or have no use any more."""
    for path in wiring.anatomy.paths():
        parent, _, name = path.rpartition(".")
        delattr(layer.get_submodule(parent), name)
    layer.__class__ = _converted(type(layer))
    layer.normlab = wiring


def converted_layers(model: nn.Module) -> dict[str, Any]:
    """The converted layers of a model, by path."""
    return {path: part for path, part in model.named_modules() if isinstance(part, ConvertedLayer)}


def check_not_lost(model: Any) -> None:
    """A converted model that the library loaded by itself has lost its scheme and some of its weights."""
    spec = getattr(getattr(model, "config", None), "normlab", None)
    if isinstance(spec, dict) and not converted_layers(model):
        raise NormLabError(
            f"{type(model).__name__} has the configuration of a model under {spec.get('scheme')} and is none; "
            "use normlab.hf.load(folder), or del model.config.normlab for a new model"
        )


@cache
def _converted(base: type[nn.Module]) -> type[nn.Module]:
    return type(f"Converted{base.__name__}", (ConvertedLayer, base), {"__module__": base.__module__})


def _empty(base: type[nn.Module]) -> nn.Module:
    made = _converted(base)
    return made.__new__(made)
