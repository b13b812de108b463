"""Converted layer: a transformers layer whose forward pass runs a scheme's block on the layer's own submodules.

The layer object keeps its attributes, hooks and name; its class is replaced by a subclass of its class. It is
checkpointed, sharded and called as before, and only `forward` differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.hf.conversion.layer_structure import LayerStructure, ResidualBranch
from normlab.roles import Spec
from normlab.schemes.contract.blocks import Block
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.bounds import BranchBound, compose_bounds
from normlab.schemes.contract.needs import Need
from normlab.schemes.contract.scheme import Scheme


@dataclass(frozen=True)
class Conversion:
    """What a model was converted to."""

    bound: BoundScheme
    residual_only: bool = False
    """Whether the scheme's changes inside the sublayers were left out."""
    roles: Mapping[str, Spec] = field(default_factory=dict)
    """User-defined roles of parameters."""
    native: bool = False
    """Whether NormLab's modules read and merge the streams with the model's weights, in place of the model's own."""

    def hidden(self, state: torch.Tensor) -> torch.Tensor:
        """The (..., D) hidden state in a state between two layers.

        Entry and exit are inside the first and the last layer: before the one and behind the other nothing is to do.
        """
        is_hidden = state.ndim <= 3 and state.shape[-1] == self.bound.dim
        return state if is_hidden else self.bound.hidden(state)


class SchemeWiring(nn.Module):
    """The scheme's modules of a layer: its block, and entry or exit in the first or last layer."""

    def __init__(self, conversion: Conversion, structure: LayerStructure, block: Block):
        super().__init__()
        self.conversion, self.structure = conversion, structure
        self.entry: nn.Module = nn.Identity()
        self.block = block
        self.exit: nn.Module = nn.Identity()

    def forward(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        state, call = self.structure.signature.bind(args, kwargs)
        state = self.block(self.entry(state), self.structure.bind_branches(layer, call))
        state = self.structure.scaled(layer, state)
        return self.structure.output(self.exit(state), call)

    @property
    def branches(self) -> Sequence[ResidualBranch]:
        return self.structure.branches

    def rules_of(self, model: nn.Module) -> Any:
        """The scheme's rules for the model that this is a part of; `normlab.check` asks for them before it trains."""
        from normlab.hf.conversion.scheme_rules import rules

        return rules(model)


class ConvertedLayer(nn.Module):
    """Mixin of converted layers, whose class also inherits from the original class."""

    normlab: SchemeWiring

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.normlab(self, args, kwargs)

    def hidden_in_state(self, state: torch.Tensor) -> torch.Tensor:
        """The hidden state in what a converted layer is given or returns; probes ask for it."""
        return self.normlab.conversion.hidden(state)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is created dynamically, so pickle cannot import it.
        return _empty, (type(self).__mro__[2],), self.__dict__


class ConvertedStack(nn.Module):
    """The wirings of all layers, with what a `normlab.Stack` says of itself. It is no part of the model."""

    def __init__(self, conversion: Conversion, wirings: Sequence[SchemeWiring]):
        super().__init__()
        self.bound = conversion.bound
        self.hidden = conversion.hidden
        self.entry = wirings[0].entry
        self.layers = nn.ModuleList(wirings)
        self._residual_only = conversion.residual_only

    @property
    def needs(self) -> Sequence[Need]:
        return () if self._residual_only else self.bound.scheme.needs

    @property
    def scheme(self) -> Scheme:
        return self.bound.scheme

    @property
    def dim(self) -> int:
        return self.bound.dim

    def certificate(self, entry: float = 1.0, branches: Sequence[Sequence[BranchBound]] | None = None) -> list[float]:
        """Proven bounds on the RMS of the state, as those of `normlab.Stack`."""
        return compose_bounds(self.entry, self.layers, entry, branches)


def convert_layer(layer: nn.Module, wiring: SchemeWiring) -> None:
    """Convert a layer in place; its old norms and gates are removed (those in use have moved into the wiring)."""
    for path in wiring.structure.replaced_paths():
        parent, _, name = path.rpartition(".")
        delattr(layer.get_submodule(parent), name)
    layer.__class__ = _converted(type(layer))
    layer.normlab = wiring


def converted_layers(model: nn.Module) -> dict[str, Any]:
    """Path → converted layer of a model."""
    return {path: part for path, part in model.named_modules() if isinstance(part, ConvertedLayer)}


def check_scheme_loaded(model: Any) -> None:
    """Raise for a converted model that `from_pretrained` loaded without its scheme and some of its weights."""
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
