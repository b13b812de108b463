"""Small models of our own, batches for them, and how two looks are compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from normlab import Decoder, DecoderConfig
from normlab.probes.profile import BLOCK, BOUNDARY, Profile

SIZE = {"depth": 3, "dim": 32, "heads": 4, "kv_heads": 2, "vocab_size": 61, "max_length": 64, "hidden": 48}


def decoder(scheme: str = "pre", **options) -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig(scheme=scheme, init_std=0.1, **{**SIZE, **options}))


def text(batch: int = 4, length: int = 12, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 61, (batch, length + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, batch) -> torch.Tensor:
    return model.loss(*batch)  # type: ignore[operator]


@contextmanager
def states_of(model: Decoder) -> Iterator[list[torch.Tensor]]:
    """The state at every boundary of the next forward pass, each with its gradient after the backward pass."""
    states: list[torch.Tensor] = []

    def keep(_module: nn.Module, _args: Any, state: torch.Tensor) -> None:
        state.retain_grad()
        states.append(state)

    with ExitStack() as hooks:
        for place in [model.stack.entry, *model.stack.layers]:
            hooks.callback(place.register_forward_hook(keep).remove)
        yield states


class Block(nn.Module):
    def __init__(self, dim: int = 8):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(self.norm(x))


class Tower(nn.Module):
    """Blocks in a loop; `forward` may be replaced by a subclass."""

    def __init__(self, blocks: list[nn.Module] | None = None, dim: int = 8):
        super().__init__()
        self.embed = nn.Linear(dim, dim)
        self.layers = nn.ModuleList(blocks or [Block(dim) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def same(one: Profile, other: Profile, tolerance: float = 0.0, but: tuple[str, ...] = ()) -> None:
    for name in (*BOUNDARY, *BLOCK, "loss"):
        if name in but:
            continue
        a, b = getattr(one, name), getattr(other, name)
        rows = zip(a, b, strict=True) if isinstance(a, list) else [(a, b)]
        for left, right in rows:
            assert (left is None) == (right is None), name
            assert left is None or left == pytest.approx(right, rel=tolerance, abs=tolerance), name


WITHIN_A_PASS = ("var_data", "cos_rest", "erank", "erank_rest", "stable_rank")
"""What compares the tokens of a batch with one another: two passes are not one batch."""


def hooks_on(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    on_modules = sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
    return on_modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
