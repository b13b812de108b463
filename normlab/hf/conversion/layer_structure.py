"""Structure of a Transformer layer: its residual branches, and where its norms are.

A `LayerStructure` is found by tracing the layer's forward pass (`layer_analysis.py`), or given by an adapter:

    def adapter(layer):
        return LayerStructure.of(
            layer,
            ResidualBranch(lambda layer, call, x: layer.attn(x, call["mask"])[0], read="norm1"),
            ResidualBranch(lambda layer, call, x: layer.ffn(x), read="norm2"),
        )
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from normlab.choices import Topology
from normlab.errors import NormLabError
from normlab.hf.conversion.foreign_gate import ModelGate
from normlab.hf.conversion.foreign_norm import ModelNorm, NormOptions, recognise_norm
from normlab.hf.conversion.function_norm import FunctionNorm
from normlab.hf.conversion.stream_step import StreamStep
from normlab.hf.conversion.trace import HIDDEN_STATE, LayerSignature, get_part, resolve_refs
from normlab.schemes.contract.blocks import Block, ParallelBlock, SerialBlock
from normlab.schemes.contract.parts import Add, AddNorm, Branch, Step, Write

BranchFunction = Callable[[Any, dict[str, Any], torch.Tensor], torch.Tensor]
"""(layer, the layer's arguments by name, input of the branch) → update."""

NormLocation = str | FunctionNorm
"""Where a norm of a layer is: the path of a module, or functions in the forward pass."""

NORM_PLACES = ("read", "shape", "write")


@dataclass(frozen=True)
class ResidualBranch:
    """A residual branch, its norms: before it (read), on its output (shape), after the addition (write); its gate."""

    run: BranchFunction
    read: NormLocation | None = None
    shape: NormLocation | None = None
    write: NormLocation | None = None
    name: str = "branch"
    gate: str | None = None
    """Path of the module that takes (state, update) and returns the next state, in place of an addition."""
    streams: StreamStep | None = None
    """How it reads several streams and writes to them; `read` is then the norm of what it reads."""

    def norms(self) -> Iterator[tuple[str, NormLocation]]:
        """Yield (place, path or function) of each norm of the branch."""
        for place in NORM_PLACES:
            path = getattr(self, place)
            if path is not None:
                yield place, path

    def write_module(self, layer: nn.Module) -> Write | None:
        """The model's own way to add an update; None for a plain addition."""
        return None if self.gate is None else ModelGate(get_part(layer, self.gate))


@dataclass(frozen=True)
class LayerStructure:
    """The residual branches of a layer in order, its signature, and what it returns."""

    branches: tuple[ResidualBranch, ...]
    signature: LayerSignature
    topology: Topology = "serial"
    shared_read: bool = False
    """Whether parallel branches share one norm."""
    returns: Any = HIDDEN_STATE
    """Return value of the layer, with references to the hidden state and to other outputs of its branches."""
    exact: bool = True
    """Whether NormLab's block adds in the same order as the layer; if not, the two agree up to rounding."""
    scale: str | None = None
    """Path of the number that multiplies the whole state at the end of the layer (Gemma 4's layer_scalar)."""

    @classmethod
    def of(cls, layer: nn.Module, *branches: ResidualBranch, **options: Any) -> LayerStructure:
        """Build the structure of a layer by hand, for layers whose forward pass cannot be traced."""
        return cls(branches, LayerSignature.of(layer), **options)

    def bind_branches(self, layer: nn.Module, call: dict[str, Any]) -> list[Branch]:
        """The branches as functions of their input, for one call of the layer."""
        return [partial(branch.run, layer, call) for branch in self.branches]

    def scaled(self, layer: nn.Module, state: torch.Tensor) -> torch.Tensor:
        """The state that the block returned, times the layer's own number if it has one."""
        return state if self.scale is None else (state * get_part(layer, self.scale)).to(state.dtype)

    def output(self, state: torch.Tensor, call: dict[str, Any]) -> Any:
        """The return value of the layer for its final hidden state."""
        return resolve_refs(self.returns, {**call, HIDDEN_STATE.name: state})

    def norms(self, layer: nn.Module) -> list[dict[str, ModelNorm]]:
        """For each branch: place → norm."""
        return [{place: model_norm(layer, path) for place, path in branch.norms()} for branch in self.branches]

    def replaced_paths(self) -> set[str]:
        """Paths of the modules that a conversion replaces: norms and gates."""
        gates = {branch.gate for branch in self.branches if branch.gate is not None}
        return self.norm_paths() | gates | self.connections()

    def connections(self) -> set[str]:
        """Paths of the modules that read several streams."""
        return {branch.streams.connection for branch in self.branches if branch.streams is not None}

    def norm_paths(self) -> set[str]:
        """Paths of the norms that are modules."""
        return {path for branch in self.branches for _, path in branch.norms() if isinstance(path, str)}

    def function_norms(self) -> list[FunctionNorm]:
        """Norms that are computed by functions instead of modules."""
        return [norm for branch in self.branches for _, norm in branch.norms() if isinstance(norm, FunctionNorm)]

    def block(self, layer: nn.Module) -> Block:
        """The layer as a NormLab block, with its own norms."""
        steps = [_step(layer, branch, norms) for branch, norms in zip(self.branches, self.norms(layer), strict=True)]
        if self.topology == "serial":
            return SerialBlock(steps)
        block = ParallelBlock(steps)
        if self.shared_read:
            block.share_read()
        return block


def norm_module(layer: nn.Module, where: NormLocation) -> nn.Module:
    """A norm of a layer as a module."""
    return where.of(layer) if isinstance(where, FunctionNorm) else get_part(layer, where)


def model_norm(layer: nn.Module, path: NormLocation) -> ModelNorm:
    """The norm at a path, wrapped for use in a block; raises if the module does not compute a norm."""
    norm = norm_module(layer, path)
    options = recognise_norm(norm, layer)
    if options is None:
        raise NormLabError(
            f"{type(layer).__name__}.{path} ({type(norm).__name__}) is no RMSNorm or LayerNorm by what it computes; "
            "expected one where an adapter names a norm"
        )
    return ModelNorm(norm, options)


def norm_options(layer: nn.Module, structure: LayerStructure) -> NormOptions | None:
    """Options of the layer's first norm; None without norms."""
    paths = [path for branch in structure.branches for _, path in branch.norms()]
    return recognise_norm(norm_module(layer, paths[0]), layer) if paths else None


def _step(layer: nn.Module, branch: ResidualBranch, norms: dict[str, ModelNorm]) -> Step:
    if branch.streams is not None:
        return branch.streams.step(layer, norms.get("read"))
    added = AddNorm(norms["write"]) if "write" in norms else Add()  # type: ignore[arg-type]
    return Step(branch.write_module(layer) or added, read=norms.get("read"), shape=norms.get("shape"))
