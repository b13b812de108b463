"""What the tests of several kernels share: chains of steps, compiled and checkpointed, and stacks of streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import normlab
from normlab.models import MLP


def assert_same_otherwise(chain: Callable[..., Tensor], made: Sequence[Tensor], way: str, *, roundings: int) -> None:
    """A chain gives the same loss, compiled or checkpointed, and gradients within so many roundings."""
    torch._dynamo.reset()
    found = []
    other = {
        "compiled": torch.compile(chain, fullgraph=True, backend="aot_eager"),
        "checkpointed": lambda *inputs: checkpoint(chain, *inputs, use_reentrant=False),
    }[way]
    for loss in (chain, other):
        inputs = [t.clone().requires_grad_() for t in made]
        loss(*inputs).backward()
        found.append([t.grad for t in inputs])
    for one, two in zip(*found, strict=True):
        # The compiler adds the gradients of what several steps use in another order.
        assert (one - two).abs().max() <= roundings * torch.finfo(one.dtype).eps * two.abs().max()
    with torch.no_grad():
        assert torch.equal(other(*made), chain(*made))


def random_stack(spec: str, kernels: str) -> normlab.Stack:
    """Two blocks of width 24 at random coefficients, the same for every call."""
    torch.manual_seed(0)
    stack = normlab.Stack(spec, [(MLP(24, 40), MLP(24, 40)) for _ in range(2)], 24, kernels=kernels)
    stack.init_(std=0.1, generator=torch.Generator(torch.get_default_device()).manual_seed(0))
    with torch.no_grad():
        for parameter in stack.parameters():
            # At initialisation all streams are alike, and no kernel could be wrong about which is which.
            parameter += torch.randn(parameter.shape) * 0.1
    return stack
