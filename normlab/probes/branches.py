"""Find the residual branches of any block, by running it: which matrices write to the residual stream.

A matrix is the last of its branch if what it returns reaches the block's output without passing another matrix and is
as wide as the state. Matrices side by side under the same child of the block (experts) make one branch.
"""

# torch annotates hooks, modules and some tensor functions only in part.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normlab.probes.blocks import walk
from normlab.probes.outputs import tensors
from normlab.probes.replay import RecordedCall


@dataclass
class Branch:
    """The last matrices of one branch: modules whose outputs, added up, are what the branch returns."""

    name: str
    ends: dict[str, nn.Module]
    """The matrices by their paths in the block."""

    def split(self) -> list[Branch]:
        """One branch for each of its matrices."""
        return [Branch(path, {path: end}) for path, end in self.ends.items()]


def find_branches(call: RecordedCall) -> list[Branch]:
    """The branches of a block, in the order in which it lists them."""
    matrices = {path: module for path, module in walk(call.block, "") if _is_matrix(module)}
    outputs: dict[nn.Module, list[Tensor]] = {module: [] for module in matrices.values()}

    def cut(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return detached(args), detached(kwargs)

    def keep(module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, Tensor) and output.is_floating_point():
            outputs[module].append(output.detach().requires_grad_())
            return _writable(outputs[module][-1])
        return output

    with ExitStack() as hooks:
        for module in outputs:
            hooks.callback(module.register_forward_pre_hook(cut, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(keep).remove)
        result = call.repeat()
    wide = [(m, t) for m, found in outputs.items() for t in found if t.shape[-1] == call.width]
    gradients = vjp([result], [tensor for _, tensor in wide])
    reaching = {module for (module, _), gradient in zip(wide, gradients, strict=True) if gradient is not None}
    grouped = _grouped(call.block, {path: module for path, module in matrices.items() if module in reaching})
    return [branch for group in grouped for branch in (group.split() if _one_after_another(call, group) else [group])]


def _one_after_another(call: RecordedCall, group: Branch) -> bool:
    """Whether a matrix of a group reads the output of another one, so that they are separate branches."""
    read: list[Tensor] = []
    written: list[Tensor] = []

    def keep(_end: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        read.extend(tensors((args, kwargs)))
        if isinstance(output, Tensor):
            written.append(output.detach().requires_grad_())
            return _writable(written[-1])
        return output

    if len(group.ends) < 2:
        return False
    with ExitStack() as hooks:
        for end in group.ends.values():
            hooks.callback(end.register_forward_hook(keep, with_kwargs=True).remove)
        call.repeat()
    found = vjp([tensor for tensor in read if tensor.requires_grad], written)
    return any(gradient is not None for gradient in found)


def _is_matrix(module: nn.Module) -> bool:
    """Whether a module has a weight matrix of its own; embedding tables do not count."""
    own = module.parameters(recurse=False)
    return not isinstance(module, nn.Embedding) and any(parameter.ndim >= 2 for parameter in own)


def _grouped(block: nn.Module, ends: Mapping[str, nn.Module]) -> list[Branch]:
    """Group last matrices by the part of the block they belong to, without those inside another one."""
    outer = {path: end for path, end in ends.items() if not any(path.startswith(f"{other}.") for other in ends)}
    groups: dict[str, Branch] = {}
    for path, end in outer.items():
        part = _part(block, path.split("."), list(outer))
        branch = groups.setdefault(part, Branch(part, {}))
        # One module may stand at two places.
        if end not in branch.ends.values():
            branch.ends[path] = end
    return [branch if len(branch.ends) > 1 else branch.split()[0] for branch in groups.values()]


def _part(block: nn.Module, names: Sequence[str], ends: Sequence[str]) -> str:
    """The submodule of the block that a last matrix belongs to; lists, and submodules with all of them, are opened."""
    path = names[0]
    for name in names[1:]:
        alone = len(ends) > 1 and all(end.startswith(f"{path}.") for end in ends)
        if not (alone or isinstance(block.get_submodule(path), nn.ModuleList | nn.ModuleDict)):
            break
        path = f"{path}.{name}"
    return path


def _writable(leaf: Tensor) -> Tensor:
    """A differentiable copy of a leaf: some blocks (Falcon's) add to a branch's output in place."""
    return leaf.clone()


def detached(value: Any) -> Any:
    """Detach every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, tuple | list):
        return type(value)(map(detached, value)) if not hasattr(value, "_fields") else value
    return {name: detached(part) for name, part in value.items()} if type(value) is dict else value


def vjp(outputs: list[Tensor], inputs: list[Tensor], v: list[Tensor] | None = None) -> tuple[Tensor | None, ...]:
    """vᵀ ∂outputs/∂inputs with v = 1; None for inputs that the outputs do not depend on."""
    if not inputs or not any(output.requires_grad for output in outputs):
        return (None,) * len(inputs)
    v = [torch.ones_like(output) for output in outputs] if v is None else v
    return torch.autograd.grad(outputs, inputs, v, allow_unused=True)
