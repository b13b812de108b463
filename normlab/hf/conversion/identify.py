"""Which scheme a published model has, and how one knows."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from normlab.choices import Topology
from normlab.errors import NormLabError
from normlab.hf.conversion.anatomy import Anatomy, Limb
from normlab.hf.conversion.converted_layer import converted_layers
from normlab.hf.conversion.flow import ByMode, Program, part_of
from normlab.hf.conversion.foreign_norm import recognise
from normlab.hf.conversion.survey import Adapter, Survey, survey
from normlab.norms import Norm
from normlab.probes.blocks import walk
from normlab.schemes.catalog.registry import find_class, list_schemes
from normlab.schemes.contract.blocks import Block, ParallelBlock, SerialBlock
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.parts import Add, AddNorm
from normlab.schemes.contract.scheme import Scheme
from normlab.stack import Stack
from normlab.utils.text import counted

_UNIFORM = 16
"""Depth at which a scheme shows whether all of its blocks are alike: with two or three many are."""
_NARROW = 2
"""Width at which blocks are made to see where they have norms: it is the same at any."""

Places = tuple[bool, bool, bool]
"""Whether a branch has a norm before it, on what it returns, after the addition."""


@dataclass(frozen=True)
class SchemeIdentity:
    """The scheme of a model."""

    scheme: Scheme
    topology: Topology
    depth: int
    dim: int
    how: tuple[str, ...]
    """What it was known by."""

    def __str__(self) -> str:
        return f"{self.scheme}, {self.topology}, {counted(self.depth, 'block')} of width {self.dim}"


def identify(
    model: nn.Module,
    *,
    batch: Mapping[str, Any] | None = None,
    blocks: str | None = None,
    adapter: Adapter | None = None,
) -> SchemeIdentity:
    """Name the scheme of a model by what its blocks do.

    `batch` is what the model is run on where it takes more than tokens or images; `blocks` names one of several stacks
    ('encoder.layer.*'); `adapter` says what a layer is made of where that cannot be read from it.
    """
    known = _of_ours(model)
    if known is not None:
        return known
    found = survey(model, batch=batch, blocks=blocks, adapter=adapter)
    scheme = scheme_of(found)
    if scheme is None:
        raise NormLabError(f"no scheme here places norms as {type(model).__name__} does: {'; '.join(_how(found))}")
    return SchemeIdentity(scheme, found.topology, len(found.anatomies), found.dim, _how(found))


def scheme_of(found: Survey) -> Scheme | None:
    """The scheme that places norms where a model has them."""
    wanted = [tuple(_places(limb) for limb in anatomy.limbs) for anatomy in found.anatomies]
    uniform = len(set(wanted)) == 1
    depth = max(_UNIFORM, len(wanted)) if uniform else len(wanted)
    for name in list_schemes():
        try:
            scheme = with_norms_of(_without_entry(find_class(name)()), found)
            bound = scheme.bind(depth=depth, dim=_NARROW, topology=found.topology, branches=found.branches)
        except NormLabError:
            # Its options exclude such norms, or it has no such topology.
            continue
        layouts = [_layout(bound.block(k)) for k in range(depth)]
        if layouts == (wanted * depth)[:depth] and _has_ends(bound, found) and not scheme.needs:
            return scheme
    return None


def as_in_model(scheme: Scheme, found: Survey) -> Scheme:
    """The scheme with the model's answers where its own options are left at their defaults.

    Those are the kind of its norms and, where the model has this very scheme, everything else.
    """
    own = scheme_of(found)
    if own is not None and type(own) is type(scheme):
        return dataclasses.replace(own, **scheme.changed())
    return with_norms_of(scheme, found)


def _without_entry(scheme: Scheme) -> Scheme:
    """What stands before a model's first block is its own business."""
    return dataclasses.replace(scheme, entry_norm=False) if hasattr(scheme, "entry_norm") else scheme


def with_norms_of(scheme: Scheme, found: Survey) -> Scheme:
    """The scheme with the model's kind of norm wherever its own options are left at their defaults."""
    if found.norm is None or not _places_norms(scheme, found):
        return scheme
    changed = scheme.changed()
    options = dataclasses.asdict(found.norm)
    return dataclasses.replace(scheme, **{name: value for name, value in options.items() if name not in changed})


def _places_norms(scheme: Scheme, found: Survey) -> bool:
    bound = scheme.bind(depth=1, dim=_NARROW, branches=found.branches)
    parts = nn.ModuleList([bound.block(0), bound.exit()])
    return any(isinstance(part, Norm) for part in parts.modules())


