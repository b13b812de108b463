"""A plain PyTorch loop: the scheme asks for three lines of it. Run it: python examples/plain_loop.py [SCHEME ...]"""

import sys
from typing import Any

import torch
from your_own_model import YourModel
from your_text import batches, report


def train(scheme: str, steps: int = 20, **to_stack: Any) -> tuple[YourModel, list[float]]:
    model = YourModel(scheme, **to_stack).init_()
    optimiser = torch.optim.AdamW(model.param_groups(lr=6e-3, weight_decay=0.1))
    losses = []
    for tokens in batches(steps):
        loss = model(tokens)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        model.after_step()  # nGPT's unit rows; nothing for most
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    for scheme in sys.argv[1:] or ["geonorm", "spannorm"]:
        report(scheme, train(scheme)[1])
