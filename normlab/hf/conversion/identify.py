"""Identify the normalisation scheme of a model from where its layers have norms."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from normlab.choices import Topology
from normlab.errors import NormLabError
from normlab.hf.conversion.converted_layer import converted_layers
from normlab.hf.conversion.foreign_gate import GateOptions, recognise_gate
from normlab.hf.conversion.foreign_norm import recognise_norm
from normlab.hf.conversion.layer_structure import LayerStructure, ResidualBranch
from normlab.hf.conversion.model_structure import Adapter, ModelStructure, analyse_model
from normlab.hf.conversion.trace import BranchProgram, TrainEvalProgram, get_part
from normlab.norms import Norm
from normlab.probes.blocks import eager, walk
from normlab.schemes.catalog.registry import find_class, list_schemes
from normlab.schemes.contract.blocks import Block, ParallelBlock, SerialBlock
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.parts import Add, AddNorm
from normlab.schemes.contract.scheme import Scheme
from normlab.stack import Stack
from normlab.utils.text import counted

_UNIFORM = 16
"""Depth at which candidate schemes are built for models with equal blocks: with few blocks many schemes look alike."""
_NARROW = 2
"""Width at which candidate blocks are built; the places of norms do not depend on it."""

_MATCHED: WeakKeyDictionary[ModelStructure, Scheme | None] = WeakKeyDictionary()

NormPlaces = tuple[bool, bool, bool, GateOptions | None]
"""Whether a branch has a norm before it, on its output, and after the addition; the gate in place of the addition."""


@dataclass(frozen=True)
class SchemeIdentity:
    """The identified scheme of a model."""

    scheme: Scheme
    topology: Topology
    depth: int
    dim: int
    how: tuple[str, ...]
    """Evidence: what was found in the model."""

    def __str__(self) -> str:
        return f"{self.scheme}, {self.topology}, {counted(self.depth, 'block')} of width {self.dim}"


def identify(
    model: nn.Module,
    *,
    batch: Mapping[str, Any] | None = None,
    blocks: str | None = None,
    adapter: Adapter | None = None,
) -> SchemeIdentity:
    """Identify the scheme of a model by what its blocks compute.

    `batch` is the input for models that take more than tokens or images; `blocks` names one of several stacks
    ('encoder.layer.*'); `adapter` returns the structure of layers that cannot be traced.
    """
    # From a user, who may pass the name of a model.
    given: Any = model
    if not isinstance(given, nn.Module):
        raise NormLabError(f"expected a model, got {given!r:.80}; load it first, with transformers' from_pretrained")
    model = eager(model)
    known = _known_identity(model)
    if known is not None:
        return known
    found = analyse_model(model, batch=batch, blocks=blocks, adapter=adapter)
    scheme = match_scheme(found)
    if scheme is None:
        raise NormLabError(f"no scheme here places norms as {type(model).__name__} does: {'; '.join(_how(found))}")
    return SchemeIdentity(scheme, found.topology, len(found.layers), found.dim, _how(found))


def match_scheme(found: ModelStructure) -> Scheme | None:
    """Return the scheme that places norms where the model has them; None if there is none."""
    # Asked for by each conversion of a model, and every scheme is built for the answer.
    if found not in _MATCHED:
        _MATCHED[found] = _match(found)
    return _MATCHED[found]


def _match(found: ModelStructure) -> Scheme | None:
    if found.streams is not None:
        return _match_streams(found)
    wanted = [
        tuple(_places(branch, layer) for branch in structure.branches)
        for layer, structure in zip(found.stack.blocks, found.layers, strict=True)
    ]
    uniform = len(set(wanted)) == 1
    depth = max(_UNIFORM, len(wanted)) if uniform else len(wanted)
    gated = found.gate is not None
    matching: list[Scheme] = []
    for made in _candidates(variants=gated):
        try:
            scheme = with_model_gate(with_model_norms(_without_entry(made()), found), found)
            bound = scheme.bind(depth=depth, dim=_NARROW, topology=found.topology, branches=found.branches)
        except NormLabError:
            # Its options exclude such norms, or it has no such topology.
            continue
        alike = not scheme.needs and _has_ends(bound, found)
        if alike and all(_layout(bound.block(k), gated) == wanted[k % len(wanted)] for k in range(depth)):
            matching.append(scheme)
            if not gated:
                break
    return max(matching, key=lambda scheme: _kept_norms(scheme, found), default=None)


def _match_streams(found: ModelStructure) -> Scheme | None:
    """The scheme that reads, writes and merges several streams as the model does; None if there is none."""
    scheme, read = found.merged, found.streams
    branches = [branch for structure in found.layers for branch in structure.branches]
    if scheme is None or read is None or found.has_final == read.normed:
        return None
    if any(one.streams is None or one.streams.read != read or one.shape is not None for one in branches):
        return None
    if any((one.read is None) != read.normed for one in branches):
        return None
    if not read.normed and found.norm is not None:
        scheme = dataclasses.replace(scheme, **found.norm.scheme_options())
    # One epsilon for the norms and for the coefficients.
    return scheme if read.reads_as(scheme) else None


def _candidates(*, variants: bool) -> Iterator[Callable[[], Scheme]]:
    """Every scheme at its default options, then their variants if asked for."""
    classes = [find_class(name) for name in list_schemes()]
    yield from classes
    for kind in classes if variants else ():
        yield from (partial(kind, **options) for options in kind.variants.values())


def _kept_norms(scheme: Scheme, found: ModelStructure) -> int:
    """How many norms of the first layer have the gain and bias that the scheme gives them."""
    steps = scheme.bind(depth=1, dim=_NARROW, topology=found.topology, branches=found.branches).block(0).steps
    usual = found.norm
    if usual is None:
        return 0
    own_norms = found.layers[0].norms(found.stack.blocks[0])
    norms = [(step, *one) for step, own in zip(steps, own_norms, strict=True) for one in own.items()]
    return sum(
        isinstance(made := getattr(step, place), Norm) and own.options.serves(made, usual) for step, place, own in norms
    )


def with_model_options(scheme: Scheme, found: ModelStructure) -> Scheme:
    """The scheme with options taken from the model where they were left at their defaults.

    These are the kind of norm and, if the model already has this scheme, all other options.
    """
    own = match_scheme(found)
    if own is not None and type(own) is type(scheme):
        return dataclasses.replace(own, **scheme.changed())
    return with_model_norms(scheme, found)


def _without_entry(scheme: Scheme) -> Scheme:
    """The scheme without its entry norm: what precedes the first block is not compared."""
    return dataclasses.replace(scheme, entry_norm=False) if hasattr(scheme, "entry_norm") else scheme


def with_model_norms(scheme: Scheme, found: ModelStructure) -> Scheme:
    """The scheme with the model's kind of norm where its norm options were left at their defaults."""
    if found.norm is None or not _places_norms(scheme, found):
        return scheme
    changed = scheme.changed()
    options = found.norm.scheme_options()
    return dataclasses.replace(scheme, **{name: value for name, value in options.items() if name not in changed})


