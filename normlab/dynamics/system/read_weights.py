"""Read attention weights from a network: a NormLab run, a Hugging Face model, or any module whose roles are known.

Returns QᵀK and OV of every head, with and without the gain of the preceding norm folded in. For a NormLab network the
scheme's blocks and the law with their learnt parameters are returned as well. What the particle model cannot represent
(MLPs, positions, biases) is left out and listed.
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
from normlab.dynamics.system.attention import LowRank
from normlab.dynamics.system.weights import FixedWeights, LayerWeights
from normlab.errors import NormLabError
from normlab.norms import Norm
from normlab.roles import Role, Spec, find_roles
from normlab.schemes.contract.blocks import Block
from normlab.schemes.contract.law import Law
from normlab.stack import Stack
from normlab.utils.files import read_json

_PLACE = re.compile(r"^(?P<stack>.*?)\.(?P<block>\d+)\.")
_READS = ("input_layernorm", "ln_1", "ln1", "norm1", "attention_norm", "layernorm_before", "block.steps.0.read")
"""Names of the norm before attention in common block implementations."""


@dataclass(frozen=True)
class AttentionWeights:
    """Attention weights of a network, block by block."""

    weights: FixedWeights
    """With the gain of the norm before attention folded in: for tokens on the sphere."""
    bare: FixedWeights
    """Without that gain: for blocks that contain the norm."""
    beta: float
    """Inverse temperature on the unit sphere that corresponds to the network's softmax scale."""
    dim: int
    heads: int
    left_out: tuple[str, ...]
    """Parts of the network that are not represented."""
    stack: Stack | None = None
    """The NormLab stack of the network, if it has one."""

    @property
    def blocks(self) -> list[Block]:
        """The scheme's blocks; empty for other networks."""
        return [] if self.stack is None else [layer.block for layer in self.stack.layers]  # type: ignore[misc]

    @property
    def law(self) -> Law | None:
        """The law of the scheme with the learnt parameters of its blocks; None for other networks."""
        return None if self.stack is None else laws.learnt_law(self.stack.scheme, self.blocks)

    @property
    def depth(self) -> int:
        return len(self.weights.pairs)


def read_attention(source: nn.Module | str | Path, roles: Mapping[str, Spec] | None = None) -> AttentionWeights:
    """Read the attention weights of a model, a run folder, or a Hugging Face id or folder."""
    return read_model_attention(source if isinstance(source, nn.Module) else _load(source), roles)


@torch.no_grad()
def read_model_attention(model: nn.Module, roles: Mapping[str, Spec] | None = None) -> AttentionWeights:
    """Read the attention weights of a model; `roles` gives roles that names do not reveal, as in `find_roles`."""
    blocks = _blocks(find_roles(model, roles))
    parts = [_Block(model, name, found) for name, found in blocks.items()]
    first, stack = parts[0], next((module for module in model.modules() if isinstance(module, Stack)), None)
    size = math.sqrt(first.dim) if stack is None else stack.scheme.sphere(first.dim)
    left_out = dict.fromkeys(note for block in parts for note in block.left_out(ours=stack is not None))
    return AttentionWeights(
        weights=FixedWeights([block.pair(first.scale) for block in parts]),
        bare=FixedWeights([block.pair(first.scale, gain=False) for block in parts]),
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

    if RunFolder(Path(source)).weights.is_file() and not _is_published(Path(source)):
        return load_run(source).model
    config, _ = hub.load_config(source)
    # Only blocks are read: a pooling layer may be missing, which a model of another purpose was saved without.
    return hub.load_weights(hub.weights_folder(source), "AutoModel", config, needed=_PLACE.pattern)


def _is_published(folder: Path) -> bool:
    """Whether a folder is that of a Hugging Face model, whose file of weights may have the name of a run's."""
    about = folder / "config.json"
    return about.is_file() and "model_type" in read_json(about)


def _blocks(roles: Sequence[Role]) -> dict[str, dict[str, Role]]:
    """Roles q, k, v and o of each block that has all four, in order."""
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
    """Attention of one block: its matrices (out, in), number of heads and softmax scale."""

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

    def pair(self, scale: float, *, gain: bool = True) -> LayerWeights:
        """QᵀK and OV of every head, with scores in units of `scale`; with `gain` the gain of the norm is folded in."""
        factor = self._gain() if gain else self.q.new_ones(self.dim)
        q, k, v = (_cut(matrix * factor, self.width, self.heads) for matrix in (self.q, self.k, self.v))
        output = _cut(self.o.mT, self.width, self.heads)
        return LayerWeights(LowRank(q * (self.scale / scale), k), LowRank(output, v))

    def left_out(self, *, ours: bool) -> list[str]:
        """Parts of the block that matrices do not represent; NormLab blocks keep their norms."""
        norms = ("q_norm", "k_norm", "v_norm", "qk_after_rotary")
        biases = [name for name, bias in self.module.named_parameters() if "bias" in name and bool(bias.any())]
        return [
            "MLPs and positions (rotary ones too)",
            *([] if ours else ["gains of norms other than the one that attention reads from"]),
            *(["norms of queries, keys or values"] if any(getattr(self.module, n, None) for n in norms) else []),
            *(["attention's biases"] if biases else []),
        ]

    def _gain(self) -> Tensor:
        """Gain γ of the norm before attention, measured: it may be stored as it is or as an offset from 1."""
        for name in _READS:
            try:
                norm = _norm_in(self.block.get_submodule(name))
            except AttributeError:
                continue
            if norm is None:
                break
            # Mean zero and no zero entries, so that centring and division lose nothing.
            probe = self.q.new_ones(self.dim)
            probe[1::2] = -1.0
            if self.dim % 2:
                probe[-3:] = probe.new_tensor([1.0, 1.0, -2.0])
            probe = probe / probe.square().mean().sqrt()
            return (norm(probe) - norm(-probe)) / (2 * probe)
        return self.q.new_ones(self.dim)


def _norm_in(read: nn.Module) -> nn.Module | None:
    """The norm inside the read of a NormLab block, which may also divide by a constant that its law knows."""
    if not type(read).__module__.startswith("normlab."):
        return read
    return next((part for part in read.modules() if isinstance(part, Norm)), None)


def _matrix(role: Role) -> Tensor:
    """The matrix of a role as (out, in)."""
    view = role.view().float()
    return view if role.input_axis == -1 else view.mT


def _cut(matrix: Tensor, width: int, heads: int) -> Tensor:
    """Reshape rows to (heads, width, d); shared keys and values are repeated."""
    parts = matrix.unflatten(0, (-1, width))
    return parts.repeat_interleave(heads // len(parts), dim=0)
