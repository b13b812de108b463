"""Gain of the product of mixing matrices through depth, in schemes that mix several residual streams.

A step multiplies the streams by a matrix M_k for each token (`Write.mixing`). Without what branches add, the last
streams are P = M_K ··· M_1 times the first. The largest row sum of |P| is the most by which P enlarges the largest
stream in the forward pass; the largest column sum is the same for gradients in the backward pass (the "gain magnitude"
of arXiv 2512.24880). Doubly stochastic matrices have 1 for both.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from normlab.checks.theory.scheme_stack import boundary

if TYPE_CHECKING:
    from normlab.checks.theory.scheme_stack import SchemeStack

_LARGEST = 1e30
"""Entries of a product are clamped to this value."""


@dataclass(frozen=True)
class MixingGain:
    """Gains of the product P of all mixing matrices, for the worst token."""

    forward: float
    """Largest row sum of |P|."""
    backward: float
    """Largest column sum of |P|."""
    spread: float
    """RMS of the streams' distance from their mean over the RMS of the streams, after the last block."""


class MixingWatch:
    """Hooks that multiply the mixing matrices of a forward pass; the last pass counts."""

    def __init__(self, stack: SchemeStack):
        self.stack = stack
        self.product: torch.Tensor | None = None
        self.spread = torch.zeros(())

    def listen(self, hooks: ExitStack) -> None:
        """Install the hooks; closing `hooks` removes them."""
        layers: list[Any] = list(self.stack.layers)
        hooks.callback(self.stack.entry.register_forward_pre_hook(self._restart).remove)
        for layer in layers:
            for step in layer.block.steps:
                hooks.callback(step.write.register_forward_hook(self._multiply).remove)
        if self.stack.scheme.streams > 1:
            hooks.callback(boundary(layers[-1]).register_forward_hook(self._end).remove)

    def found(self) -> MixingGain | None:
        """The gains of the pass; None for a scheme that mixes no streams."""
        if self.product is None:
            return None
        # What overflows is a gain, too.
        size = self.product.abs().nan_to_num(nan=_LARGEST, posinf=_LARGEST).clamp(max=_LARGEST)
        return MixingGain(float(size.sum(-1).max()), float(size.sum(-2).max()), float(self.spread))

    def _restart(self, _entry: nn.Module, _args: Any) -> None:
        self.product = None

    def _multiply(self, write: Any, args: tuple[torch.Tensor, ...], _state: Any) -> None:
        matrix: torch.Tensor | None = write.mixing(*args[2:])
        if matrix is not None:
            matrix = widest(matrix)
            self.product = matrix if self.product is None else matrix @ self.product

    def _end(self, _layer: nn.Module, _args: Any, state: torch.Tensor) -> None:
        streams = widest(state)
        apart = streams - streams.mean(-2, keepdim=True)
        self.spread = apart.square().mean().sqrt() / streams.square().mean().sqrt()


def widest(x: torch.Tensor) -> torch.Tensor:
    """Cast to the widest floating-point type of the device: squares of fp32 overflow above 2·10¹⁹."""
    return x.float() if x.device.type == "mps" else x.double()
