"""Test for a norm before the first block: the state it reads must not scale with the embeddings.

A first block without a norm of its own is sound behind one, as ModernBERT's is: nothing else sets what it reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from normlab.norms import widen
from normlab.probes.blocks import BlockStack, eager, walk
from normlab.probes.replay import capture

FACTORS = (10.0, 1000.0)
"""Factors on the embeddings."""


@torch.no_grad()
def entry_exponent(model: nn.Module, stack: BlockStack, run: Callable[[], Any]) -> float | None:
    """Slope of log RMS that the first block reads on log size of the first state: 0 behind a norm, 1 without.

    The first state is what the first module returns for all tokens; None if it is that of the block itself.
    """
    small, large = (_entry_size(model, stack, run, factor) for factor in FACTORS)
    if small is None or large is None or not (0.0 < small < math.inf and 0.0 < large < math.inf):
        return None
    return math.log(large / small) / math.log(FACTORS[1] / FACTORS[0])


def _entry_size(model: nn.Module, stack: BlockStack, run: Callable[[], Any], factor: float) -> float | None:
    """RMS of the state that the first block reads with the first state enlarged."""
    outside = {module for path, module in walk(eager(model), "") if stack.block_of(path) is None}
    enlarged: list[bool] = []

    def enlarge(module: nn.Module, _args: Any, output: Any) -> Tensor | None:
        if enlarged or not isinstance(output, Tensor) or not output.is_floating_point() or output.ndim < 3:
            return None
        enlarged.append(module in outside)
        return factor * output

    with ExitStack() as hooks:
        for module in dict.fromkeys(module for _, module in walk(eager(model), "")):
            hooks.callback(module.register_forward_hook(enlarge).remove)
        call = capture(stack, [stack.blocks[0]], run)[0]
    if call is None or enlarged != [True]:
        return None
    return float(widen(call.state).square().mean().sqrt())
