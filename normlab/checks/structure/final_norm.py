"""Test for a final norm between the last block and the head: logits must not scale with the last state.

The state is scaled up before the last block, so that a block which ends in a norm counts as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normlab.norms import widen
from normlab.probes.blocks import BlockStack
from normlab.probes.outputs import tensors
from normlab.probes.replay import again

FACTORS = (10.0, 1000.0)
"""Factors on the last state."""


@torch.no_grad()
def logit_exponent(
    stack: BlockStack, run: Callable[[], Tensor | None], factors: tuple[float, float] = FACTORS
) -> float | None:
    """Slope of log logits on log size of the state: 0 behind a norm, 1 without. `run` returns the logits."""
    small, large = (_logit_size(stack.blocks[-1], run, factor) for factor in factors)
    if small is None or large is None or not (0.0 < small < math.inf and 0.0 < large < math.inf):
        return None
    return math.log(large / small) / math.log(factors[1] / factors[0])


def _logit_size(block: nn.Module, run: Callable[[], Tensor | None], factor: float) -> float | None:
    """Spread of the logits of a token if the state that `block` reads is multiplied by a factor."""

    def enlarge(_block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        state = next(tensors((args, kwargs)), None)
        if state is None:
            return None
        return again(args, state, factor * state), again(kwargs, state, factor * state)

    hook = block.register_forward_pre_hook(enlarge, with_kwargs=True)
    try:
        logits = run()
    finally:
        hook.remove()
    return None if logits is None else float(widen(logits).std(-1).mean())
