"""Tensors in what modules take and return: hidden states, loss and logits."""

# torch annotates hooks, modules and some tensor functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from normlab.errors import NormLabError

Batch = torch.Tensor | Mapping[str, Any] | Sequence[Any]
LossFn = Callable[[nn.Module, Any], torch.Tensor]


def tensors(value: Any, min_ndim: int = 2) -> Iterator[torch.Tensor]:
    """The floating-point tensors of at least `min_ndim` dimensions in tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.ndim >= min_ndim:
            yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors(part, min_ndim)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors(part, min_ndim)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for spec in dataclasses.fields(value):
            yield from tensors(getattr(value, spec.name, None), min_ndim)


def given_state(block: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The hidden state among a block's arguments: in the positional ones, else in the first keyword argument.

    Names are in the order of the block's signature, whatever the order of the call; None where there is no tensor.
    """
    listed = inspect.signature(block.forward).parameters
    named = [kwargs[name] for name in listed if name in kwargs]
    others = [value for name, value in kwargs.items() if name not in listed]
    return next(tensors((args, named, others)), None)


def first_state(output: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """The hidden state in what a block returned: the first tensor shaped like an input, else the first of all."""
    found = list(tensors(output))
    if not found:
        raise NormLabError(f"probe: a block returned {type(output).__name__} without a hidden state; expected a tensor")
    shapes = {tensor.shape for tensor in tensors((args, kwargs))}
    return next((tensor for tensor in found if tensor.shape in shapes), found[0])


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that a model returns if called with a batch."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(batch) if isinstance(batch, torch.Tensor) else model(*batch)
    loss, _ = loss_and_logits(output)
    if loss is None:
        raise NormLabError(
            f"{type(model).__name__} returned no loss; expected labels in the batch, or a loss_fn(model, batch)"
        )
    return loss


def loss_and_logits(output: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The loss and the logits in a model's output, by name; a bare tensor is a loss if it is a scalar, else logits."""
    if isinstance(output, torch.Tensor):
        return (output, None) if output.ndim == 0 else (None, output if output.ndim >= 2 else None)
    if isinstance(output, Mapping):
        return output.get("loss"), output.get("logits")
    return getattr(output, "loss", None), getattr(output, "logits", None)