def with_model_gate(scheme: Scheme, found: ModelStructure) -> Scheme:
    """The scheme with the options of the model's gates, if it has such options."""
    options = {} if found.gate is None else dataclasses.asdict(found.gate)
    return dataclasses.replace(scheme, **options) if options.keys() <= scheme.options().keys() else scheme


def _places_norms(scheme: Scheme, found: ModelStructure) -> bool:
    bound = scheme.bind(depth=1, dim=_NARROW, branches=found.branches)
    parts = nn.ModuleList([bound.block(0), bound.exit()])
    return any(isinstance(part, Norm) for part in parts.modules())


def _has_ends(bound: BoundScheme, found: ModelStructure) -> bool:
    entry, exit_ = bound.entry(), bound.exit()
    final_norm = isinstance(exit_, Norm)
    plain_exit = final_norm or isinstance(exit_, nn.Identity)
    return isinstance(entry, nn.Identity) and plain_exit and final_norm == found.has_final


def _places(branch: ResidualBranch, layer: nn.Module) -> NormPlaces:
    gate = None if branch.gate is None else recognise_gate(get_part(layer, branch.gate))
    return branch.read is not None, branch.shape is not None, branch.write is not None, gate


def _layout(block: Block, gated: bool) -> tuple[NormPlaces, ...] | None:
    """Places of norms in a NormLab block; None if the block does more than add and normalise."""
    if type(block) not in (SerialBlock, ParallelBlock):
        return None
    found: list[NormPlaces] = []
    for place, step in enumerate(block.steps):
        parts = (step.read, step.shape)
        write = block.steps[0].write if isinstance(block, ParallelBlock) else step.write
        gate = recognise_gate(write) if gated else None  # type: ignore[arg-type]
        plain = gate is not None or _adds_plainly(write)
        if not plain or not all(isinstance(part, nn.Identity | Norm) for part in parts):
            return None
        # Parallel branches have one common write, that of the first step.
        normed = isinstance(write, AddNorm) and (place == 0 or isinstance(block, SerialBlock))
        found.append((isinstance(parts[0], Norm), isinstance(parts[1], Norm), normed, gate))
    return tuple(found)


