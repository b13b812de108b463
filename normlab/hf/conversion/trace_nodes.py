"""Questions about nodes of a traced forward pass: is it a sum, a view, a product, an argument of the layer?"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from normlab.hf.conversion.trace import ARGUMENTS, HIDDEN_STATE, BranchProgram, ValueRef, get_part, module_path

_VIEWS = ("view", "reshape", "contiguous", "to", "type_as", "float", "clone")
FACTS = ("size", "dim", "ndimension", "numel")


def is_call(node: Any, *functions: Callable[..., Any]) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in functions


def items_of(node: fx.Node, place: int) -> list[fx.Node]:
    """The nodes that take one item of a node's output."""
    return [user for user in node.users if is_call(user, operator.getitem) and user.args[1] == place]


def is_output(node: fx.Node) -> bool:
    """Whether a node is the output of a module, or an item of it."""
    source = node.args[0] if is_call(node, operator.getitem) else node
    return isinstance(source, fx.Node) and source.op == "call_module"


def is_sum(node: fx.Node) -> bool:
    adds = is_call(node, operator.add, operator.iadd, torch.add) or (node.op == "call_method" and node.target == "add")
    return adds and len(node.args) == 2 and not node.kwargs and all(isinstance(part, fx.Node) for part in node.args)


def is_product(node: Any) -> bool:
    return is_call(node, operator.mul, operator.imul, torch.mul) and len(node.args) == 2


def is_number(layer: nn.Module, node: Any) -> bool:
    """Whether a node is a parameter or buffer of one element."""
    return isinstance(node, fx.Node) and node.op == "get_attr" and get_part(layer, module_path(node)).numel() == 1


def joins_outputs(node: Any) -> bool:
    """Whether tuples or lists are added: (state,) + outputs[1:]."""
    return is_call(node, operator.add) and any(isinstance(part, tuple | list) for part in node.args)


def summands(total: fx.Node) -> Sequence[Any]:
    return total.args


def is_view(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target in _VIEWS


def is_idle_dropout(node: fx.Node) -> bool:
    if not is_call(node, F.dropout):
        return False
    p, training = (*node.args[1:], 0.5, True)[:2]
    return node.kwargs.get("training", training) is False or node.kwargs.get("p", p) in (0, 0.0)


def is_argument(node: fx.Node) -> bool:
    """Whether a node is one of the layer's arguments or an item of one."""
    source = node
    while is_call(source, operator.getitem):
        source = source.args[0]  # type: ignore[assignment]
    return source is not node and isinstance(source, fx.Node) and source.name == ARGUMENTS


def nodes_in(value: Any) -> list[fx.Node]:
    parts = value if isinstance(value, tuple | list) else [value]
    return [part for part in parts if isinstance(part, fx.Node)]


def kept(nodes: Sequence[fx.Node], program: BranchProgram) -> list[fx.Node]:
    return [node for node in nodes if node.name in program.keeps]


def renamed(returned: Any, end: str) -> Any:
    """Return value with the node `end` replaced by `HIDDEN_STATE`."""
    if isinstance(returned, tuple | list):
        return tuple(HIDDEN_STATE if part == ValueRef(end) else part for part in returned)
    return HIDDEN_STATE
