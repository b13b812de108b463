"""Find a write to several streams in a traced layer: the module that read them, the update, the operations between."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from normlab.errors import NormLabError
from normlab.hf.conversion.foreign_streams import StreamRead, recognise_read
from normlab.hf.conversion.stream_step import StreamStep, WriteProgram, writes_alike
from normlab.hf.conversion.trace import ADVICE, get_part, module_path, to_traced_call
from normlab.hf.conversion.trace_graph import TracedGraph
from normlab.hf.conversion.trace_nodes import is_call, is_output, items_of


@dataclass(frozen=True)
class StreamWrite:
    """A write to several streams: the state before it, what its branch reads and returns, and the step."""

    state: fx.Node
    source: fx.Node
    update: fx.Node
    step: StreamStep


def find_stream_write(graph: TracedGraph, end: fx.Node) -> StreamWrite | None:
    """The write to several streams, whose coefficients and branch's input one module made of them; None if none."""
    reads = [node for node in graph.above[end] if _stream_read(graph, node) is not None]
    if not reads:
        return None
    call = max(reads, key=graph.nodes.index)
    read, state = _stream_read(graph, call), call.args[0]
    assert read is not None
    assert isinstance(state, fx.Node)
    graph.states.add(graph.plain(state))
    source, *carry = (items_of(call, place) for place in read.outputs)
    states = {state, graph.plain(state), *(items_of(call, read.state) if read.state is not None else ())}
    given = states.union(*carry)
    update = next(
        (node for node in _outputs_behind(graph, source, end) if not _reads(graph, end, node, given, source)), None
    )
    if update is None or len(source) != 1:
        raise NormLabError(f"{graph.who}: no update was found behind {module_path(call)!r}; {ADVICE}")
    write = _write_program(graph, end, update, states, carry)
    if not writes_alike(read, write):
        raise NormLabError(
            f"{graph.who}: {module_path(call)!r} reads its streams as {read.scheme.name} does, but what {end.name!r} "
            f"writes to them is something else; {ADVICE}"
        )
    return StreamWrite(state, source[0], update, StreamStep(module_path(call), read, write))


def _outputs_behind(graph: TracedGraph, source: Sequence[fx.Node], end: fx.Node) -> list[fx.Node]:
    """Outputs of modules that depend on a branch's input, the last one first."""
    behind = [node for node in graph.above[end] if not graph.above[node].isdisjoint(source)]
    return sorted((node for node in behind if is_output(node)), key=graph.nodes.index, reverse=True)


def _reads(graph: TracedGraph, end: fx.Node, update: fx.Node, given: set[fx.Node], source: Sequence[fx.Node]) -> bool:
    """Whether a write depends on a branch's input in another way than through its update."""
    return not graph.needed(end, given | {update}).isdisjoint(source)


def _write_program(
    graph: TracedGraph, end: fx.Node, update: fx.Node, states: set[fx.Node], carry: Sequence[Sequence[fx.Node]]
) -> WriteProgram:
    needed = graph.needed(end, states.union([update], *carry))
    other = next((node for node in needed if node.op not in ("call_function", "call_method")), None)
    if other is not None:
        raise NormLabError(f"{graph.who}: its write to the streams also reads {other.name!r}; {ADVICE}")
    calls = tuple(to_traced_call(node) for node in graph.nodes if node in needed)
    names = [node.name for node in graph.nodes if node in states] + graph.asked(needed)
    carried = tuple(tuple(node.name for node in nodes) for nodes in carry)
    return WriteProgram(tuple(dict.fromkeys(names)), update.name, carried, calls, end.name)


def _stream_read(graph: TracedGraph, node: fx.Node) -> StreamRead | None:
    """What a node computes that calls a module on the streams alone and takes its output apart; else None."""
    alone = node.op == "call_module" and bool(node.users) and len(node.args) == 1 and not node.kwargs
    alone = alone and all(is_call(user, operator.getitem) for user in node.users)
    return recognise_read(get_part(graph.layer, module_path(node))) if alone else None