def _adds_plainly(write: Any) -> bool:
    if not isinstance(write, Add | AddNorm):
        return False
    return isinstance(write.step, nn.Identity) and isinstance(getattr(write, "keep", write.step), nn.Identity)


def _known_identity(model: nn.Module) -> SchemeIdentity | None:
    """Identity of a converted model or a NormLab model, which store their scheme; else None."""
    layers = converted_layers(model)
    for bound in (
        *(layer.normlab.conversion.bound for layer in layers.values()),
        *(part.bound for part in model.modules() if isinstance(part, Stack)),
    ):
        how = (f"{len(layers)} converted layers" if layers else "a NormLab stack",)
        return SchemeIdentity(bound.scheme, bound.topology, bound.depth, bound.dim, how)
    return None


def _how(found: ModelStructure) -> tuple[str, ...]:
    stack, first = found.stack, found.layers[0]
    lines = [f"{counted(len(stack.blocks), 'block')} of {type(stack.blocks[0]).__name__} in {stack.name!r}"]
    lines += dict.fromkeys(_layer_formula(one) for one in found.layers)
    if first.topology == "parallel":
        shared = ", behind one norm" if first.shared_read else ""
        lines.append(f"the branches run side by side{shared}: both read the block's input, one addition takes both")
    if found.norm is not None:
        norm = found.norm
        bias = "with bias" if norm.bias else "without bias"
        lines.append(f"its norms compute {norm.norm}, eps {norm.eps:g}, gain {norm.gain}, {bias}")
    if found.gate is not None:
        lines.append(f"its gates keep {found.gate.keep}, temperature {found.gate.temperature:g}")
    if found.streams is not None:
        lines.append(f"{found.streams.scheme.streams} streams, read by {', '.join(sorted(first.connections()))}")
        lines.append(f"{found.head!r} merges them" if found.head else "no module merges them")
    if first.scale is not None:
        lines.append(f"{first.scale!r} multiplies the whole state at the end of a layer; a conversion keeps it")
    final = found.final or found.final_function
    lines.append(f"{final!r} reads the last block" if final else "no norm reads the last block")
    inner = [path for path, part in walk(stack.blocks[0], "") if recognise_norm(part) and not _belongs(path, first)]
    lines += [f"inside its branches: {', '.join(inner)}"] if inner else []
    beside = list(dict.fromkeys(part for branch in first.branches for part in _beside(stack.blocks[0], branch)))
    return (*lines, *([f"its branches also hold: {', '.join(beside)}"] if beside else []))


def _belongs(path: str, structure: LayerStructure) -> bool:
    """Whether a norm is one of the layer's own places, or part of what reads the streams."""
    return path in structure.norm_paths() or path.startswith(tuple(f"{one}." for one in structure.connections()))


def _beside(layer: nn.Module, branch: ResidualBranch) -> Iterator[str]:
    """Other parts of a branch than its main module: submodules with parameters, constant factors."""
    program = branch.run.evaluation if isinstance(branch.run, TrainEvalProgram) else branch.run
    for call in program.calls if isinstance(program, BranchProgram) else ():
        if call.kind == "call_module" and call.target != branch.name and _has_parameters(get_part(layer, call.target)):
            yield call.target
        factors = [one for one in call.args if isinstance(one, float)] if call.target in (operator.mul, "mul") else []
        yield from (f"× {factor:g}" for factor in factors)


def _has_parameters(part: nn.Module) -> bool:
    return next(part.parameters(), None) is not None


def _layer_formula(structure: LayerStructure) -> str:
    """One layer as a formula: x + mlp(norm(x))."""
    return "; ".join(_formula(branch) for branch in structure.branches)


def _formula(branch: ResidualBranch) -> str:
    update = f"{branch.name}({f'{branch.read}(x)' if branch.read else 'x'})"
    if branch.streams is not None:
        seen = f"{branch.streams.connection}(X)"
        return f"X ← write(X, {branch.name}({f'{branch.read}({seen})' if branch.read else seen}))"
    shaped = f"{branch.shape}({update})" if branch.shape else update
    total = f"{branch.gate}(x, {shaped})" if branch.gate else f"x + {shaped}"
    return f"x ← {f'{branch.write}({total})' if branch.write else total}"
