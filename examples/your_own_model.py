"""GeoNorm in a model you already have: your attention, your MLP, your loop.

Three things change: the residual code becomes a Stack, parameter groups come from it, and `after_step` follows the
optimiser. Run it: python examples/your_own_model.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import normlab


class YourAttention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor, causal: bool = True) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out_proj(mixed.transpose(1, 2).flatten(-2))


class YourModel(nn.Module):
    def __init__(self, scheme: str, vocab: int = 256, dim: int = 64, depth: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        blocks = [
            (YourAttention(dim, 4), nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)))
            for _ in range(depth)
        ]
        # Names like "0.weight" say nothing of what a matrix does, so we say it.
        self.stack = normlab.Stack(scheme, blocks, dim, roles={"*.1.0.weight": "up", "*.1.2.weight": "down"})
        self.stack.init_()
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.stack(self.embedding(tokens), causal=True))


def train(scheme: str, steps: int = 60) -> float:
    torch.manual_seed(0)
    model = YourModel(scheme)
    groups = model.stack.param_groups(lr=3e-3, weight_decay=0.1)
    outside = [*model.embedding.parameters(), *model.head.parameters()]
    optimiser = torch.optim.AdamW([*groups, {"params": outside, "lr": 3e-3}])
    text = torch.tensor(list((normlab.__doc__ or "").encode() * 40))
    loss = torch.tensor(float("nan"))
    for _ in range(steps):
        starts = torch.randint(0, len(text) - 33, (16, 1))
        batch = text[starts + torch.arange(33)]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        model.stack.after_step()
    return loss.item()


if __name__ == "__main__":
    for name in ("pre", "peri", "geonorm", "spannorm"):
        print(f"{name:10} loss after 60 steps: {train(name):.3f}")
