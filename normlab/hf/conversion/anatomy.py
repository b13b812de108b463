"""What a foreign layer is made of: its branches, and where each of its norms stands.

An `Anatomy` is read from the layer's own forward pass (`dissection.py`), or written down by whoever knows the layer:

    def adapter(layer):
        return Anatomy.of(
            layer,
            Limb(lambda layer, call, x: layer.attn(x, call["mask"])[0], read="norm1"),
            Limb(lambda layer, call, x: layer.ffn(x), read="norm2"),
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
from normlab.hf.conversion.flow import STATE, Signature, part_of, resolve
from normlab.hf.conversion.foreign_norm import ModelNorm, NormOptions, recognise
from normlab.hf.conversion.function_norm import FunctionNorm
from normlab.schemes.contract.blocks import Block, ParallelBlock, SerialBlock
from normlab.schemes.contract.parts import Add, AddNorm, Branch, Step

Run = Callable[[Any, dict[str, Any], torch.Tensor], torch.Tensor]
"""(layer, the layer's arguments by name, what the branch reads) → update."""

Where = str | FunctionNorm
"""A norm of a layer: the path of a module, or functions of its forward pass."""

PLACES = ("read", "shape", "write")


@dataclass(frozen=True)
class Limb:
    """One branch of a layer, and where the norms around it are: before it, on what it returns, after the addition."""

    run: Run
    read: Where | None = None
    shape: Where | None = None
    write: Where | None = None
    name: str = "branch"

    def norms(self) -> Iterator[tuple[str, Where]]:
        """(place, path or function) of each of its norms."""
        for place in PLACES:
            path = getattr(self, place)
            if path is not None:
                yield place, path


@dataclass(frozen=True)
class Anatomy:
    """The branches of a layer in their order, and what the layer takes and returns."""

    limbs: tuple[Limb, ...]
    signature: Signature
    topology: Topology = "serial"
    shared_read: bool = False
    """Parallel branches behind one norm."""
    returns: Any = STATE
    """What the layer returns, with references to the state and to what its branches kept."""
    exact: bool = True
    """Whether our block adds in the order in which the layer does: if not, they agree to rounding."""

    @classmethod
    def of(cls, layer: nn.Module, *limbs: Limb, **options: Any) -> Anatomy:
        """Of a layer that cannot be followed."""
        return cls(limbs, Signature.of(layer), **options)

    def branches(self, layer: nn.Module, call: dict[str, Any]) -> list[Branch]:
        """The branches as a block takes them, in one call of the layer."""
        return [partial(limb.run, layer, call) for limb in self.limbs]

    def output(self, state: torch.Tensor, call: dict[str, Any]) -> Any:
        """What the layer returns."""
        return resolve(self.returns, {**call, STATE.name: state})

    def norms(self, layer: nn.Module) -> list[dict[str, ModelNorm]]:
        """For each branch its norms, by place, as parts of our steps."""
        return [{place: model_norm(layer, path) for place, path in limb.norms()} for limb in self.limbs]

    def paths(self) -> set[str]:
        """Where the norms are in the layer that are modules."""
        return {path for limb in self.limbs for _, path in limb.norms() if isinstance(path, str)}

    def functions(self) -> list[FunctionNorm]:
        """The norms that are no modules."""
        return [norm for limb in self.limbs for _, norm in limb.norms() if isinstance(norm, FunctionNorm)]

    def block(self, layer: nn.Module) -> Block:
        """The layer as one of our blocks, with its own norms."""
        steps = [_step(norms) for norms in self.norms(layer)]
        if self.topology == "serial":
            return SerialBlock(steps)
        block = ParallelBlock(steps)
        if self.shared_read:
            block.share_read()
        return block


def norm_module(layer: nn.Module, where: Where) -> nn.Module:
    """A norm of a layer as a module."""
    return where.of(layer) if isinstance(where, FunctionNorm) else part_of(layer, where)


def model_norm(layer: nn.Module, path: Where) -> ModelNorm:
    """The norm at a path as a part of our steps; what does not behave like one is refused."""
    norm = norm_module(layer, path)
    options = recognise(norm, layer)
    if options is None:
        raise NormLabError(
            f"{type(layer).__name__}.{path} ({type(norm).__name__}) is no RMSNorm or LayerNorm by what it computes; "
            "expected one where an adapter names a norm"
        )
    return ModelNorm(norm, options)


def norm_options(layer: nn.Module, anatomy: Anatomy) -> NormOptions | None:
    """The kind of the layer's norms; of the first where they differ."""
    paths = [path for limb in anatomy.limbs for _, path in limb.norms()]
    return recognise(norm_module(layer, paths[0]), layer) if paths else None


def _step(norms: dict[str, ModelNorm]) -> Step:
    write = AddNorm(norms["write"]) if "write" in norms else Add()  # type: ignore[arg-type]
    return Step(write, read=norms.get("read"), shape=norms.get("shape"))
