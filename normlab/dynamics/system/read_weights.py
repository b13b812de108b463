"""Attention's matrices as a network has them: a NormLab run, a Hugging Face model, or any module that has roles.

Head by head QᵀK and V with the output matrix, as they are and with the gain of the norm that attention reads from
folded into all three. Of a network of ours the blocks come along, and the law with what they have learnt. What the
particle model has no place for is left out, and said.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from normlab.dynamics.system import laws
from normlab.dynamics.system.attention import Factors
from normlab.dynamics.system.weights import Given, Pair
from normlab.errors import NormLabError
from normlab.norms import Norm
from normlab.roles import Role, Spec, find_roles
from normlab.schemes.contract.blocks import Block
from normlab.schemes.contract.law import Law
from normlab.stack import Stack

_PLACE = re.compile(r"^(?P<stack>.*?)\.(?P<block>\d+)\.")
_READS = ("input_layernorm", "ln_1", "ln1", "norm1", "attention_norm", "layernorm_before", "block.steps.0.read")
"""Norms, by their place in a block, that stand between the state and attention alone."""


@dataclass(frozen=True)
class Read:
    """The attention of a network, block by block."""

    weights: Given
    """With the gain of what attention reads through: for tokens on the sphere."""
    bare: Given
    """Without it: for blocks that have that gain themselves."""
    beta: float
    """Inverse temperature that the network's own softmax scale comes to on the unit sphere."""
    dim: int
    heads: int
    left_out: tuple[str, ...]
    """What the network has beyond this."""
    stack: Stack | None = None
    """The part of the network that is ours, if any."""

    @property
    def blocks(self) -> list[Block]:
        """The scheme's blocks, none of a foreign network."""
        return [] if self.stack is None else [layer.block for layer in self.stack.layers]  # type: ignore[misc]

    @property
    def law(self) -> Law | None:
        """The law of the network's scheme with what its blocks have learnt; None of a foreign network."""
        return None if self.stack is None else laws.learnt(self.stack.scheme, self.blocks)

    @property
    def depth(self) -> int:
        return len(self.weights.pairs)


def read(source: nn.Module | str | Path, roles: Mapping[str, Spec] | None = None) -> Read:
    """The attention of a model, of a run's folder, or of a Hugging Face id or folder."""
    return read_model(source if isinstance(source, nn.Module) else _load(source), roles)


@torch.no_grad()
def read_model(model: nn.Module, roles: Mapping[str, Spec] | None = None) -> Read:
    """The attention of a model. `roles` names matrices whose names do not say what they are, as in `find_roles`."""
    blocks = _blocks(find_roles(model, roles))
    parts = [_Block(model, name, found) for name, found in blocks.items()]
    first, stack = parts[0], next((module for module in model.modules() if isinstance(module, Stack)), None)
    size = math.sqrt(first.dim) if stack is None else stack.scheme.sphere(first.dim)
    left_out = dict.fromkeys(note for block in parts for note in block.left_out(ours=stack is not None))
    return Read(
        weights=Given([block.pair(first.scale) for block in parts]),
        bare=Given([block.pair(first.scale, gain=False) for block in parts]),
        beta=first.scale * size**2,
        dim=first.dim,
        heads=first.heads,
        left_out=tuple(left_out),
        stack=stack,
    )


def _load(source: str | Path) -> nn.Module:
    from normlab.targets import hub
    from normlab.train.run import load_run
    from normlab.train.storage.folder import RunFolder

    if RunFolder(Path(source)).weights.is_file():
        return load_run(source).model
    config, _ = hub.load_config(source)
    return hub.load_weights(hub.weights_folder(source), "AutoModel", config)


