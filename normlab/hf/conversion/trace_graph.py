"""The graph of a traced layer: which node depends on which, and what must be computed for one."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from normlab.errors import NormLabError
from normlab.hf.conversion.trace import ADVICE, HIDDEN_STATE
from normlab.hf.conversion.trace_nodes import FACTS, is_call, is_idle_dropout, is_view


class TracedGraph:
    """The traced graph of one layer, and the nodes that are known to be states."""

    def __init__(self, layer: nn.Module, graph: fx.Graph):
        self.layer, self.who = layer, type(layer).__name__
        self.nodes = list(graph.nodes)
        self.state = next(node for node in self.nodes if node.name == HIDDEN_STATE.name)
        self.returned = next(node for node in self.nodes if node.op == "output").args[0]
        self.states = {self.state}
        self.above: dict[fx.Node, set[fx.Node]] = {}
        for node in self.nodes:
            sources = node.all_input_nodes
            self.above[node] = set(sources).union(*(self.above[source] for source in sources))

    def needed(self, node: fx.Node, given: set[fx.Node]) -> set[fx.Node]:
        """Nodes that must be computed for a node if those in `given` are known."""
        needed: set[fx.Node] = set()
        waiting = [node]
        while waiting:
            one = waiting.pop()
            if one not in given and one not in needed:
                needed.add(one)
                waiting += [] if self.is_fact_of_state(one) else one.all_input_nodes
        return needed

    def asked(self, needed: set[fx.Node]) -> list[str]:
        """Names of the states whose shape or dtype is asked for."""
        return [node.args[0].name for node in self.nodes if node in needed and self.is_fact_of_state(node)]  # type: ignore

    def is_fact_of_state(self, node: fx.Node) -> bool:
        """Whether a node reads only the shape or dtype of a state."""
        asks = is_call(node, getattr) or (node.op == "call_method" and node.target in FACTS)
        return asks and self.plain(node.args[0]) in self.states

    def plain(self, node: Any) -> fx.Node:
        """The node before views, casts and inactive dropout."""
        while isinstance(node, fx.Node) and (is_view(node) or is_idle_dropout(node)):
            node = node.args[0]
        if not isinstance(node, fx.Node):
            raise NormLabError(f"{self.who} returns no tensor where its state was expected; {ADVICE}")
        return node
