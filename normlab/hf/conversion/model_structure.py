"""Analyse the structure of a whole model: its blocks, the structure of each, and the norm after the last block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from normlab.choices import Topology
from normlab.errors import NormLabError, in_one_line
from normlab.hf.conversion.converted_layer import check_scheme_loaded
from normlab.hf.conversion.foreign_gate import GateOptions, recognise_gate
from normlab.hf.conversion.foreign_norm import NormOptions, recognise_norm
from normlab.hf.conversion.foreign_streams import StreamRead, recognise_head
from normlab.hf.conversion.function_norm import FinalNorm
from normlab.hf.conversion.layer_analysis import analyse_layer
from normlab.hf.conversion.layer_structure import LayerStructure, norm_options
from normlab.hf.conversion.trace import ADVICE, get_part, makes_same_calls
from normlab.probes.blocks import BlockStack, find_stacks, walk
from normlab.probes.outputs import first_state
from normlab.probes.replay import RecordedCall, capture
from normlab.probes.untouched import at_rest
from normlab.schemes.contract.streams import StreamScheme
from normlab.targets import hub
from normlab.targets.config_sizes import parts, special_tokens
from normlab.targets.config_tasks import image_shape

Adapter = Callable[[Any], LayerStructure]
"""User-defined function from a layer to its structure."""

_TOKENS = 5
_ROUNDINGS = 4
"""Tolerance for sums in another order, in rounding errors of the largest entry."""


@dataclass(frozen=True, eq=False)
class ModelStructure:
    """Structure of a model; another one is of another model."""

    stack: BlockStack
    layers: list[LayerStructure]
    final: str | None
    """Path of the norm after the last block."""
    dim: int
    norm: NormOptions | None
    """Options of the blocks' norms; None without norms."""
    final_function: str | None = None
    """Name of the function that is the norm after the last block, if it is no module."""
    final_is_shared: bool = False
    """Whether the norm after the last block is also used elsewhere."""
    head: str | None = None
    """Path of the module that merges several streams after the last block."""
    merged: StreamScheme | None = None
    """The scheme that reads and merges streams as the model does, whatever its norms."""

    @property
    def has_final(self) -> bool:
        """Whether there is a norm after the last block."""
        return self.final is not None or self.final_function is not None

    @property
    def pattern(self) -> str:
        """Common path of the blocks, with a star for the index."""
        columns = zip(*(name.split(".") for name in self.stack.names), strict=True)
        return ".".join(column[0] if len(set(column)) == 1 else "*" for column in columns)

    @property
    def streams(self) -> StreamRead | None:
        """How the first block reads several streams; None for a model of one."""
        found = self.layers[0].branches[0].streams
        return None if found is None else found.read

    @property
    def gate(self) -> GateOptions | None:
        """Options of the first block's first gate; None without gates."""
        paths = [branch.gate for branch in self.layers[0].branches if branch.gate is not None]
        return recognise_gate(get_part(self.stack.blocks[0], paths[0])) if paths else None

    @property
    def topology(self) -> Topology:
        return self.layers[0].topology

    @property
    def branches(self) -> int:
        return len(self.layers[0].branches)


def analyse_model(
    model: nn.Module,
    *,
    batch: Mapping[str, Any] | None = None,
    blocks: str | None = None,
    adapter: Adapter | None = None,
) -> ModelStructure:
    """Analyse a model and verify the result: run it once on a tiny batch and compare every block with its structure."""
    check_scheme_loaded(model)
    stack = find_one_stack(model, blocks)
    structures = analyse_layers(stack, adapter)
    norms = {path: part for path, part in walk(model, "") if recognise_norm(part) and stack.block_of(path) is None}
    with at_rest(model), torch.no_grad(), hub.quiet():
        with in_one_line(f"{type(model).__name__} does not run", "pass batch={...} with what its forward takes"):
            inputs = sample_batch(model) if batch is None else dict(batch)
            ends, calls = _run(model, stack, norms, _Heads.of(model, stack, structures[0]), inputs)
        for name, structure, call in zip(stack.names, structures, calls, strict=True):
            _verify(name, structure, call)
    norm = norm_options(stack.blocks[0], structures[0])
    found = ModelStructure(stack, structures, ends.path, calls[0].width, norm, ends.function, ends.is_shared)
    return found if found.streams is None else _with_streams(model, found, ends.head, calls[0])


