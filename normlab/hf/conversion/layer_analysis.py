"""Find the residual branches and norms of a layer from its traced forward pass, without relying on names.

From the output backwards, every addition of an update to the hidden state ends a residual branch; the state is the
term that the other term depends on. A submodule that does the addition itself (BERT's attention.output) is traced
inside. A branch is everything between state and update; norms at its two ends belong to it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from normlab.errors import NormLabError
from normlab.hf.conversion.foreign_gate import recognise_gate
from normlab.hf.conversion.foreign_norm import recognise_norm
from normlab.hf.conversion.function_norm import FunctionNorm, may_be_norm
from normlab.hf.conversion.layer_structure import LayerStructure, NormLocation, ResidualBranch, norm_module
from normlab.hf.conversion.stream_step import StreamStep
from normlab.hf.conversion.stream_trace import find_stream_write
from normlab.hf.conversion.trace import (
    ADVICE,
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
from normlab.hf.conversion.trace_graph import TracedGraph
from normlab.hf.conversion.trace_nodes import (
    is_argument,
    is_call,
    is_number,
    is_product,
    is_sum,
    is_view,
    joins_outputs,
    kept,
    nodes_in,
    renamed,
    summands,
)


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


def _places(branch: ResidualBranch) -> tuple[NormLocation | StreamStep | None, ...]:
    return branch.read, branch.shape, branch.write, branch.gate, branch.streams


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
    streams: StreamStep | None = None
    source: fx.Node | None = None
    """What a branch reads instead of the state: one vector made of the streams."""


class _TracedLayer(TracedGraph):
    """The search for residual branches in the traced graph of one layer."""

    def __init__(self, layer: nn.Module, graph: fx.Graph):
        super().__init__(layer, graph)
        self._norms: dict[fx.Node, tuple[NormLocation, fx.Node] | None] = {}

    def structure(self) -> LayerStructure:
        end = self.returned[0] if isinstance(self.returned, tuple | list) else self.returned
        scaled, scale = self._without_scale(end)
        additions = self._additions(scaled)
        if len(additions) == 1:
            # Parallel branches: the update of the one addition is their sum.
            additions[0].updates = [term for one in additions[0].updates for term in self._terms(one)]
        parallel = len(additions[0].updates) > 1
        cuts = [self._cut(update, one) for one in additions for update in one.updates]
        extras = [node for node in nodes_in(self.returned) if node is not end]
        branches = self._branches(cuts, extras)
        inputs = {cut.source for cut in cuts}
        return LayerStructure(
            branches,
            LayerSignature.of(self.layer),
            "parallel" if parallel else "serial",
            shared_read=parallel and len(inputs) == 1 and cuts[0].read is not None,
            returns=renamed(replace_nodes(self.returned), end.name),
            exact=all(one.exact for one in additions),
            scale=scale,
        )

    # -- from the end to the start -------------------------------------------------------------------------------

    def _without_scale(self, end: Any) -> tuple[Any, str | None]:
        """(the state before its multiplication by a number of the layer, the number's path), or the state and None."""
        node = self.plain(end)
        factors = node.args if is_product(node) else ()
        for one, other in (factors, factors[::-1]) if factors else ():
            if is_number(self.layer, other) and isinstance(one, fx.Node):
                return one, module_path(other)  # type: ignore[arg-type]
        return end, None

    def _additions(self, end: Any) -> list[_Addition]:
        found: list[_Addition] = []
        node = end
        while self.plain(node) is not self.state:
            found.insert(0, self._streamed(node) or self._addition(self.plain(node)))
            node = found[0].skip
            self.states.add(self.plain(node))
        if not found:
            raise NormLabError(f"{self.who} adds nothing to its input; {ADVICE}")
        return found

    def _addition(self, node: fx.Node) -> _Addition:
        gated = self._gated(node)
        if gated is not None:
            return gated
        write = self._norm(node)
        total = node if write is None else self._normed(node)
        if not is_sum(total):
            raise self._not_a_sum(total)
        one, other = summands(total)
        for skip, update in ((one, other), (other, one)):
            if self.plain(skip) in self.above[update]:
                return _Addition(skip, [update], write, exact=True)
        terms = self._terms(total)
        for skip in terms:
            updates = [term for term in terms if term is not skip]
            if all(self.plain(skip) in self.above[update] for update in updates):
                return _Addition(skip, updates, write, exact=False)
        raise self._not_a_sum(total)

    def _streamed(self, end: fx.Node) -> _Addition | None:
        """The write to several streams that a state is; None if it is none."""
        found = find_stream_write(self, end)
        if found is None:
            return None
        return _Addition(found.state, [found.update], None, True, streams=found.step, source=found.source)

    def _gated(self, node: fx.Node) -> _Addition | None:
        """The addition that a module computes from (state, update) with weights of its own; None if it is no such."""
        if node.op != "call_module" or len(node.args) != 2 or node.kwargs:
            return None
        skip, update = node.args
        pair = isinstance(skip, fx.Node) and isinstance(update, fx.Node) and self.plain(skip) in self.above[update]
        if not pair or recognise_gate(get_part(self.layer, module_path(node))) is None:
            return None
        return _Addition(skip, [update], None, exact=True, gate=module_path(node))  # type: ignore[arg-type]

    def _terms(self, node: fx.Node) -> list[fx.Node]:
        """Terms of a sum in the order of computation; nested sums without other users are expanded."""
        plain = self.plain(node)
        if not is_sum(plain) or len(plain.users) > 1:
            return [node]
        return sorted((term for part in summands(plain) for term in self._terms(part)), key=self.nodes.index)

    def _not_a_sum(self, node: fx.Node) -> Exception:
        """Exception for a state that no addition returned: trace inside a submodule, or fail."""
        source = node.args[0] if is_call(node, operator.getitem) else node
        if isinstance(source, fx.Node) and source.op == "call_module":
            path = module_path(source)
            if next(get_part(self.layer, path).children(), None) is not None:
                return _AddsInside(path)
        if joins_outputs(source):
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
        skip, end = addition.source or self.plain(addition.skip), self.plain(update)
        shape = self._norm(end)
        if shape is not None:
            end = self._normed(end)
        found = [node for node in self.above[end] | {end} if self._norm(node) and self._normed(node) is skip]
        # Of consecutive candidates the last one is the norm: a cast after it belongs to it.
        reads = [node for node in found if not any(node in self.above[other] for other in found)]
        if not reads:
            return _Cut(end, addition.source or addition.skip, skip, None, shape, addition)
        if len(reads) > 1 or skip in self.needed(end, {reads[0]}):
            names = ", ".join(sorted(str(self._norm(node)) for node in reads))
            raise NormLabError(f"{self.who}: a branch reads the state through {names} and in another way; {ADVICE}")
        return _Cut(end, reads[0], skip, self._norm(reads[0]), shape, addition)

    def _branches(self, cuts: Sequence[_Cut], extras: Sequence[fx.Node]) -> tuple[ResidualBranch, ...]:
        programs = [self._program(cut, []) for cut in cuts]
        for extra in extras:
            for place, cut in enumerate(cuts):
                if cut.source in self.above[extra] and self.state not in self.needed(extra, {cut.source, cut.skip}):
                    programs[place] = self._program(cut, [extra, *kept(self.nodes, programs[place])])
                    break
            else:
                raise NormLabError(f"{self.who} returns {extra.name!r}, which no branch computes; {ADVICE}")
        return tuple(
            ResidualBranch(program, cut.read, cut.shape, one.write, self._name(program), one.gate, one.streams)
            for cut, program in zip(cuts, programs, strict=True)
            for one in (cut.addition,)
        )

    def _program(self, cut: _Cut, extras: Sequence[fx.Node]) -> BranchProgram:
        given = {cut.source, cut.skip}
        needed = set[fx.Node]().union(*(self.needed(node, given) for node in (cut.end, *extras)))
        if self.state in needed:
            raise NormLabError(f"{self.who}: a branch reads the layer's input behind the first addition; {ADVICE}")
        self._check_arguments(needed)
        calls = tuple(to_traced_call(node) for node in self.nodes if node in needed and node.op != "placeholder")
        # Nodes that ask for the shape of the state can use the input of the branch, which has the same shape.
        inputs = tuple(dict.fromkeys((cut.source.name, cut.skip.name, *self.asked(needed))))
        return BranchProgram(inputs, calls, ValueRef(cut.end.name), tuple(node.name for node in extras))

    def _check_arguments(self, needed: set[fx.Node]) -> None:
        """Raise if the layer itself computes with an argument, which may depend on whether it is None."""
        for node in needed:
            own = [part for part in node.all_input_nodes if is_argument(part)]
            # A product with None raises, so that an argument which it needs is never silently missed.
            if own and node.op != "call_module" and not is_argument(node) and not is_product(node):
                raise NormLabError(f"{self.who} computes with its argument {own[0].args[1]!r} itself; {ADVICE}")

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
        return self.plain(found[1])

    def _module(self, node: fx.Node) -> tuple[NormLocation, fx.Node] | None:
        alone = len(node.args) == 1 and not node.kwargs and isinstance(node.args[0], fx.Node)
        return (module_path(node), node.args[0]) if alone else None  # type: ignore[return-value]

    def _functions(self, node: fx.Node) -> Iterator[tuple[NormLocation, fx.Node]]:
        """Candidate function norms that end in a node and read one tensor besides parameters, with that tensor."""
        core = self.plain(node) if is_view(node) else node
        sources = [part for part in core.args if isinstance(part, fx.Node)] if may_be_norm(core) else []
        for source in dict.fromkeys(self.plain(part) for part in sources):
            needed = self.needed(node, {source})
            if not any(one.op in ("placeholder", "call_module") for one in needed):
                calls = tuple(to_traced_call(one) for one in self.nodes if one in needed)
                name = core.target if isinstance(core.target, str) else core.target.__name__
                yield FunctionNorm(name, BranchProgram((source.name,), calls, ValueRef(node.name))), source


@dataclass(frozen=True)
class _Cut:
    """First and last node of a branch, and the norms around it."""

    end: fx.Node
    source: fx.Node
    skip: fx.Node
    read: NormLocation | None
    shape: NormLocation | None
    addition: _Addition
