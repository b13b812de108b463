"""Rung: one size of a ladder with its budgets, batch, weight decay and seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from normlab.ladders.size import Size

BATCH_POWER = 0.4
"""Exponent of the batch size over tokens on a path: between 0.383 (Power Lines) and 0.571 (Step Law)."""


@dataclass(frozen=True)
class Rung:
    """One size. Its budgets come from one trunk: the largest by its own decay, the others by cooldown branches."""

    size: Size
    budgets: tuple[int, ...]
    """Training tokens, ascending."""
    batch: int
    """Sequences a step."""
    weight_decay: float
    seeds: int
    is_held_out: bool = False
    """Whether its runs start only after their result has been forecast."""


def path_batch(batch: int, tokens: int, first_tokens: int) -> int:
    """Batch of a rung on a path: grows like tokens^0.4 from the first rung's, by factors of 2."""
    return batch * 2 ** max(0, round(BATCH_POWER * math.log2(tokens / first_tokens)))


def path_decay(weight_decay: float, batch: int, tokens: int, first_batch: int, first_tokens: int) -> float:
    """Weight decay of a rung on a path: λ ∝ √batch / tokens.

    The rate grows like √batch, so that the share of the weights that a whole run forgets, rate · λ · steps, is the same
    at every rung.
    """
    return weight_decay * math.sqrt(batch / first_batch) * first_tokens / tokens
