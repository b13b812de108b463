"""Detect parameters that initialisation did not write, by filling uninitialised memory with NaN.

`to_empty` gives a module from the meta device memory that holds whatever was there before. A parameter that nobody
initialises would be trained from there. `NaNUntilInitialised` fills such tensors with NaN; `require_initialised` raises
where NaN is left after initialisation. Loading a checkpoint in place of initialising checks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn

from normlab.errors import NormLabError


class NaNUntilInitialised(nn.Module):
    """A module whose tensors are filled with NaN when they leave the meta device."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # Not in `to_empty`: parent modules and FSDP2 only call `_apply`.
        waiting = [(table, name) for table, name in _places(self) if table[name].is_meta]
        super()._apply(fn, recurse)
        for table, name in waiting:
            poison_(table[name])
        return self


@torch.no_grad()
def poison_(tensor: torch.Tensor) -> None:
    """Fill a tensor with NaN; integers and meta tensors are left unchanged."""
    if tensor.is_floating_point() and not tensor.is_meta:
        tensor.detach().fill_(torch.nan)


@contextmanager
def require_initialised(module: nn.Module, who: str, made: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager around an initialisation: raises if it leaves a parameter of `module` unwritten.

    `made` are the scheme's modules, whose tensors are filled with NaN first, because they must have an initialisation
    rule. The user's modules may keep their values. `who` is the scheme's name in the error.
    """
    for part in made:
        for tensor in (*part.parameters(), *part.buffers()):
            poison_(tensor)
    yield
    for part in (module, *made):
        refuse_uninitialised(part, who, module)


def refuse_uninitialised(part: nn.Module, who: str, root: nn.Module, *, recurse: bool = True) -> None:
    """Raise, with its name, if a parameter in `part` holds NaN; in a scheme's module also for a buffer."""
    of_scheme = part is not root
    tensors = [*part.parameters(recurse), *(part.buffers(recurse) if of_scheme else ())]
    filled = [tensor for tensor in tensors if tensor.is_floating_point() and not tensor.is_meta]
    # A sum is NaN if an entry is, in one pass over memory; stacking them needs one device synchronisation for all.
    if filled and bool(torch.stack([_whole(tensor.detach().sum()).isnan() for tensor in filled]).any()):
        unwritten = next((t for t in filled if bool(_whole(t.detach().isnan().sum()))), None)
        if unwritten is not None:
            raise NormLabError(f"{who}: {_reason(root, unwritten)}")


def _whole(tensor: Any) -> torch.Tensor:
    """Gather a number that may be distributed over ranks, so that all ranks raise together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _reason(root: nn.Module, unwritten: torch.Tensor) -> str:
    owner, name = next((owner, name) for owner, name, tensor in _named(root) if tensor is unwritten)
    kind, lost = type(owner).__name__, "what __init__ writes is lost where models are laid out, on the meta device"
    if not hasattr(owner, "reset_parameters"):
        return f"{name} is not initialised: {lost}; give {kind} a reset_parameters() method that writes it"
    if any(parameter.ndim > 1 for parameter in owner.parameters(recurse=False)):
        return (
            f"{name} is not initialised: {kind} holds a matrix, too, and is not reset; move it to a module of its own"
        )
    return f"{name} is not initialised: {kind}.reset_parameters() does not write it, and {lost}"


def _named(root: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """(owner, full name, tensor) of every parameter and buffer."""
    for path, owner in root.named_modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    yield owner, f"{path}.{name}".lstrip("."), tensor


def _places(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """(dictionary, name) of every tensor in a module, except in children of class `NaNUntilInitialised`."""
    for table in (module._parameters, module._buffers):
        yield from ((table, name) for name, tensor in table.items() if tensor is not None)
    for child in module.children():
        if not isinstance(child, NaNUntilInitialised):
            yield from _places(child)
