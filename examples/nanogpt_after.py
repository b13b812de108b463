"""A small GPT in nanoGPT's style, under any scheme. Run it: python examples/nanogpt_after.py [SCHEME ...]"""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from nanogpt_sublayers import MLP, CausalSelfAttention, GPTConfig
from torch import nn
from your_text import batches, report

import normlab
from normlab.roles import Role, find_roles
from normlab.stack import initialise_


class GPT(nn.Module):
    def __init__(self, config: GPTConfig, scheme: str = "geonorm", **to_stack: Any):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        blocks = [(CausalSelfAttention(config), MLP(config)) for _ in range(config.n_layer)]
        self.h = normlab.Stack(scheme, blocks, config.n_embd, **to_stack)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        initialise_(self, self.h.bound, self.find_roles())

    def find_roles(self) -> list[Role]:
        # Both sublayers end in a "c_proj"; every other name is known.
        return find_roles(self, {"*.branches.0.c_proj.weight": "o", "*.branches.1.c_proj.weight": "down"})

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.h(self.wte(idx) + self.wpe(torch.arange(idx.size(1))))
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())


def train(model: GPT, steps: int = 60) -> list[float]:
    groups = model.h.bound.param_groups(model.find_roles(), lr=3e-3, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    losses = []
    for tokens in batches(steps):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.h.bound.after_step(model.find_roles())
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    for scheme in sys.argv[1:] or ["geonorm", "spannorm"]:
        torch.manual_seed(1337)
        report(scheme, train(GPT(GPTConfig(), scheme)))
