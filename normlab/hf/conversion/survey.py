"""A whole model looked at before it is named or rewired: its blocks, their anatomies, the norm behind the last one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from normlab.choices import Topology
from normlab.errors import NormLabError, in_one_line
from normlab.hf.conversion.anatomy import Anatomy, norm_options
from normlab.hf.conversion.converted_layer import check_not_lost
from normlab.hf.conversion.dissection import dissect
from normlab.hf.conversion.flow import ADVICE, behaves_like
from normlab.hf.conversion.foreign_norm import NormOptions, recognise
from normlab.hf.conversion.function_norm import FinalNorm
from normlab.probes.blocks import BlockStack, find_stacks, walk
from normlab.probes.outputs import first_state
from normlab.probes.replay import RecordedCall, capture
from normlab.probes.untouched import at_rest
from normlab.targets import hub
from normlab.targets.config_sizes import parts, special_tokens
from normlab.targets.config_tasks import image_shape

Adapter = Callable[[Any], Anatomy]
"""From a layer to what it is made of."""

_TOKENS = 5
_ROUNDINGS = 4
"""Roundings by which a sum in another order may differ, in units of the largest entry's last place."""


@dataclass(frozen=True)
class Survey:
    """What was found."""

    stack: BlockStack
    anatomies: list[Anatomy]
    final: str | None
    """Path of the norm behind the last block."""
    dim: int
    norm: NormOptions | None
    """What the norms of the blocks are; None where they have none."""
    final_function: str | None = None
    """The function that is the norm behind the last block, where that is no module."""
    final_is_shared: bool = False
    """Whether the norm behind the last block is used elsewhere, too."""

    @property
    def has_final(self) -> bool:
        """Whether a norm reads the last block."""
        return self.final is not None or self.final_function is not None

    @property
    def pattern(self) -> str:
        """The blocks' paths, a star where they differ."""
        columns = zip(*(name.split(".") for name in self.stack.names), strict=True)
        return ".".join(column[0] if len(set(column)) == 1 else "*" for column in columns)

    @property
    def topology(self) -> Topology:
        return self.anatomies[0].topology

    @property
    def branches(self) -> int:
        return len(self.anatomies[0].limbs)


def survey(
    model: nn.Module,
    *,
    batch: Mapping[str, Any] | None = None,
    blocks: str | None = None,
    adapter: Adapter | None = None,
) -> Survey:
    """Look at a model: run it once on a tiny batch, and hold every block against what was read from it."""
    check_not_lost(model)
    stack = one_stack(model, blocks)
    anatomies = dissect_all(stack, adapter)
    norms = {path: part for path, part in walk(model, "") if recognise(part) and not _inside(path, stack)}
    with at_rest(model), torch.no_grad(), hub.quiet():
        with in_one_line(f"{type(model).__name__} does not run", "pass batch={...} with what its forward takes"):
            inputs = sample(model) if batch is None else dict(batch)
            ends, calls = _run(model, stack, norms, inputs)
        for name, anatomy, call in zip(stack.names, anatomies, calls, strict=True):
            _verify(name, anatomy, call)
    norm = norm_options(stack.blocks[0], anatomies[0])
    return Survey(stack, anatomies, ends.path, calls[0].width, norm, ends.function, ends.is_shared)


class _End(NamedTuple):
    """The norm behind the last block."""

    path: str | None
    function: str | None
    is_shared: bool


def one_stack(model: nn.Module, blocks: str | None) -> BlockStack:
    """The one stack of a model; of several one has to be named."""
    stacks = find_stacks(model, blocks)
    if len(stacks) > 1:
        names = ", ".join(f"'{stack.name}.*'" for stack in stacks)
        raise NormLabError(f"{type(model).__name__} has {len(stacks)} stacks; name one: blocks= one of {names}")
    if len(set(stacks[0].blocks)) < len(stacks[0].blocks):
        raise NormLabError(f"{type(model).__name__} runs one block several times; a converted block has one place")
    return stacks[0]


