"""A model whose changes in training are known in closed form, at every width, depth and step.

The state starts at 10 x with x = ±1, and every block adds W sign(state) / division. While the additions stay below 10,
sign(state) = x, and sign passes no gradient on. The loss is the sum of c · state with c = ±1, so the gradient of every
W is c xᵀ / division at every step, and Adam moves every entry by the rate: ΔW = -lr t c xᵀ after t steps. So

    change of W x      lr t width
    change of state    lr t width depth / division
"""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, division: float):
        super().__init__()
        self.matrix = nn.Linear(width, width, bias=False)
        # Of the size that the state must not grow by; random, so that blocks and seeds differ.
        nn.init.normal_(self.matrix.weight, std=0.01 / width)
        self.division = division

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return state + self.matrix(state.sign()) / self.division


class Known(nn.Module):
    def __init__(self, depth: int, width: int, division: float):
        super().__init__()
        self.register_buffer("x", signs(width, 1))
        self.register_buffer("c", signs(width, 2))
        self.layers = nn.ModuleList(Block(width, division) for _ in range(depth))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        state = 10.0 * self.x.expand(*tokens.shape, -1)
        for layer in self.layers:
            state = layer(state)
        return state


def signs(width: int, seed: int) -> torch.Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(seed)).sign()


def loss(model: Known, tokens: torch.Tensor) -> torch.Tensor:
    return (model(tokens) * model.c).sum()


def without_rule(depth: int = 4, width: int = 16):
    return Known(depth, width, division=1.0), torch.zeros(1, 3, dtype=torch.long), loss


def with_rule(depth: int = 4, width: int = 16):
    """Divided by depth · width: changes of the state do not depend on either."""
    return Known(depth, width, division=depth * width / 64), torch.zeros(1, 3, dtype=torch.long), loss
