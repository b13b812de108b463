"""What a model looks like from block to block while it trains: hidden norm, gradient norm, angular speed.

One forward and one backward pass on a small batch, of which nothing remains: gradients and random numbers are as they
were before. Boundary 0 is the state after the entry, boundary k the state after block k.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from normlab import geometry
from normlab.data import IGNORED
from normlab.models.transformer import Transformer
from normlab.norms import rms, widen


def profile(model: Transformer, inputs: torch.Tensor, targets: torch.Tensor, **options: Any) -> dict[str, Any]:
    """The fields of a "profile" record, one value for each boundary; None stands for what is not finite.

    hidden_rms     root mean square of a token's hidden state, mean over tokens
    grad_norm      ‖∂(sum of the tokens' losses)/∂state‖ of one token, root mean square over tokens: whatever the batch
    angular_speed  angle in radians by which the block before the boundary turned a token, mean over tokens; None at 0
    """
    with untouched(model), states_of(model) as states:
        model.loss(inputs, targets, **options).backward()
        count = int((targets != IGNORED).sum())
    hidden = [widen(model.stack.hidden(state.detach())) for state in states]
    turned = [_finite(geometry.angle(a, b).mean()) for a, b in pairwise(hidden)]
    return {
        "layers": list(range(len(states))),
        "hidden_rms": [_finite(rms(h).mean()) for h in hidden],
        "grad_norm": [_grad_norm(state, count, hidden[0].shape[:-1].numel()) for state in states],
        "angular_speed": [None, *turned],
    }


@contextmanager
def states_of(model: Transformer) -> Iterator[list[torch.Tensor]]:
    """Collects the state at every boundary of the next forward pass, each with its gradient after the backward pass."""
    states: list[torch.Tensor] = []
    places: list[nn.Module] = [model.stack.entry, *model.stack.layers]

    def keep(_module: nn.Module, _args: Any, state: torch.Tensor) -> None:
        # Activation checkpointing runs the blocks once more in the backward pass.
        if len(states) < len(places):
            state.retain_grad()
            states.append(state)

    with ExitStack() as hooks:
        for place in places:
            hooks.callback(place.register_forward_hook(keep).remove)
        yield states


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Runs the model as it was written, not compiled, and leaves its gradients and all random numbers as they were."""
    compiled = [(m, m._compiled_call_impl) for m in model.modules() if m._compiled_call_impl is not None]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        for parameter, _ in grads:
            parameter.grad = None
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call
        for parameter, grad in grads:
            parameter.grad = grad


def _grad_norm(state: torch.Tensor, count: int, tokens: int) -> float | None:
    # Not every state has a gradient: the loss of no target at all has none.
    if state.grad is None:
        return None
    # The loss is a mean over the targets that count, so a token's own gradient is that many times larger.
    return _finite(torch.linalg.vector_norm(widen(state.grad)) * (count / math.sqrt(tokens)))


def _finite(value: torch.Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