def dissect_all(stack: BlockStack, adapter: Adapter | None) -> list[Anatomy]:
    """The anatomy of every block; blocks that are alike share one, so that compiled code need not tell them apart."""
    found: list[Anatomy] = []
    opened: set[str] = set()
    for place, (name, block) in enumerate(zip(stack.names, stack.blocks, strict=True)):
        if adapter is not None:
            anatomy = _adapted(name, block, adapter)
        elif place and behaves_like(block, stack.blocks[place - 1], opened):
            anatomy = found[-1]
        else:
            anatomy = dissect(block, opened)
        found.append(next((known for known in found[-1:] if known == anatomy), anatomy))
    kinds = {(anatomy.topology, len(anatomy.limbs)) for anatomy in found}
    if len(kinds) > 1:
        raise NormLabError(f"{stack.name} mixes blocks of {sorted(kinds)}; expected one kind and number of branches")
    return found


def _adapted(name: str, block: nn.Module, adapter: Adapter) -> Anatomy:
    advice = "expected one that returns Anatomy.of(layer, Limb(...), ...)"
    with in_one_line(f"{name}: its adapter fails", advice):
        anatomy = adapter(block)
    if not isinstance(anatomy, Anatomy):
        raise NormLabError(f"{name}: its adapter returns {type(anatomy).__name__}; {advice}")
    return anatomy


def sample(model: Any) -> dict[str, torch.Tensor]:
    """A tiny batch for a model of the library: a few tokens, or one image."""
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
    model: nn.Module, stack: BlockStack, norms: Mapping[str, nn.Module], inputs: Mapping[str, Any]
) -> tuple[_End, list[RecordedCall]]:
    """(the norm that reads what the last block returns, the call of every block) in one pass."""
    last: list[torch.Tensor] = []
    readers: list[str] = []
    used: list[str] = []
    function = FinalNorm(last)
    with ExitStack() as hooks:
        end = stack.blocks[-1].register_forward_hook(
            lambda _module, args, kwargs, output: last.append(first_state(output, args, kwargs)), with_kwargs=True
        )
        hooks.callback(end.remove)
        for path, norm in norms.items():
            hooks.callback(norm.register_forward_pre_hook(_noting(path, readers, used, last)).remove)
        hooks.enter_context(function)
        calls = capture(stack, stack.blocks, lambda: model(**inputs))
    silent = [name for name, call in zip(stack.names, calls, strict=True) if call is None]
    if silent:
        raise NormLabError(f"{silent[0]} did not run; expected every block to run once in a pass")
    path = next(iter(readers), None)
    end = _End(path, function.found if path is None else None, used.count(path or "") > 1)
    return end, [call for call in calls if call is not None]


def _noting(path: str, readers: list[str], used: list[str], last: list[torch.Tensor]) -> Callable[..., None]:
    def note(_norm: nn.Module, args: tuple[Any, ...]) -> None:
        used.append(path)
        if last and args and _is_part_of(args[0], last[-1]):
            readers.append(path)

    return note


def _is_part_of(x: Any, state: torch.Tensor) -> bool:
    """Whether a tensor is the state, or some of its tokens."""
    storages = [one.untyped_storage().data_ptr() for one in (x, state) if isinstance(one, torch.Tensor)]
    return x is state or (len(storages) == 2 and storages[0] == storages[1] != 0)


def _verify(name: str, anatomy: Anatomy, call: RecordedCall) -> None:
    """Our block on the model's own parts must return what the layer does, to the last bit where it adds as we do."""
    expected = call.repeat()
    state, arguments = anatomy.signature.bind(call.args, call.kwargs)
    with in_one_line(f"{name}: what was read from it does not run", ADVICE):
        found = anatomy.block(call.block)(state, anatomy.branches(call.block, arguments))
    if expected.is_meta:
        return
    if found.dtype != expected.dtype:
        raise NormLabError(
            f"{name} turns its state into {expected.dtype} where its parts compute {found.dtype}, and our block "
            f"keeps one type; expected a model in one: try model.to({expected.dtype})"
        )
    allowed = 0.0 if anatomy.exact else _ROUNDINGS * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    same = found.shape == expected.shape and torch.allclose(found, expected, rtol=0.0, atol=allowed, equal_nan=True)
    if not same:
        limbs = ", ".join(limb.name for limb in anatomy.limbs)
        raise NormLabError(f"{name} does more than its branches ({limbs}) and norms explain; {ADVICE}")


def _inside(path: str, stack: BlockStack) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in stack.names)
