"""The plain loop under Lightning Fabric. Run it: python examples/fabric_loop.py [SCHEME ...]"""

import sys
from typing import Any

import torch
from your_own_model import YourModel
from your_text import batches, report

try:
    from lightning_fabric import Fabric
except ImportError:
    sys.exit("examples/fabric_loop.py needs lightning-fabric, which is missing; try: pip install lightning-fabric")


def train(scheme: str, steps: int = 20, **to_stack: Any) -> tuple[YourModel, list[float]]:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model = YourModel(scheme, **to_stack).init_()
    optimiser = torch.optim.AdamW(model.param_groups(lr=6e-3, weight_decay=0.1))
    wrapped, optimiser = fabric.setup(model, optimiser)
    losses = []
    for tokens in batches(steps):
        loss = wrapped(tokens)
        optimiser.zero_grad()
        fabric.backward(loss)
        optimiser.step()
        model.after_step()  # the model's own parameters: Fabric wraps it, and copies nothing
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    for scheme in sys.argv[1:] or ["geonorm"]:
        report(scheme, train(scheme)[1])
