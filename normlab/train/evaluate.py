"""The loss on text that was not trained on."""

from __future__ import annotations

from collections.abc import Callable

import torch

from normlab.data import IGNORED, Tokens, evaluation_batches
from normlab.train.config import TrainConfig
from normlab.train.distributed import Group


@torch.no_grad()
def evaluate(
    loss: Callable[..., torch.Tensor], tokens: Tokens, config: TrainConfig, group: Group
) -> tuple[float, float]:
    """(nats a token, bits a byte) over the validation text, or as much of it as the configuration allows."""
    batch = max(1, config.batch // config.accumulate // group.world)
    nats = torch.zeros((), dtype=torch.float64, device=group.device)
    count = torch.zeros((), dtype=torch.float64, device=group.device)
    places = {"rank": group.rank, "world": group.world, "boundaries": config.boundaries, "device": group.device}
    for part in evaluation_batches(tokens, length=config.length, batch=batch, max_tokens=config.eval_tokens, **places):
        here = (part.targets != IGNORED).sum()
        # A rank may have nothing left to predict; its mean over nothing must not spoil the sum.
        nats += torch.where(here > 0, loss(part.inputs, part.targets, documents=part.documents).double() * here, 0.0)
        count += here
    mean = group.all_mean(nats.item()) / group.all_mean(count.item())
    return mean, tokens.bits_per_byte(mean)
