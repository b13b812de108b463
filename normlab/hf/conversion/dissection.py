"""The anatomy of a layer, read from its forward pass: by what is added to what, never by names.

Walking back from what the layer returns, every addition of an update to the state is a step; the state is the term on
which the other depends. A module from which the state itself comes out adds inside (BERT's attention.output) and is
opened. What lies between state and update is the branch, the norms at its two ends are its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from normlab.errors import NormLabError
from normlab.hf.conversion.anatomy import Anatomy, Limb, Where, norm_module
from normlab.hf.conversion.flow import (
    ADVICE,
    CALL,
    STATE,
    ByMode,
    Program,
    Ref,
    Signature,
    call_of,
    part_of,
    path_of,
    refer,
    trace,
)
from normlab.hf.conversion.foreign_norm import recognise
from normlab.hf.conversion.function_norm import FunctionNorm, may_be_norm

_VIEWS = ("view", "reshape", "contiguous", "to", "type_as", "float", "clone")
_FACTS = ("size", "dim", "ndimension", "numel")


def dissect(layer: nn.Module, opened: set[str] | None = None) -> Anatomy:
    """The anatomy of a layer; one that does not follow the usual shape is refused with the part that was not found.

    `opened` names the modules that were opened in layers like it, and is told of those that are opened here.
    """
    opened = set() if opened is None else opened
    training, resting = (_dissect(layer, opened, training=mode) for mode in (True, False))
    if training == resting:
        return resting
    if [_places(one) for one in training.limbs] != [_places(one) for one in resting.limbs]:
        raise NormLabError(f"{type(layer).__name__} is wired differently in training; {ADVICE}")
    pairs = zip(training.limbs, resting.limbs, strict=True)
    limbs = tuple(Limb(ByMode(one.run, two.run), *_places(two), name=two.name) for one, two in pairs)  # type: ignore
    return Anatomy(limbs, resting.signature, resting.topology, resting.shared_read, resting.returns, resting.exact)


def _places(limb: Limb) -> tuple[Where | None, Where | None, Where | None]:
    return limb.read, limb.shape, limb.write


def _dissect(layer: nn.Module, opened: set[str], *, training: bool) -> Anatomy:
    while True:
        try:
            return _Reading(layer, trace(layer, opened, training=training)).anatomy()
        except _AddsInside as found:
            opened.add(found.path)


class _AddsInside(Exception):  # noqa: N818  # a turn in the search, no error
    def __init__(self, path: str):
        self.path = path


@dataclass
class _Addition:
    """state + updates, and the norm behind it."""

    skip: fx.Node
    updates: list[fx.Node]
    write: Where | None
    exact: bool


class _Reading:
    """One traced pass of one layer."""

    def __init__(self, layer: nn.Module, graph: fx.Graph):
        self.layer, self.who = layer, type(layer).__name__
        self.nodes = list(graph.nodes)
        self.state = next(node for node in self.nodes if node.name == STATE.name)
        self.returned = next(node for node in self.nodes if node.op == "output").args[0]
        self._states = {self.state}
        self._norms: dict[fx.Node, tuple[Where, fx.Node] | None] = {}
        self._above: dict[fx.Node, set[fx.Node]] = {}
        for node in self.nodes:
            sources = node.all_input_nodes
            self._above[node] = set(sources).union(*(self._above[source] for source in sources))

    def anatomy(self) -> Anatomy:
        end = self.returned[0] if isinstance(self.returned, tuple | list) else self.returned
        additions = self._additions(end)
        if len(additions) == 1:
            # One addition for all branches: its update is their sum.
            additions[0].updates = [term for one in additions[0].updates for term in self._terms(one)]
        parallel = len(additions[0].updates) > 1
        cuts = [self._cut(update, one) for one in additions for update in one.updates]
        extras = [node for node in _nodes_in(self.returned) if node is not end]
        limbs = self._limbs(cuts, extras)
        inputs = {cut.source for cut in cuts}
        return Anatomy(
            limbs,
            Signature.of(self.layer),
            "parallel" if parallel else "serial",
            shared_read=parallel and len(inputs) == 1 and cuts[0].read is not None,
            returns=_renamed(refer(self.returned), end.name),
            exact=all(one.exact for one in additions),
        )

    # -- from the end to the start -------------------------------------------------------------------------------

    def _additions(self, end: Any) -> list[_Addition]:
        found: list[_Addition] = []
        node = self._plain(end)
        while node is not self.state:
            found.insert(0, self._addition(node))
            node = self._plain(found[0].skip)
            self._states.add(node)
        if not found:
            raise NormLabError(f"{self.who} adds nothing to its input; {ADVICE}")
        return found

    def _addition(self, node: fx.Node) -> _Addition:
        write = self._norm(node)
        total = node if write is None else self._normed(node)
        if not _is_sum(total):
            raise self._not_a_sum(total)
        one, other = _summands(total)
        for skip, update in ((one, other), (other, one)):
            if self._plain(skip) in self._above[update]:
                return _Addition(skip, [update], write, exact=True)
        terms = self._terms(total)
        for skip in terms:
            updates = [term for term in terms if term is not skip]
            if all(self._plain(skip) in self._above[update] for update in updates):
                return _Addition(skip, updates, write, exact=False)
        raise self._not_a_sum(total)

    def _terms(self, node: fx.Node) -> list[fx.Node]:
        """The terms of a sum, sums that nobody else reads taken apart, in the order of their computation."""
        plain = self._plain(node)
        if not _is_sum(plain) or len(plain.users) > 1:
            return [node]
        return sorted((term for part in _summands(plain) for term in self._terms(part)), key=self.nodes.index)

    def _not_a_sum(self, node: fx.Node) -> Exception:
        """The state comes out of something else than an addition: a module is opened, all else refused."""
        source = node.args[0] if _is(node, operator.getitem) else node
        if isinstance(source, fx.Node) and source.op == "call_module":
            path = path_of(source)
            if next(part_of(self.layer, path).children(), None) is not None:
                return _AddsInside(path)
        if _joins_outputs(source):
            return NormLabError(
                f"{self.who}: its state was not found: a tuple of outputs is joined to another on the way; {ADVICE}"
            )
        what = path_of(node) if node.op == "call_module" else node.name
        return NormLabError(
            f"{self.who}: no addition of an update to the state was found behind {what!r}; expected x + F(x), "
            f"with or without a norm after it; {ADVICE}"
        )

    # -- one branch ----------------------------------------------------------------------------------------------

    def _cut(self, update: fx.Node, addition: _Addition) -> _Cut:
        skip, end = self._plain(addition.skip), self._plain(update)
        shape = self._norm(end)
        if shape is not None:
            end = self._normed(end)
        found = [node for node in self._above[end] | {end} if self._norm(node) and self._normed(node) is skip]
        # Of functions that follow each other the last one is the norm: a cast behind it belongs to it.
        reads = [node for node in found if not any(node in self._above[other] for other in found)]
        if not reads:
            return _Cut(end, addition.skip, skip, None, shape, addition.write)
        if len(reads) > 1 or skip in self._needed(end, {reads[0]}):
            names = ", ".join(sorted(str(self._norm(node)) for node in reads))
            raise NormLabError(f"{self.who}: a branch reads the state through {names} and in another way; {ADVICE}")
        return _Cut(end, reads[0], skip, self._norm(reads[0]), shape, addition.write)

    def _limbs(self, cuts: Sequence[_Cut], extras: Sequence[fx.Node]) -> tuple[Limb, ...]:
        programs = [self._program(cut, []) for cut in cuts]
        for extra in extras:
            for place, cut in enumerate(cuts):
                if cut.source in self._above[extra] and self.state not in self._needed(extra, {cut.source, cut.skip}):
                    programs[place] = self._program(cut, [extra, *_kept(self.nodes, programs[place])])
                    break
            else:
                raise NormLabError(f"{self.who} returns {extra.name!r}, which no branch computes; {ADVICE}")
        return tuple(
            Limb(program, cut.read, cut.shape, cut.write, self._name(program))
            for cut, program in zip(cuts, programs, strict=True)
        )

    def _program(self, cut: _Cut, extras: Sequence[fx.Node]) -> Program:
        given = {cut.source, cut.skip}
        needed = set[fx.Node]().union(*(self._needed(node, given) for node in (cut.end, *extras)))
        if self.state in needed:
            raise NormLabError(f"{self.who}: a branch reads the layer's input behind the first addition; {ADVICE}")
        self._check_arguments(needed)
        calls = tuple(call_of(node) for node in self.nodes if node in needed and node.op != "placeholder")
        # Whatever asks for the shape of a state may look at what the branch reads: it is the same.
        asked = [node.args[0].name for node in self.nodes if node in needed and self._is_fact_of_state(node)]  # type: ignore
        inputs = tuple(dict.fromkeys((cut.source.name, cut.skip.name, *asked)))
        return Program(inputs, calls, Ref(cut.end.name), tuple(node.name for node in extras))

    def _needed(self, node: fx.Node, given: set[fx.Node]) -> set[fx.Node]:
        """What must be computed for a node where some are given."""
        needed: set[fx.Node] = set()
        waiting = [node]
        while waiting:
            one = waiting.pop()
            if one not in given and one not in needed:
                needed.add(one)
                waiting += [] if self._is_fact_of_state(one) else one.all_input_nodes
        return needed

    def _check_arguments(self, needed: set[fx.Node]) -> None:
        """An argument may be handed to a module. What the layer does with it itself may hang on whether it is there."""
        for node in needed:
            own = [part for part in node.all_input_nodes if _is_argument(part)]
            if own and node.op != "call_module" and not _is_argument(node):
                raise NormLabError(f"{self.who} computes with its argument {own[0].args[1]!r} itself; {ADVICE}")

    def _is_fact_of_state(self, node: fx.Node) -> bool:
        """Whether a node asks for a state's shape or type alone."""
        asks = _is(node, getattr) or (node.op == "call_method" and node.target in _FACTS)
        return asks and self._plain(node.args[0]) in self._states

    def _name(self, program: Program) -> str:
        """The module of a branch that has most parameters."""
        modules = {
            call.target: part_of(self.layer, call.target) for call in program.calls if call.kind == "call_module"
        }
        return max(modules, key=lambda path: sum(one.numel() for one in modules[path].parameters()), default="branch")

    # -- nodes ---------------------------------------------------------------------------------------------------

    def _norm(self, node: Any) -> Where | None:
        """The norm that a node computes: the path of its module, or its functions."""
        if not isinstance(node, fx.Node):
            return None
        if node not in self._norms:
            candidates = [self._module(node)] if node.op == "call_module" else self._functions(node)
            known = (one for one in candidates if one and recognise(norm_module(self.layer, one[0]), self.layer))
            self._norms[node] = next(known, None)
        found = self._norms[node]
        return None if found is None else found[0]

    def _normed(self, norm: fx.Node) -> fx.Node:
        """What the norm of a node reads."""
        found = self._norms[norm]
        assert found is not None
        return self._plain(found[1])

    def _module(self, node: fx.Node) -> tuple[Where, fx.Node] | None:
        alone = len(node.args) == 1 and not node.kwargs and isinstance(node.args[0], fx.Node)
        return (path_of(node), node.args[0]) if alone else None  # type: ignore[return-value]

    def _functions(self, node: fx.Node) -> Iterator[tuple[Where, fx.Node]]:
        """Functions that end in a node and need one tensor and parameters alone, with that tensor."""
        core = self._plain(node) if _is_view(node) else node
        sources = [part for part in core.args if isinstance(part, fx.Node)] if may_be_norm(core) else []
        for source in dict.fromkeys(self._plain(part) for part in sources):
            needed = self._needed(node, {source})
            if not any(one.op in ("placeholder", "call_module") for one in needed):
                calls = tuple(call_of(one) for one in self.nodes if one in needed)
                name = core.target if isinstance(core.target, str) else core.target.__name__
                yield FunctionNorm(name, Program((source.name,), calls, Ref(node.name))), source

    def _plain(self, node: Any) -> fx.Node:
        """The same tensor before it was reshaped, cast or passed through a dropout that drops nothing."""
        while isinstance(node, fx.Node) and (_is_view(node) or _is_idle_dropout(node)):
            node = node.args[0]
        if not isinstance(node, fx.Node):
            raise NormLabError(f"{self.who} returns no tensor where its state was expected; {ADVICE}")
        return node