def _has_ends(bound: BoundScheme, found: Survey) -> bool:
    entry, exit_ = bound.entry(), bound.exit()
    final_norm = isinstance(exit_, Norm)
    plain_exit = final_norm or isinstance(exit_, nn.Identity)
    return isinstance(entry, nn.Identity) and plain_exit and final_norm == found.has_final


def _places(limb: Limb) -> Places:
    return limb.read is not None, limb.shape is not None, limb.write is not None


def _layout(block: Block) -> tuple[Places, ...] | None:
    """The places of norms in a block of ours; None where it does more than add and normalise."""
    if type(block) not in (SerialBlock, ParallelBlock):
        return None
    found: list[Places] = []
    for place, step in enumerate(block.steps):
        parts = (step.read, step.shape)
        write = block.steps[0].write if isinstance(block, ParallelBlock) else step.write
        if not all(isinstance(part, nn.Identity | Norm) for part in parts) or not _adds_plainly(write):
            return None
        # Of parallel branches' writes there is one, and it is the first's.
        normed = isinstance(write, AddNorm) and (place == 0 or isinstance(block, SerialBlock))
        found.append((isinstance(parts[0], Norm), isinstance(parts[1], Norm), normed))
    return tuple(found)


def _adds_plainly(write: Any) -> bool:
    if not isinstance(write, Add | AddNorm):
        return False
    return isinstance(write.step, nn.Identity) and isinstance(getattr(write, "keep", write.step), nn.Identity)


def _of_ours(model: nn.Module) -> SchemeIdentity | None:
    """A converted model and a model of ours say it themselves."""
    layers = converted_layers(model)
    for bound in (
        *(layer.normlab.conversion.bound for layer in layers.values()),
        *(part.bound for part in model.modules() if isinstance(part, Stack)),
    ):
        how = (f"{len(layers)} converted layers" if layers else "a NormLab stack",)
        return SchemeIdentity(bound.scheme, bound.topology, bound.depth, bound.dim, how)
    return None


def _how(found: Survey) -> tuple[str, ...]:
    stack, first = found.stack, found.anatomies[0]
    lines = [f"{counted(len(stack.blocks), 'block')} of {type(stack.blocks[0]).__name__} in {stack.name!r}"]
    lines += dict.fromkeys(_told(one) for one in found.anatomies)
    if first.topology == "parallel":
        shared = ", behind one norm" if first.shared_read else ""
        lines.append(f"the branches run side by side{shared}: both read the block's input, one addition takes both")
    if found.norm is not None:
        norm = found.norm
        bias = "with bias" if norm.bias else "without bias"
        lines.append(f"its norms compute {norm.norm}, eps {norm.eps:g}, gain {norm.gain}, {bias}")
    final = found.final or found.final_function
    lines.append(f"{final!r} reads the last block" if final else "no norm reads the last block")
    inner = [path for path, part in walk(stack.blocks[0], "") if recognise(part) and path not in first.paths()]
    lines += [f"inside its branches: {', '.join(inner)}"] if inner else []
    beside = list(dict.fromkeys(part for limb in first.limbs for part in _beside(stack.blocks[0], limb)))
    return (*lines, *([f"its branches also hold: {', '.join(beside)}"] if beside else []))


def _beside(layer: nn.Module, limb: Limb) -> Iterator[str]:
    """What a branch does beside the module that it is named by: parts with parameters, products with a number."""
    program = limb.run.resting if isinstance(limb.run, ByMode) else limb.run
    for call in program.calls if isinstance(program, Program) else ():
        if call.kind == "call_module" and call.target != limb.name and _has_parameters(part_of(layer, call.target)):
            yield call.target
        factors = [one for one in call.args if isinstance(one, float)] if call.target in (operator.mul, "mul") else []
        yield from (f"× {factor:g}" for factor in factors)


def _has_parameters(part: nn.Module) -> bool:
    return next(part.parameters(), None) is not None


def _told(anatomy: Anatomy) -> str:
    """One layer in a formula: x + mlp(norm(x))."""
    return "; ".join(_formula(limb) for limb in anatomy.limbs)


def _formula(limb: Limb) -> str:
    update = f"{limb.name}({f'{limb.read}(x)' if limb.read else 'x'})"
    total = f"x + {f'{limb.shape}({update})' if limb.shape else update}"
    return f"x ← {f'{limb.write}({total})' if limb.write else total}"
