"""Scheme rules for training a converted model: initialisation, parameter groups, constraint after each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.hf.conversion.converted_layer import (
    Conversion,
    ConvertedStack,
    check_scheme_loaded,
    converted_layers,
)
from normlab.hf.conversion.foreign_norm import ModelNorm
from normlab.probes.blocks import eager
from normlab.roles import Role, Spec, find_roles
from normlab.stack import fill_
from normlab.utils.uninitialized import require_initialised


class Rules:
    """The scheme's rules for one model; returned by `rules`.

    After a conversion with `residual_only`, initialisation and constraint apply to the layers only.
    """

    def __init__(self, model: nn.Module, conversion: Conversion, layers: list[str]):
        self.model, self.conversion, self.bound = model, conversion, conversion.bound
        self._layers = tuple(f"{path}." for path in layers)

    @property
    def stack(self) -> ConvertedStack | None:
        """The scheme's modules, for its certificate; None where layers multiply the state by numbers of their own."""
        wirings = [layer.normlab for layer in converted_layers(self.model).values()]
        return None if any(one.structure.scale for one in wirings) else ConvertedStack(self.conversion, wirings)

    def find_roles(self) -> list[Role]:
        """The role of every parameter; a matrix inside the layers without a known role raises."""
        return find_roles(self.model, self.conversion.roles, otherwise=self._outside)

    def init_(
        self, *, std: float | None = None, zero_outputs: bool = False, generator: torch.Generator | None = None
    ) -> Rules:
        """Initialise the model by the scheme's rules: matrices by role, gains and scales by `reset_parameters`."""
        options = {"std": std, "zero_outputs": zero_outputs, "generator": generator}
        made: list[nn.Module] = [layer.normlab for layer in converted_layers(self.model).values()]
        with require_initialised(self.model, self.bound.scheme.name, made):
            fill_(self.model, self.bound, self._governed(), **options)
            for part in self.model.modules():
                if isinstance(part, ModelNorm):
                    part.reset_parameters()
        return self

    def param_groups(self, *, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Parameter groups for an optimiser; every parameter is in exactly one."""
        return self.bound.param_groups(self.find_roles(), lr=lr, weight_decay=weight_decay)

    def after_step(self) -> None:
        """Re-apply the scheme's constraint; call it after every optimiser step."""
        if self.bound.constrains:
            self.bound.after_step(self._governed())

    def _governed(self) -> list[Role]:
        roles = self.find_roles()
        return (
            [role for role in roles if role.name.startswith(self._layers)] if self.conversion.residual_only else roles
        )

    def _outside(self, name: str, _parameter: nn.Parameter) -> Spec | None:
        """Role of a parameter outside the layers: convolutions are embeddings, linear layers heads, others vectors."""
        if name.startswith(self._layers):
            return None
        owner = self.model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return "embed"
        return "head" if isinstance(owner, nn.Linear) else "vector"


def rules(model: Any) -> Any:
    """Return the scheme's rules for a converted model; a model with `param_groups` and `after_step` is returned."""
    if all(hasattr(model, name) for name in ("param_groups", "after_step")):
        return model
    model = eager(model)
    layers = converted_layers(model)
    for layer in layers.values():
        return Rules(model, layer.normlab.conversion, list(layers))
    check_scheme_loaded(model)
    raise NormLabError(f"{type(model).__name__} follows no scheme; convert it first: normlab.hf.convert(model, 'pre')")
