"""Apply a scheme's rules in any model: parameter groups, and constraints after an optimiser step.

NormLab's models and stack know their own, and a converted model has rules for all of it; the rest of a model gets what
is usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import nn

from normlab.models.transformer import Transformer
from normlab.probes.blocks import children, eager
from normlab.schemes.contract.scheme import Scheme
from normlab.stack import Stack


class Ruled(Protocol):
    """Protocol of modules that know a scheme's rules: a model, a stack, or the rules of a converted model."""

    def param_groups(self, *, lr: float, weight_decay: float) -> list[dict[str, Any]]: ...

    def after_step(self) -> None: ...


def ruled(model: nn.Module) -> list[Ruled]:
    """The outermost modules that know a scheme's rules; for a model converted by `normlab.hf` its rules as a whole."""
    model = eager(model)
    for part in model.modules():
        rules_of: Callable[[nn.Module], Ruled] | None = getattr(part, "rules_of", None)
        if rules_of is not None:
            return [rules_of(model)]
    return list(_outermost(model))


def scheme_of(model: nn.Module) -> Scheme | None:
    """The scheme of a model with one; None where there is none, or several."""
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    # A converted model has no stack, and rules that know their scheme.
    converted = [bound for rules in ruled(model) if (bound := getattr(rules, "bound", None)) is not None]
    found = {str(one.scheme): one.scheme for one in stacks or converted}
    return next(iter(found.values())) if len(found) == 1 else None


def after_step(model: nn.Module) -> None:
    """Apply all schemes' constraints after an optimiser step."""
    for module in ruled(model):
        module.after_step()


def param_groups(model: nn.Module, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups by the scheme's rules; without a scheme, matrices have weight decay and vectors have none."""
    groups = [group for part in ruled(model) for group in part.param_groups(lr=lr, weight_decay=weight_decay)]
    known = {id(parameter) for group in groups for parameter in group["params"]}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in known]
    groups.append({"params": [p for p in rest if p.ndim >= 2], "lr": lr, "weight_decay": weight_decay})
    groups.append({"params": [p for p in rest if p.ndim < 2], "lr": lr, "weight_decay": 0.0})
    free = [{**group, "params": _free(group["params"])} for group in groups]
    return [group for group in free if group["params"]]


def _free(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def _outermost(module: nn.Module) -> Iterator[Ruled]:
    if isinstance(module, Transformer | Stack):
        yield module
        return
    for _, child in children(module, ""):
        yield from _outermost(child)