def _with_streams(model: nn.Module, found: ModelStructure, head: str | None, call: RecordedCall) -> ModelStructure:
    """The structure of a model of several streams: the width of one, and what merges them."""
    read = found.streams
    assert read is not None
    state, _ = found.layers[0].signature.bind(call.args, call.kwargs)
    rows = state.unflatten(-1, (read.scheme.streams, -1)) if read.flat else state
    if not state.is_meta and not torch.equal(rows, rows[..., :1, :].expand_as(rows)):
        raise NormLabError(f"{found.stack.names[0]}: its streams differ before the first layer; expected equal copies")
    dim = rows.shape[-1]
    return replace(found, dim=dim, head=head, merged=merged_by(model, head, read, dim))


def merged_by(model: nn.Module, head: str | None, read: StreamRead, dim: int) -> StreamScheme | None:
    """The scheme that merges the streams as the model's module does; None if there is none."""
    return None if head is None else recognise_head(model.get_submodule(head), read.scheme, dim, read.flat)


class _Heads(NamedTuple):
    """Modules that may merge the streams after the last block; none for a model of one stream."""

    modules: Mapping[str, nn.Module]
    streams: int = 1

    @classmethod
    def of(cls, model: nn.Module, stack: BlockStack, first: LayerStructure) -> _Heads:
        found = first.branches[0].streams
        if found is None:
            return cls({})
        above = {name[:place] for name in stack.names for place, letter in enumerate(name) if letter == "."} | {""}
        outside = ((path, part) for path, part in model.named_modules() if path not in above)
        return cls({path: part for path, part in outside if stack.block_of(path) is None}, found.read.scheme.streams)


class _End(NamedTuple):
    """The norm after the last block."""

    path: str | None
    function: str | None
    is_shared: bool
    head: str | None


def find_one_stack(model: nn.Module, blocks: str | None) -> BlockStack:
    """Return the stack of blocks of a model; if there are several, `blocks` must name one."""
    stacks = find_stacks(model, blocks)
    if len(stacks) > 1:
        names = ", ".join(f"'{stack.name}.*'" for stack in stacks)
        raise NormLabError(f"{type(model).__name__} has {len(stacks)} stacks; name one: blocks= one of {names}")
    if len(set(stacks[0].blocks)) < len(stacks[0].blocks):
        raise NormLabError(f"{type(model).__name__} runs one block several times; a converted block has one place")
    return stacks[0]


def analyse_layers(stack: BlockStack, adapter: Adapter | None) -> list[LayerStructure]:
    """The structure of every block; equal blocks share one object, so that compiled code is shared."""
    found: list[LayerStructure] = []
    opened: set[str] = set()
    for place, (name, block) in enumerate(zip(stack.names, stack.blocks, strict=True)):
        if adapter is not None:
            structure = _adapted(name, block, adapter)
        elif place and makes_same_calls(block, stack.blocks[place - 1], opened):
            structure = found[-1]
        else:
            structure = analyse_layer(block, opened)
        found.append(next((known for known in found[-1:] if known == structure), structure))
    kinds = {(structure.topology, len(structure.branches)) for structure in found}
    if len(kinds) > 1:
        raise NormLabError(f"{stack.name} mixes blocks of {sorted(kinds)}; expected one kind and number of branches")
    return found


def _adapted(name: str, block: nn.Module, adapter: Adapter) -> LayerStructure:
    advice = "expected one that returns LayerStructure.of(layer, ResidualBranch(...), ...)"
    with in_one_line(f"{name}: its adapter fails", advice):
        structure = adapter(block)
    if not isinstance(structure, LayerStructure):
        raise NormLabError(f"{name}: its adapter returns {type(structure).__name__}; {advice}")
    return structure


