"""Small stacks and inputs for the rules."""

from __future__ import annotations

from typing import Any

import torch

from normlab.models import MLP, Attention
from normlab.roles import COEFFICIENTS
from normlab.stack import Stack

DIM, HEADS, HIDDEN, TOKENS = 16, 2, 24, 6


def make_stack(scheme, blocks=4, dim=DIM, *, seed=0, std=None, init=True, **options) -> Stack:
    """A stack of NormLab's sublayers; matrices are initialised in the same order for every scheme."""
    sublayers = [(Attention(dim, HEADS, kv_heads=1), MLP(dim, HIDDEN)) for _ in range(blocks)]
    stack = Stack(scheme, sublayers, dim, **options)
    return stack.init_(generator=torch.Generator().manual_seed(seed), std=std) if init else stack


def make_input(dim=DIM, dtype=torch.float32, scale=1.0) -> torch.Tensor:
    """A fixed random input that requires a gradient."""
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(2, TOKENS, dim, generator=generator) * scale).to(dtype).requires_grad_()


def leave_neutral_values(stack: Stack) -> None:
    """Move what may start at a neutral value (gains, gates, coefficients) away from it, so that it has an effect."""
    for role in stack.find_roles():
        if not role.is_matrix or role.role in COEFFICIENTS:
            role.parameter.data += 0.8


def weighted_sum(y: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient no norm cancels; a sum of squares is constant on the sphere."""
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    return (y * weights).sum()


def gradients(stack: Stack, x: torch.Tensor) -> dict[str, Any]:
    """Gradients of `weighted_sum` for all parameters, by name."""
    stack.zero_grad()
    weighted_sum(stack(x)).backward()
    return {name: parameter.grad for name, parameter in stack.named_parameters()}
