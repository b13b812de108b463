"""Modules that multiply the residual stream or an update by a constant or by a learned vector."""

# torch annotates some tensor functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import nn

from normlab.norms import widen
from normlab.schemes.contract.bounds import rms_bound_of


class ConstantScale(nn.Module):
    """Multiplies by a fixed number, such as a constant that depends on depth.

    The number is a Python float, so it survives a build on the meta device and is never part of a state dict. Compiled
    code must not see the float, or it would specialise on it and recompile for every block: it sees a zero-dimensional
    tensor instead, created again from the float whenever the module moves to another device.
    """

    def __init__(self, value: float):
        super().__init__()
        self.value = float(value)
        default = torch.get_default_device()
        self._tensor = _scalar(self.value, torch.device("cpu") if default.type == "meta" else default)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        device = fn(torch.empty(0, device=self._tensor.device)).device
        if device.type != "meta":
            self._tensor = _scalar(self.value, device)
        return super()._apply(fn, recurse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self._tensor

    @property
    def tensor(self) -> torch.Tensor:
        """The number as a zero-dimensional tensor, for use in compiled code."""
        return self._tensor

    def rms_bound(self, rms_in: float) -> float:
        return abs(self.value) * rms_in

    def extra_repr(self) -> str:
        return f"{self.value:.6g}"


def _scalar(value: float, device: torch.device) -> torch.Tensor:
    # fp64 costs nothing in one element: it never promotes a tensor that has dimensions.
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.full((), value, dtype=dtype, device=device)


def factor(value: float) -> nn.Module:
    """A module that multiplies by `value`: `nn.Identity` if it is 1, else a `ConstantScale`."""
    return nn.Identity() if value == 1.0 else ConstantScale(value)


class LearnedScale(nn.Module):
    """Multiplies by a learned vector, reparametrised as in nGPT: value = weight · init / scaling, weight = scaling.

    The vector starts at `init`, its parameter at `scaling`. An optimiser whose steps have a fixed size (Adam) changes
    the vector by a relative `1/scaling` a step, so `scaling` sets its effective learning rate. If `scaling` is left out
    it equals `init`, and the parameter is the vector itself.
    """

    def __init__(self, dim: int | tuple[int, ...], init: float = 1.0, scaling: float | None = None):
        super().__init__()
        self.init, self.scaling = init, init if scaling is None else scaling
        self.weight = nn.Parameter(torch.empty(dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.scaling)

    def value(self) -> torch.Tensor:
        """The vector that inputs are multiplied by."""
        weight = widen(self.weight)
        return weight if self.init == self.scaling else weight * (self.init / self.scaling)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (widen(x) * self.value()).to(x.dtype)

    def rms_bound(self, rms_in: float) -> float:
        return float(self.value().detach().abs().max()) * rms_in

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, init={self.init:.4g}, scaling={self.scaling:.4g}"


class BoundedSequential(nn.Sequential):
    """An `nn.Sequential` whose `rms_bound` is that of its modules, one after the other."""

    def rms_bound(self, rms_in: float) -> float:
        for part in self:
            rms_in = rms_bound_of(part, rms_in)
        return rms_in


def channel_factor(part: nn.Module | None) -> torch.Tensor | None:
    """The vector or number that a module multiplies channels by; None for a module that does anything else.

    Such a factor can be folded into the rows of the matrix before it, which are far fewer than activations.
    """
    if isinstance(part, LearnedScale):
        return part.value()
    if isinstance(part, ConstantScale):
        return part.tensor
    factors = [channel_factor(link) for link in part] if isinstance(part, BoundedSequential) else []
    known = [factor for factor in factors if factor is not None]
    return torch.stack(torch.broadcast_tensors(*known)).prod(0) if known and len(known) == len(factors) else None


def tensor_of(constant: nn.Module) -> torch.Tensor | None:
    """The constant that a module multiplies by, as a kernel's argument; None for 1."""
    return constant.tensor if isinstance(constant, ConstantScale) else None
