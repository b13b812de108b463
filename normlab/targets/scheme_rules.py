"""Apply a scheme's rules in any model: parameter groups, and constraints after an optimiser step.

NormLab's models and stack know their own; the rest of a model gets what is usual.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from normlab.models.transformer import Transformer
from normlab.probes.blocks import children, eager
from normlab.schemes.contract.scheme import Scheme
from normlab.stack import Stack

Ruled = Transformer | Stack


def ruled(model: nn.Module) -> list[Ruled]:
    """The outermost modules that know a scheme's rules."""
    return list(_outermost(eager(model)))


def scheme_of(model: nn.Module) -> Scheme | None:
    """The scheme of a model with one; None where there is none, or several."""
    found = {str(stack.scheme): stack.scheme for stack in model.modules() if isinstance(stack, Stack)}
    return next(iter(found.values())) if len(found) == 1 else None


def after_step(model: nn.Module) -> None:
    """Re-apply every constraint."""
    for module in ruled(model):
        module.after_step()


def param_groups(model: nn.Module, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Every free parameter in one group, as its scheme says; otherwise matrices decay and vectors do not."""
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
    if isinstance(module, Ruled):
        yield module
        return
    for _, child in children(module, ""):
        yield from _outermost(child)
