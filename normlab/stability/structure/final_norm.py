"""Whether a norm stands between the last block and the head: the logits must not follow the size of the last state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normlab.norms import widen
from normlab.stability.blocks import BlockStack

FACTORS = (10.0, 1000.0)
"""What the last state is multiplied by."""


@torch.no_grad()
def logit_exponent(stack: BlockStack, run: Callable[[], Tensor | None]) -> float | None:
    """Slope of log logits on log size of the last state: 0 behind a norm, 1 without. `run` returns the logits."""
    sizes = [_logit_size(stack.blocks[-1], run, factor) for factor in FACTORS]
    if any(size is None or not 0.0 < size < math.inf for size in sizes):
        return None
    return math.log(sizes[1] / sizes[0]) / math.log(FACTORS[1] / FACTORS[0])  # type: ignore[operator]


def _logit_size(block: nn.Module, run: Callable[[], Tensor | None], factor: float) -> float | None:
    """How far logits of one token lie apart with the output of `block` enlarged."""
    hook = block.register_forward_hook(lambda _block, _args, output: enlarged(output, factor))
    try:
        logits = run()
    finally:
        hook.remove()
    return None if logits is None else float(widen(logits).std(-1).mean())


def enlarged(output: Any, factor: float) -> Any:
    """What a block returned, its state multiplied."""
    if isinstance(output, Tensor):
        return output * factor
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        rest = output[1:]
        return type(output)((output[0] * factor, *rest))
    return output
