"""Find the stacks of repeated blocks in any model, from its module tree alone.

A stack is a `ModuleList` or `Sequential` of at least two modules of one class that have parameters. Lists inside the
blocks of another stack (experts, the parts of a block) are not stacks, and neither are lists of bare layers where there
are blocks made of several. An encoder and a decoder are two stacks.
"""

# Parameters, buffers and compiled calls of a module, and fused list operations, have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from normlab.errors import NormLabError
from normlab.stack import Stack

# Less than this share of the largest stack's parameters makes a list an accessory: a feature extractor, a head.
_SHARE = 0.05


@dataclass(frozen=True)
class BlockStack:
    """Blocks that run in sequence. A module that occurs twice in the model's list is listed twice."""

    name: str
    """Path of the module list in the model."""
    blocks: list[nn.Module]
    """The blocks, without wrappers of torch.compile."""
    names: list[str]
    """Paths of the blocks."""
    owner: nn.Module
    """The module that holds the list and runs it; a `Sequential` runs itself."""

    def block_of(self, path: str) -> int | None:
        """Index of the block that a module or parameter belongs to, by its path; None outside of all blocks."""
        return next((k for k, name in enumerate(self.names) if path == name or path.startswith(f"{name}.")), None)

    def hidden(self, state: Tensor) -> Tensor:
        """The hidden state in a block's state: NormLab's own stacks and converted layers may carry more than that."""
        owner = self.owner
        if isinstance(owner, Stack) and {*self.blocks} <= {*owner.layers}:
            return owner.hidden(state)
        converted: Callable[[Tensor], Tensor] | None = getattr(self.blocks[0], "hidden_in_state", None)
        return converted(state) if callable(converted) else state


def find_stacks(model: nn.Module, pattern: str | None = None) -> list[BlockStack]:
    """The stacks of a model, the one with most blocks first.

    `pattern` names the blocks instead: `model.layers.*`, where a star stands for one part of a path.
    """
    model = eager(model)
    if pattern is not None:
        return _matching(model, pattern)
    stacks = list(_outermost(model, "", model))
    composite = [stack for stack in stacks if _is_composite(stack.blocks[0])] or stacks
    if not composite:
        raise NormLabError(
            f"{type(model).__name__} has no repeated blocks: expected a ModuleList or Sequential of at least two "
            "modules of one class with parameters; name the blocks with a pattern, e.g. 'model.layers.*'"
        )
    largest = max(_size(stack.blocks) for stack in composite)
    kept = [stack for stack in composite if _size(stack.blocks) >= _SHARE * largest]
    return sorted(kept, key=lambda stack: -len(stack.blocks))


def sole_blocks(model: nn.Module) -> str | None:
    """Pattern of the largest block that is alone in its list, as if shared by all layers; None if there is a stack."""
    model = eager(model)
    if any(_is_composite(stack.blocks[0]) for stack in _outermost(model, "", model)):
        return None
    lists = [(path, part) for path, part in walk(model, "") if isinstance(part, nn.ModuleList) and len(part) == 1]
    # In the outermost of nested lists, whose owner runs once a pass.
    alone = {path: part for path, part in lists if any(map(_is_composite, part.modules()))}
    largest = max(alone, key=lambda path: (_size([alone[path]]), -len(path)), default=None)
    return None if largest is None else f"{largest}.*"


def own_stack(stack: Stack, name: str = "stack") -> BlockStack:
    """The blocks of a NormLab `Stack` of any depth; `name` is its path in the model."""
    blocks = [eager(block) for block in stack.layers]
    return BlockStack(f"{name}.layers", blocks, [f"{name}.layers.{k}" for k in range(len(blocks))], stack)


def eager(module: nn.Module) -> nn.Module:
    """The module itself in place of the wrapper that torch.compile puts around it."""
    while isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
        module = inner
    return module


def children(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of direct children; shared modules as often as they are listed."""
    for name, child in module._modules.items():
        if child is not None:
            yield (f"{path}.{name}" if path else name), eager(child)


def _outermost(module: nn.Module, path: str, owner: nn.Module) -> Iterator[BlockStack]:
    if isinstance(module, nn.ModuleList | nn.Sequential):
        found = dict(children(module, path))
        if _is_stack(list(found.values())):
            runs_itself = isinstance(module, nn.Sequential)
            yield BlockStack(path, list(found.values()), list(found), module if runs_itself else owner)
            return
    for below, child in children(module, path):
        # A list does not run: what runs its members is the module around it.
        yield from _outermost(child, below, owner if isinstance(module, nn.ModuleList) else module)


def _is_stack(modules: list[nn.Module]) -> bool:
    one_class = len({type(module) for module in modules}) == 1
    # Lists of lists hold stacks; they are none.
    nested = any(isinstance(module, nn.ModuleList | nn.Sequential) for module in modules)
    return len(modules) >= 2 and one_class and not nested and all(_has_parameters(module) for module in modules)


def _is_composite(block: nn.Module) -> bool:
    return sum(_has_parameters(child) for _, child in children(block, "")) >= 2


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _size(blocks: list[nn.Module]) -> int:
    return sum(parameter.numel() for parameter in nn.ModuleList(blocks).parameters())


def _matching(model: nn.Module, pattern: str) -> list[BlockStack]:
    regex = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
    last_star = pattern[: pattern.rfind("*")].count(".") if "*" in pattern else pattern.count(".")
    groups: dict[str, dict[str, nn.Module]] = {}
    tree = dict(walk(model, ""))
    for path, module in tree.items():
        if regex.fullmatch(path):
            groups.setdefault(".".join(path.split(".")[:last_star]), {})[path] = module
    if not groups:
        lists = [path for path, module in tree.items() if isinstance(module, nn.ModuleList | nn.Sequential)]
        hint = f"lists in it: {', '.join(lists[:8])}" if lists else "it holds no lists of modules"
        raise NormLabError(f"no block of {type(model).__name__} matches {pattern!r}; {hint}")
    stacks = [
        BlockStack(name, [*found.values()], [*found], _runner(tree, model, name)) for name, found in groups.items()
    ]
    return sorted(stacks, key=lambda stack: -len(stack.blocks))


def walk(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of all descendants, parents first."""
    for below, child in children(module, path):
        yield below, child
        yield from walk(child, below)


def _runner(tree: dict[str, nn.Module], model: nn.Module, path: str) -> nn.Module:
    while path and isinstance(tree[path], nn.ModuleList):
        path = path.rpartition(".")[0]
    return tree[path] if path else model