def _blocks(roles: Sequence[Role]) -> dict[str, dict[str, Role]]:
    """q, k, v and o of each block that has all four, in order."""
    found: dict[str, dict[str, Role]] = {}
    for role in roles:
        place = _PLACE.match(role.name)
        if place and role.role in ("q", "k", "v", "o"):
            found.setdefault(place[0], {}).setdefault(role.role, role)
    whole = {name: parts for name, parts in found.items() if len(parts) == 4}
    if not whole:
        raise NormLabError("no block with query, key, value and output matrices; pass roles={'*pattern*': 'q', ...}")
    stacks = {name[: name.rstrip(".").rfind(".")] for name in whole}
    if len(stacks) > 1:
        raise NormLabError(f"several stacks of blocks ({', '.join(sorted(stacks))}); pass the part that is meant")
    return dict(sorted(whole.items(), key=lambda item: int(item[0].rstrip(".").rpartition(".")[2])))


class _Block:
    """One block's attention: its matrices (out, in), its heads and its scale."""

    def __init__(self, model: nn.Module, name: str, roles: Mapping[str, Role]):
        self.block = model.get_submodule(name.rstrip("."))
        self.module = model.get_submodule(roles["q"].name.rpartition(".")[0].rpartition(".")[0])
        self.q, self.k, self.v, self.o = (_matrix(roles[role]) for role in ("q", "k", "v", "o"))
        self.dim = self.q.shape[1]
        config = getattr(model, "config", None)
        self.heads = getattr(self.module, "heads", None) or getattr(config, "num_attention_heads", None) or 0
        if not self.heads or len(self.q) % self.heads or len(self.k) % (len(self.q) // self.heads):
            raise NormLabError(f"{name}: cannot tell its heads; expected config.num_attention_heads or attention.heads")
        self.width = len(self.q) // self.heads
        stated = (getattr(self.module, attribute, None) for attribute in ("softmax_scale", "scaling"))
        self.scale = next((float(s) for s in stated if isinstance(s, int | float)), self.width**-0.5)

    def pair(self, scale: float, *, gain: bool = True) -> Pair:
        """QᵀK and V of every head, with scores in units of `scale`, and with the gain of what attention reads."""
        factor = self._gain() if gain else self.q.new_ones(self.dim)
        q, k, v = (_cut(matrix * factor, self.width, self.heads) for matrix in (self.q, self.k, self.v))
        output = _cut(self.o.mT, self.width, self.heads)
        return Pair(Factors(q * (self.scale / scale), k), Factors(output, v))

    def left_out(self, *, ours: bool) -> list[str]:
        """What attention does here that no matrix says; blocks of ours bring their norms along."""
        norms = ("q_norm", "k_norm", "v_norm", "qk_after_rotary")
        biases = [name for name, bias in self.module.named_parameters() if "bias" in name and bool(bias.any())]
        return [
            "MLPs and positions (rotary ones too)",
            *([] if ours else ["gains of norms other than the one that attention reads from"]),
            *(["norms of queries, keys or values"] if any(getattr(self.module, n, None) for n in norms) else []),
            *(["attention's biases"] if biases else []),
        ]

    def _gain(self) -> Tensor:
        """γ of the norm that attention reads from, by trying it: gains may be stored as they are or as an offset."""
        for name in _READS:
            try:
                norm = _norm_in(self.block.get_submodule(name))
            except AttributeError:
                continue
            if norm is None:
                break
            # Mean zero and no entry zero: neither centring nor division hides anything.
            probe = self.q.new_ones(self.dim)
            probe[1::2] = -1.0
            if self.dim % 2:
                probe[-3:] = probe.new_tensor([1.0, 1.0, -2.0])
            probe = probe / probe.square().mean().sqrt()
            return (norm(probe) - norm(-probe)) / (2 * probe)
        return self.q.new_ones(self.dim)


def _norm_in(read: nn.Module) -> nn.Module | None:
    """The norm in what attention reads through. Reads of ours may also divide by a constant, which their law states."""
    if not type(read).__module__.startswith("normlab."):
        return read
    return next((part for part in read.modules() if isinstance(part, Norm)), None)


def _matrix(role: Role) -> Tensor:
    """The matrix as (out, in)."""
    view = role.view().float()
    return view if role.input_axis == -1 else view.mT


def _cut(matrix: Tensor, width: int, heads: int) -> Tensor:
    """Rows as (heads, width, d); heads that share keys or values repeat them."""
    parts = matrix.unflatten(0, (-1, width))
    return parts.repeat_interleave(heads // len(parts), dim=0)
