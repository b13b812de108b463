"""A GPT-2 with the parts and the loss of nanoGPT, written anew for `normlab bench step --peers`.

Learned positions, LayerNorm without bias, fused projections of queries, keys and values, a GELU MLP of four times the
width, and a head tied to the embedding: nanoGPT's defaults for training from scratch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal attention over all heads."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(D, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


class MLP(nn.Module):
    """Two layers with GELU between."""

    def __init__(self, dim: int):
        super().__init__()
        self.into = nn.Linear(dim, 4 * dim, bias=False)
        self.out = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.into(x)))


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim, bias=False) for _ in range(2))
        self.attention, self.mlp = Attention(dim, heads), MLP(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class GPT2(nn.Module):
    """Returns logits, and with targets the loss as well, computed from all logits at once."""

    def __init__(self, *, depth: int, dim: int, heads: int, vocabulary: int, length: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, bias=False)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # Each block adds two outputs to the stream.
                nn.init.normal_(weight, std=0.02 * (2 * depth) ** -0.5 if name.endswith("out.weight") else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))