def sample_batch(model: Any) -> dict[str, torch.Tensor]:
    """A tiny input batch for a transformers model: a few tokens, or one image."""
    config, main = model.config, getattr(model, "main_input_name", None)
    if main == "pixel_values":
        shape = next(shape for _, part in parts(config) if (shape := image_shape(part)) is not None)
        return {"pixel_values": torch.randn(1, *shape, device=model.device, dtype=model.dtype)}
    if main != "input_ids" or getattr(config, "is_encoder_decoder", False):
        raise NormLabError(f"{type(model).__name__} takes more than tokens or images; pass batch={{...}} for it")
    special = special_tokens(config)
    free = [token for token in range(config.get_text_config().vocab_size) if token not in special]
    return {"input_ids": torch.tensor([free[:_TOKENS]], device=model.device)}


def _run(
    model: nn.Module,
    stack: BlockStack,
    norms: Mapping[str, nn.Module],
    heads: _Heads,
    inputs: Mapping[str, Any],
) -> tuple[_End, list[RecordedCall]]:
    """Run the model once; return the norm after the last block and the recorded call of every block."""
    last: list[torch.Tensor] = []
    readers: list[str] = []
    used: list[str] = []
    merges: list[str] = []
    function = FinalNorm(last)
    with ExitStack() as hooks:
        end = stack.blocks[-1].register_forward_hook(
            lambda _module, args, kwargs, output: last.append(first_state(output, args, kwargs)), with_kwargs=True
        )
        hooks.callback(end.remove)
        for path, norm in norms.items():
            hooks.callback(norm.register_forward_pre_hook(_noting(path, readers, used, last)).remove)
        for path, head in heads.modules.items():
            hooks.callback(head.register_forward_hook(_noting_merge(path, heads.streams, merges, readers, last)).remove)
        hooks.enter_context(function)
        calls = capture(stack, stack.blocks, lambda: model(**inputs))
    silent = [name for name, call in zip(stack.names, calls, strict=True) if call is None]
    if silent:
        raise NormLabError(f"{silent[0]} did not run; expected every block to run once in a pass")
    path = next(iter(readers), None)
    end = _End(path, function.found if path is None else None, used.count(path or "") > 1, next(iter(merges), None))
    return end, [call for call in calls if call is not None]


def _noting(path: str, readers: list[str], used: list[str], last: list[torch.Tensor]) -> Callable[..., None]:
    def note(_norm: nn.Module, args: tuple[Any, ...]) -> None:
        used.append(path)
        if last and args and _is_part_of(args[0], last[-1]):
            readers.append(path)

    return note


def _noting_merge(
    path: str, streams: int, merges: list[str], readers: list[str], last: list[torch.Tensor]
) -> Callable[..., None]:
    def note(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        reads = bool(last) and bool(args) and not merges and _is_part_of(args[0], last[-1])
        if reads and isinstance(output, torch.Tensor) and output.numel() * streams == last[-1].numel():
            merges.append(path)
            # What is normalised next is the merged state; norms inside the module belong to it.
            readers.clear()
            last.append(output)

    return note


def _is_part_of(x: Any, state: torch.Tensor) -> bool:
    """Whether a tensor is the state or a view of it."""
    storages = [one.untyped_storage().data_ptr() for one in (x, state) if isinstance(one, torch.Tensor)]
    return x is state or (len(storages) == 2 and storages[0] == storages[1] != 0)


def _verify(name: str, structure: LayerStructure, call: RecordedCall) -> None:
    """Raise unless the rebuilt block returns the same as the layer: bit for bit, or up to rounding if not `exact`."""
    expected = call.repeat()
    state, arguments = structure.signature.bind(call.args, call.kwargs)
    with in_one_line(f"{name}: what was read from it does not run", ADVICE):
        found = structure.block(call.block)(state, structure.bind_branches(call.block, arguments))
        found = structure.scaled(call.block, found)
    if expected.is_meta:
        return
    if found.dtype != expected.dtype:
        raise NormLabError(
            f"{name} turns its state into {expected.dtype} where its parts compute {found.dtype}, and our block "
            f"keeps one type; expected a model in one: try model.to({expected.dtype})"
        )
    allowed = 0.0 if structure.exact else _ROUNDINGS * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    same = found.shape == expected.shape and torch.allclose(found, expected, rtol=0.0, atol=allowed, equal_nan=True)
    if not same:
        branches = ", ".join(branch.name for branch in structure.branches)
        raise NormLabError(f"{name} does more than its branches ({branches}) and norms explain; {ADVICE}")
