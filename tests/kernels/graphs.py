"""The graphs that torch.compile makes of a function: what is computed, and in which shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Node = tuple[str, tuple[int, ...]]
"""An operator and the shape of its result; () if that is no tensor."""


def compiled_graphs(call: Callable[..., Tensor], *inputs: Tensor) -> list[list[Node]]:
    """The nodes of the forward and of the backward graph of a function, whose result is summed."""
    from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func

    torch._dynamo.reset()
    graphs: list[list[Node]] = []

    def note(module: Any, _: Any) -> Any:
        graphs.append([(str(node.target), _shape(node)) for node in module.graph.nodes])
        return make_boxed_func(module.forward)

    def backend(module: Any, examples: Any) -> Any:
        return aot_module_simplified(module, examples, fw_compiler=note, bw_compiler=note)

    torch.compile(call, fullgraph=True, backend=backend)(*inputs).sum().backward()
    return graphs


def count(nodes: list[Node], operator: str, *shapes: tuple[int, ...]) -> int:
    """How many nodes are of an operator, and of one of the shapes if any are given."""
    return sum(operator in name and (not shapes or shape in shapes) for name, shape in nodes)


def _shape(node: Any) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()
