"""Find the residual branches and norms of a layer from its traced forward pass, without relying on names.

From the output backwards, every addition of an update to the hidden state ends a residual branch; the state is the
term that the other term depends on. A submodule that does the addition itself (BERT's attention.output) is traced
inside. A branch is everything between state and update; norms at its two ends belong to it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from normlab.errors import NormLabError
from normlab.hf.conversion.foreign_gate import recognise_gate
from normlab.hf.conversion.foreign_norm import recognise_norm
from normlab.hf.conversion.function_norm import FunctionNorm, may_be_norm
from normlab.hf.conversion.layer_structure import LayerStructure, NormLocation, ResidualBranch, norm_module
from normlab.hf.conversion.trace import (
    ADVICE,
    ARGUMENTS,
    HIDDEN_STATE,
    BranchProgram,
    LayerSignature,
    TrainEvalProgram,
    ValueRef,
    get_part,
    module_path,
    replace_nodes,
    to_traced_call,
    trace_layer,
)

_VIEWS = ("view", "reshape", "contiguous", "to", "type_as", "float", "clone")
_FACTS = ("size", "dim", "ndimension", "numel")


def analyse_layer(layer: nn.Module, opened: set[str] | None = None) -> LayerStructure:
    """Return the structure of a layer; raises with the part that was not found if it has no usual residual structure.

    `opened` holds the paths of submodules to trace inside; paths that turn out to be needed are added.
    """
    opened = set() if opened is None else opened
    training, resting = (_analyse(layer, opened, training=mode) for mode in (True, False))
    if training == resting:
        return resting
    if [_places(one) for one in training.branches] != [_places(one) for one in resting.branches]:
        raise NormLabError(f"{type(layer).__name__} is wired differently in training; {ADVICE}")
    pairs = zip(training.branches, resting.branches, strict=True)
    branches = tuple(
        dataclasses.replace(two, run=TrainEvalProgram(one.run, two.run))  # type: ignore[arg-type]
        for one, two in pairs
    )
    return dataclasses.replace(resting, branches=branches)


def _places(branch: ResidualBranch) -> tuple[NormLocation | None, ...]:
    return branch.read, branch.shape, branch.write, branch.gate


def _analyse(layer: nn.Module, opened: set[str], *, training: bool) -> LayerStructure:
    while True:
        try:
            return _TracedLayer(layer, trace_layer(layer, opened, training=training)).structure()
        except _AddsInside as found:
            opened.add(found.path)


class _AddsInside(Exception):  # noqa: N818  # control flow of the search, no error
    def __init__(self, path: str):
        self.path = path


@dataclass
class _Addition:
    """state + updates, and the norm after it."""

    skip: fx.Node
    updates: list[fx.Node]
    write: NormLocation | None
    exact: bool
    gate: str | None = None


class _TracedLayer:
    """The traced graph of one layer."""

    def __init__(self, layer: nn.Module, graph: fx.Graph):
        self.layer, self.who = layer, type(layer).__name__
        self.nodes = list(graph.nodes)
        self.state = next(node for node in self.nodes if node.name == HIDDEN_STATE.name)
        self.returned = next(node for node in self.nodes if node.op == "output").args[0]
        self._states = {self.state}
        self._norms: dict[fx.Node, tuple[NormLocation, fx.Node] | None] = {}
        self._above: dict[fx.Node, set[fx.Node]] = {}
        for node in self.nodes:
            sources = node.all_input_nodes
            self._above[node] = set(sources).union(*(self._above[source] for source in sources))

    def structure(self) -> LayerStructure:
        end = self.returned[0] if isinstance(self.returned, tuple | list) else self.returned
        scaled, scale = self._without_scale(end)
        additions = self._additions(scaled)
        if len(additions) == 1:
            # Parallel branches: the update of the one addition is their sum.
            additions[0].updates = [term for one in additions[0].updates for term in self._terms(one)]
        parallel = len(additions[0].updates) > 1
        cuts = [self._cut(update, one) for one in additions for update in one.updates]
        extras = [node for node in _nodes_in(self.returned) if node is not end]
        branches = self._branches(cuts, extras)
        inputs = {cut.source for cut in cuts}
        return LayerStructure(
            branches,
            LayerSignature.of(self.layer),
            "parallel" if parallel else "serial",
            shared_read=parallel and len(inputs) == 1 and cuts[0].read is not None,
            returns=_renamed(replace_nodes(self.returned), end.name),
            exact=all(one.exact for one in additions),
            scale=scale,
        )

    # -- from the end to the start -------------------------------------------------------------------------------

    def _without_scale(self, end: Any) -> tuple[Any, str | None]:
        """(the state before its multiplication by a number of the layer, the number's path), or the state and None."""
        node = self._plain(end)
        factors = node.args if _is_product(node) else ()
        for one, other in (factors, factors[::-1]) if factors else ():
            if _is_number(self.layer, other) and isinstance(one, fx.Node):
                return one, module_path(other)
        return end, None

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
        gated = self._gated(node)
        if gated is not None:
            return gated
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

    def _gated(self, node: fx.Node) -> _Addition | None:
        """The addition that a module computes from (state, update) with weights of its own; None if it is no such."""
        if node.op != "call_module" or len(node.args) != 2 or node.kwargs:
            return None
        skip, update = node.args
        pair = isinstance(skip, fx.Node) and isinstance(update, fx.Node) and self._plain(skip) in self._above[update]
        if not pair or recognise_gate(get_part(self.layer, module_path(node))) is None:
            return None
        return _Addition(skip, [update], None, exact=True, gate=module_path(node))  # type: ignore[arg-type]

    def _terms(self, node: fx.Node) -> list[fx.Node]:
        """Terms of a sum in the order of computation; nested sums without other users are expanded."""
        plain = self._plain(node)
        if not _is_sum(plain) or len(plain.users) > 1:
            return [node]
        return sorted((term for part in _summands(plain) for term in self._terms(part)), key=self.nodes.index)

    def _not_a_sum(self, node: fx.Node) -> Exception:
        """Exception for a state that no addition returned: trace inside a submodule, or fail."""
        source = node.args[0] if _is(node, operator.getitem) else node
        if isinstance(source, fx.Node) and source.op == "call_module":
            path = module_path(source)
            if next(get_part(self.layer, path).children(), None) is not None:
                return _AddsInside(path)
        if _joins_outputs(source):
            return NormLabError(
                f"{self.who}: its state was not found: a tuple of outputs is joined to another on the way; {ADVICE}"
            )
        what = module_path(node) if node.op == "call_module" else node.name
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
        # Of consecutive candidates the last one is the norm: a cast after it belongs to it.
        reads = [node for node in found if not any(node in self._above[other] for other in found)]
        if not reads:
            return _Cut(end, addition.skip, skip, None, shape, addition.write, addition.gate)
        if len(reads) > 1 or skip in self._needed(end, {reads[0]}):
            names = ", ".join(sorted(str(self._norm(node)) for node in reads))
            raise NormLabError(f"{self.who}: a branch reads the state through {names} and in another way; {ADVICE}")
        return _Cut(end, reads[0], skip, self._norm(reads[0]), shape, addition.write, addition.gate)

    def _branches(self, cuts: Sequence[_Cut], extras: Sequence[fx.Node]) -> tuple[ResidualBranch, ...]:
        programs = [self._program(cut, []) for cut in cuts]
        for extra in extras:
            for place, cut in enumerate(cuts):
                if cut.source in self._above[extra] and self.state not in self._needed(extra, {cut.source, cut.skip}):
                    programs[place] = self._program(cut, [extra, *_kept(self.nodes, programs[place])])
                    break
            else:
                raise NormLabError(f"{self.who} returns {extra.name!r}, which no branch computes; {ADVICE}")
        return tuple(
            ResidualBranch(program, cut.read, cut.shape, cut.write, self._name(program), cut.gate)
            for cut, program in zip(cuts, programs, strict=True)
        )

    def _program(self, cut: _Cut, extras: Sequence[fx.Node]) -> BranchProgram:
        given = {cut.source, cut.skip}
        needed = set[fx.Node]().union(*(self._needed(node, given) for node in (cut.end, *extras)))
        if self.state in needed:
            raise NormLabError(f"{self.who}: a branch reads the layer's input behind the first addition; {ADVICE}")
        self._check_arguments(needed)
        calls = tuple(to_traced_call(node) for node in self.nodes if node in needed and node.op != "placeholder")
        # Nodes that ask for the shape of the state can use the input of the branch, which has the same shape.
        asked = [node.args[0].name for node in self.nodes if node in needed and self._is_fact_of_state(node)]  # type: ignore
        inputs = tuple(dict.fromkeys((cut.source.name, cut.skip.name, *asked)))
        return BranchProgram(inputs, calls, ValueRef(cut.end.name), tuple(node.name for node in extras))

    def _needed(self, node: fx.Node, given: set[fx.Node]) -> set[fx.Node]:
        """Nodes that must be computed for a node if those in `given` are known."""
        needed: set[fx.Node] = set()
        waiting = [node]
        while waiting:
            one = waiting.pop()
            if one not in given and one not in needed:
                needed.add(one)
                waiting += [] if self._is_fact_of_state(one) else one.all_input_nodes
        return needed

    def _check_arguments(self, needed: set[fx.Node]) -> None:
        """Raise if the layer itself computes with an argument, which may depend on whether it is None."""
        for node in needed:
            own = [part for part in node.all_input_nodes if _is_argument(part)]
            # A product with None raises, so that an argument which it needs is never silently missed.
            if own and node.op != "call_module" and not _is_argument(node) and not _is_product(node):
                raise NormLabError(f"{self.who} computes with its argument {own[0].args[1]!r} itself; {ADVICE}")

    def _is_fact_of_state(self, node: fx.Node) -> bool:
        """Whether a node reads only the shape or dtype of a state."""
        asks = _is(node, getattr) or (node.op == "call_method" and node.target in _FACTS)
        return asks and self._plain(node.args[0]) in self._states

    def _name(self, program: BranchProgram) -> str:
        """Name of a branch: its submodule with the most parameters."""
        modules = {
            call.target: get_part(self.layer, call.target) for call in program.calls if call.kind == "call_module"
        }
        return max(modules, key=lambda path: sum(one.numel() for one in modules[path].parameters()), default="branch")

    # -- nodes ---------------------------------------------------------------------------------------------------

    def _norm(self, node: Any) -> NormLocation | None:
        """The norm that a node computes (module path or functions), or None."""
        if not isinstance(node, fx.Node):
            return None
        if node not in self._norms:
            candidates = [self._module(node)] if node.op == "call_module" else self._functions(node)
            known = (one for one in candidates if one and recognise_norm(norm_module(self.layer, one[0]), self.layer))
            self._norms[node] = next(known, None)
        found = self._norms[node]
        return None if found is None else found[0]

    def _normed(self, norm: fx.Node) -> fx.Node:
        """Input of the norm that a node computes."""
        found = self._norms[norm]
        assert found is not None
        return self._plain(found[1])

    def _module(self, node: fx.Node) -> tuple[NormLocation, fx.Node] | None:
        alone = len(node.args) == 1 and not node.kwargs and isinstance(node.args[0], fx.Node)
        return (module_path(node), node.args[0]) if alone else None  # type: ignore[return-value]

    def _functions(self, node: fx.Node) -> Iterator[tuple[NormLocation, fx.Node]]:
        """Candidate function norms that end in a node and read one tensor besides parameters, with that tensor."""
        core = self._plain(node) if _is_view(node) else node
        sources = [part for part in core.args if isinstance(part, fx.Node)] if may_be_norm(core) else []
        for source in dict.fromkeys(self._plain(part) for part in sources):
            needed = self._needed(node, {source})
            if not any(one.op in ("placeholder", "call_module") for one in needed):
                calls = tuple(to_traced_call(one) for one in self.nodes if one in needed)
                name = core.target if isinstance(core.target, str) else core.target.__name__
                yield FunctionNorm(name, BranchProgram((source.name,), calls, ValueRef(node.name))), source

    def _plain(self, node: Any) -> fx.Node:
        """The node before views, casts and inactive dropout."""
        while isinstance(node, fx.Node) and (_is_view(node) or _is_idle_dropout(node)):
            node = node.args[0]
        if not isinstance(node, fx.Node):
            raise NormLabError(f"{self.who} returns no tensor where its state was expected; {ADVICE}")
        return node


@dataclass(frozen=True)
class _Cut:
    """First and last node of a branch, and the norms around it."""

    end: fx.Node
    source: fx.Node
    skip: fx.Node
    read: NormLocation | None
    shape: NormLocation | None
    write: NormLocation | None
    gate: str | None


def _is(node: Any, *functions: Callable[..., Any]) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in functions


def _is_sum(node: fx.Node) -> bool:
    adds = _is(node, operator.add, operator.iadd, torch.add) or (node.op == "call_method" and node.target == "add")
    return adds and len(node.args) == 2 and not node.kwargs and all(isinstance(part, fx.Node) for part in node.args)


def _is_product(node: Any) -> bool:
    return _is(node, operator.mul, operator.imul, torch.mul) and len(node.args) == 2


def _is_number(layer: nn.Module, node: Any) -> bool:
    """Whether a node is a parameter or buffer of one element."""
    return isinstance(node, fx.Node) and node.op == "get_attr" and get_part(layer, module_path(node)).numel() == 1


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
    """Whether a node is one of the layer's arguments or an item of one."""
    source = node
    while _is(source, operator.getitem):
        source = source.args[0]  # type: ignore[assignment]
    return source is not node and isinstance(source, fx.Node) and source.name == ARGUMENTS


def _nodes_in(value: Any) -> list[fx.Node]:
    parts = value if isinstance(value, tuple | list) else [value]
    return [part for part in parts if isinstance(part, fx.Node)]


def _kept(nodes: Sequence[fx.Node], program: BranchProgram) -> list[fx.Node]:
    return [node for node in nodes if node.name in program.keeps]


def _renamed(returned: Any, end: str) -> Any:
    """Return value with the node `end` replaced by `HIDDEN_STATE`."""
    if isinstance(returned, tuple | list):
        return tuple(HIDDEN_STATE if part == ValueRef(end) else part for part in returned)
    return HIDDEN_STATE
