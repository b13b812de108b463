"""Broken designs, each with one fault, and the healthy decoder that they are made from.

Every design is a factory of depth and width that returns a module of token ids (B, T) to logits (B, T, V):
`normlab check tests.checks.broken:detached_attention`. Attention is written out, as in most teaching code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

VOCABULARY, HEAD = 64, 16
GUILTY = 3
"""The block that has the fault, where one alone has it."""

Update = Callable[[Tensor], Tensor]


class Norm(nn.Module):
    """LayerNorm over some dimensions of (B, T, D): the last for a sound one."""

    def __init__(self, width: int, over: int = -1, eps: float = 1e-5):
        super().__init__()
        self.over, self.eps = over, eps
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        apart = x - x.mean(self.over, keepdim=True)
        return self.gain * apart / (apart.square().mean(self.over, keepdim=True) + self.eps).sqrt()


class Attention(nn.Module):
    """Causal self-attention in plain torch."""

    def __init__(self, width: int, causal: bool = True):
        super().__init__()
        self.heads, self.causal = width // HEAD, causal
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if self.causal:
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


@dataclass(frozen=True)
class Design:
    """What a block does wrong; as it stands, nothing."""

    norm: Callable[[int], nn.Module] = Norm
    final_norm: Callable[[int], nn.Module] = Norm
    attention: Callable[[int], nn.Module] = Attention
    skip: float = 1.0
    before: dict[str, Update] | None = None
    """Done to what a branch reads, by its name."""
    after: dict[str, Update] | None = None
    """Done to what a branch returns, by its name."""


class Block(nn.Module):
    def __init__(self, width: int, design: Design):
        super().__init__()
        self.design = design
        self.attention_norm, self.attention = design.norm(width), design.attention(width)
        self.mlp_norm, self.mlp = design.norm(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.design.skip * x + self._update("attention", x)
        return self.design.skip * x + self._update("mlp", x)

    def _update(self, name: str, x: Tensor) -> Tensor:
        before, after = ((what or {}).get(name, _same) for what in (self.design.before, self.design.after))
        norm, branch = self.get_submodule(f"{name}_norm"), self.get_submodule(name)
        return after(branch(norm(before(x))))


class Model(nn.Module):
    def __init__(self, depth: int, width: int, design: Design, fault: Design | None = None):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(256, width)
        self.blocks = nn.ModuleList(
            Block(width, design if fault is None or place != GUILTY else fault) for place in range(depth)
        )
        self.norm, self.head = design.final_norm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _same(x: Tensor) -> Tensor:
    return x


def _nothing(_width: int) -> nn.Module:
    return nn.Identity()


HEALTHY = Design()


def healthy(depth: int = 12, width: int = 64) -> nn.Module:
    """Pre-Norm, with nothing wrong."""
    return Model(depth, width, HEALTHY)


def detached_attention(depth: int = 12, width: int = 64) -> nn.Module:
    """What attention returns is detached in every block: its weights get no gradient."""
    return Model(depth, width, Design(after={"attention": Tensor.detach}))


def detached_attention_once(depth: int = 12, width: int = 64) -> nn.Module:
    """The same in one block."""
    return Model(depth, width, HEALTHY, Design(after={"attention": Tensor.detach}))


def detached_mlp(depth: int = 12, width: int = 64) -> nn.Module:
    """What the MLP returns is detached in every block."""
    return Model(depth, width, Design(after={"mlp": Tensor.detach}))


def detached_mlp_once(depth: int = 12, width: int = 64) -> nn.Module:
    """The same in one block."""
    return Model(depth, width, HEALTHY, Design(after={"mlp": Tensor.detach}))


def detached_input(depth: int = 12, width: int = 64) -> nn.Module:
    """What attention reads is detached in every block: its weights learn, and no gradient passes it."""
    return Model(depth, width, Design(before={"attention": Tensor.detach}))


def detached_input_once(depth: int = 12, width: int = 64) -> nn.Module:
    """The same with the MLP of one block."""
    return Model(depth, width, HEALTHY, Design(before={"mlp": Tensor.detach}))


def norm_over_batch(depth: int = 12, width: int = 64) -> nn.Module:
    """Norms over the samples of a batch, in place of the channels of a token."""
    return Model(depth, width, Design(norm=partial(Norm, over=0), final_norm=partial(Norm, over=0)))


def norm_over_time(depth: int = 12, width: int = 64) -> nn.Module:
    """Norms over the tokens of a sequence: the future leaks into the past."""
    return Model(depth, width, Design(norm=partial(Norm, over=1), final_norm=partial(Norm, over=1)))


def no_mask_once(depth: int = 12, width: int = 64) -> nn.Module:
    """One block's attention sees later tokens."""
    return Model(depth, width, HEALTHY, Design(attention=partial(Attention, causal=False)))


def no_final_norm(depth: int = 12, width: int = 64) -> nn.Module:
    """The head reads what the last block leaves."""
    return Model(depth, width, Design(final_norm=_nothing))


def no_norm(depth: int = 12, width: int = 64) -> nn.Module:
    """No norm anywhere."""
    return Model(depth, width, Design(norm=_nothing, final_norm=_nothing))


def huge_epsilon(depth: int = 12, width: int = 64) -> nn.Module:
    """Norms of an epsilon far above the square of the state, which divide by a constant."""
    return Model(depth, width, Design(norm=partial(Norm, eps=1000.0), final_norm=partial(Norm, eps=1000.0)))


def huge_epsilon_once(depth: int = 12, width: int = 64) -> nn.Module:
    """The same in one block."""
    return Model(depth, width, HEALTHY, Design(norm=partial(Norm, eps=1000.0)))


def huge_final_epsilon(depth: int = 12, width: int = 64) -> nn.Module:
    """The same before the head."""
    return Model(depth, width, Design(final_norm=partial(Norm, eps=1000.0)))


def growing_skip(depth: int = 12, width: int = 64) -> nn.Module:
    """Every skip multiplies the state by 1.5."""
    return Model(depth, width, Design(skip=1.5))


def shrinking_skip(depth: int = 12, width: int = 64) -> nn.Module:
    """Every skip halves the state."""
    return Model(depth, width, Design(skip=0.5))
