"""Models of somebody's own, neither of this library nor published: blocks, a tower of them, one that reads tokens."""

from __future__ import annotations

import torch
from torch import nn

SMALL = {"length": 8, "batch_size": 2}


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(self.norm(x))


class Tower(nn.Module):
    """States in, states out."""

    def __init__(self, depth: int = 3, width: int = 8):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Reader(Tower):
    """Token ids in, states or logits out."""

    def __init__(self, depth: int = 3, width: int = 8, rows: int = 64, *, head: bool = True):
        super().__init__(depth, width)
        self.embedding = nn.Embedding(rows, width)
        self.head = nn.Linear(width, rows) if head else nn.Identity()

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "logits" if isinstance(self.head, nn.Linear) else "states": self.head(super().forward(self.embedding(ids)))
        }


def runs(target) -> float:
    model, batch = target.build(), next(target.batches())
    loss = target.loss(model, batch)
    loss.backward()
    free = [p for p in model.parameters() if p.requires_grad]
    assert any(p.grad is not None for p in free)
    return loss.item()
