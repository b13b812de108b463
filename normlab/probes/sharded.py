"""Weights that are shared out over processes (DTensor): the part that is here, or all of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


def local(x: Tensor) -> Tensor:
    """The part of a sharded tensor that this process holds: a look never waits for other processes."""
    to_local = getattr(x, "to_local", None)
    return x if to_local is None else to_local()


def whole(x: Tensor) -> Tensor:
    """A sharded tensor put together; every process must ask for it."""
    full_tensor = getattr(x, "full_tensor", None)
    return x if full_tensor is None else full_tensor()


def is_sharded(model: nn.Module) -> bool:
    """Whether this process holds but a part of the weights."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def reshard(model: nn.Module) -> None:
    """Give back what FSDP gathered for a pass and keeps for a backward pass that may never come.

    Until then it shows, and uses, the gathered copy: what is written to the shards in between would be lost.
    """
    for module in model.modules():
        give_back = getattr(module, "reshard", None)
        if callable(give_back) and hasattr(module, "unshard"):
            give_back()


@contextmanager
def whole_vectors(model: nn.Module) -> Iterator[None]:
    """Gains, biases and steps as plain tensors; matrices, which may not fit together, stay shared out."""
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