@dataclass(frozen=True)
class _Cut:
    """Where a branch begins and ends, and the norms around it."""

    end: fx.Node
    source: fx.Node
    skip: fx.Node
    read: Where | None
    shape: Where | None
    write: Where | None


def _is(node: Any, *functions: Callable[..., Any]) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in functions


def _is_sum(node: fx.Node) -> bool:
    adds = _is(node, operator.add, operator.iadd, torch.add) or (node.op == "call_method" and node.target == "add")
    return adds and len(node.args) == 2 and not node.kwargs and all(isinstance(part, fx.Node) for part in node.args)


def _joins_outputs(node: Any) -> bool:
    """Whether tuples or lists are added: (state,) + outputs[1:]."""
    return _is(node, operator.add) and any(isinstance(part, tuple | list) for part in node.args)


def _summands(total: fx.Node) -> Sequence[Any]:
    return total.args


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target in _VIEWS


def _is_idle_dropout(node: fx.Node) -> bool:
    if not _is(node, F.dropout):
        return False
    p, training = (*node.args[1:], 0.5, True)[:2]
    return node.kwargs.get("training", training) is False or node.kwargs.get("p", p) in (0, 0.0)


def _is_argument(node: fx.Node) -> bool:
    """Whether a node is one of the layer's arguments, or a part of one."""
    source = node
    while _is(source, operator.getitem):
        source = source.args[0]  # type: ignore[assignment]
    return source is not node and isinstance(source, fx.Node) and source.name == CALL


def _nodes_in(value: Any) -> list[fx.Node]:
    parts = value if isinstance(value, tuple | list) else [value]
    return [part for part in parts if isinstance(part, fx.Node)]


def _kept(nodes: Sequence[fx.Node], program: Program) -> list[fx.Node]:
    return [node for node in nodes if node.name in program.keeps]


def _renamed(returned: Any, end: str) -> Any:
    """The state under its own name, whatever node it was."""
    if isinstance(returned, tuple | list):
        return tuple(STATE if part == Ref(end) else part for part in returned)
    return STATE
