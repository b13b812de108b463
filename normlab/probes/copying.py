"""Copying from the context: the losses of a random sequence and of its repetition (a test for induction heads).

    x₁ … x_n x₁ … x_n      tokens of a batch in random order, and the same once more
    first copy             mean loss of x₂ … x_n, in nats: nothing before them tells what they are
    second copy            mean loss of the same tokens n places later: near 0 for a model that copies

The difference is what a model gains by copying. Models learn this suddenly, and how early depends on the scheme, the
rate and the seed; on text that repeats itself it is a large part of the loss.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from normlab.data import IGNORED
from normlab.models.transformer import Transformer
from normlab.probes.untouched import eager_mode, untouched

_SEED = 2209


class CopyLosses(NamedTuple):
    """Losses of the two copies in nats per token; None if not finite."""

    first: float | None
    second: float | None


def copy_losses(model: Transformer, tokens: torch.Tensor) -> CopyLosses | None:
    """The losses on random sequences of the tokens in `tokens` (rows, length); None for rows shorter than 4.

    The model is restored afterwards. With a random order of the batch's own tokens none is one that was never trained.
    """
    half = tokens.shape[1] // 2
    if half < 2:
        return None
    drawn = _in_random_order(tokens)[:, :half]
    twice = torch.cat([drawn, drawn], dim=1)
    with untouched(model), eager_mode(), torch.no_grad():
        losses = [float(model.cross_entropy(twice, _targets(twice, start, half))) for start in (0, half)]
    return CopyLosses(*(loss if math.isfinite(loss) else None for loss in losses))


def _in_random_order(tokens: torch.Tensor) -> torch.Tensor:
    order = torch.randperm(tokens.numel(), generator=torch.Generator().manual_seed(_SEED))
    return tokens.flatten()[order.to(tokens.device)].view_as(tokens)


def _targets(twice: torch.Tensor, start: int, half: int) -> torch.Tensor:
    """The next token at the places of one copy, less its last place: what follows there is a random token."""
    targets = torch.full_like(twice, IGNORED)
    targets[:, start : start + half - 1] = twice[:, start + 1 : start + half]
    return targets
