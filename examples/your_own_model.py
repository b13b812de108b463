"""A model that you already have, under any scheme: your attention, your MLP, and the scheme's rules for all of it.

The residual code is gone: a Stack takes the steps. Run it: python examples/your_own_model.py; plain_loop.py trains it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import normlab
from normlab.roles import Role, find_roles
from normlab.stack import initialise_


class YourAttention(nn.Module):
    def __init__(self, dim: int, heads: int = 4):
        super().__init__()
        self.qkv, self.out_proj, self.heads = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class YourModel(nn.Module):
    def __init__(self, scheme: str, dim: int = 64, depth: int = 4, **to_stack: Any):
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        mlps = [nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(depth)]
        self.stack = normlab.Stack(scheme, [(YourAttention(dim), mlp) for mlp in mlps], dim, **to_stack)
        self.head = nn.Linear(dim, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.stack(self.embedding(tokens[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def find_roles(self) -> list[Role]:
        # Names like "0.weight" say nothing of what a matrix does, so we say it; "qkv" and "head" speak for themselves.
        return find_roles(self, {"*.branches.1.0.weight": "up", "*.branches.1.2.weight": "down"})

    def init_(self, seed: int = 0) -> "YourModel":
        initialise_(self, self.stack.bound, self.find_roles(), generator=torch.Generator().manual_seed(seed))
        return self

    def param_groups(self, *, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        return self.stack.bound.param_groups(self.find_roles(), lr=lr, weight_decay=weight_decay)

    def after_step(self) -> None:
        self.stack.bound.after_step(self.find_roles())


if __name__ == "__main__":
    for group in YourModel("geonorm").init_().param_groups(lr=6e-3, weight_decay=0.1):
        print(f"{group['name']}: {sum(p.numel() for p in group['params'])} parameters, decay {group['weight_decay']}")
