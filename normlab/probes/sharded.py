"""Sharded weights (DTensor, FSDP2): the local shard, or the full tensor."""

# Parameters, buffers and compiled calls of a module, and fused list operations, have no public interface.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import Tensor, nn


def local(x: Tensor) -> Tensor:
    """The local shard of a tensor, without any communication."""
    to_local = getattr(x, "to_local", None)
    return x if to_local is None else to_local()


def whole(x: Tensor) -> Tensor:
    """The full tensor; every process must call it."""
    full_tensor = getattr(x, "full_tensor", None)
    return x if full_tensor is None else full_tensor()


def is_sharded(model: nn.Module) -> bool:
    """Whether the weights of a model are sharded."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP2 gathered in a forward pass and keeps for a backward pass that may never come.

    Until then modules use the gathered copy: what is written to the shards in between would be lost.
    """
    for module in model.modules():
        give_back = getattr(module, "reshard", None)
        if callable(give_back) and hasattr(module, "unshard"):
            give_back()


@contextmanager
def whole_vectors(model: nn.Module) -> Generator[None, None, None]:
    """Replace sharded vectors (gains, biases, steps) by full tensors; matrices, which may not fit, stay sharded."""
    held = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.ndim < 2 and hasattr(parameter, "full_tensor")
    ]
    try:
        for module, name, parameter in held:
            module._parameters[name] = nn.Parameter(whole(parameter).detach(), requires_grad=False)
        yield
    finally:
        for module, name, parameter in held:
            module._parameters[name] = parameter
