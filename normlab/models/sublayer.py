"""`Sublayer`: base class of attention and MLP, with slots for a scheme's modules, and dtype helpers."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from normlab.errors import NormLabError, unknown
from normlab.norms import autocast_dtype, widen
from normlab.schemes.contract.blocks import has_hooks, own_hooks
from normlab.schemes.contract.site import Kind


class Sublayer(nn.Module):
    """A branch F of x + F(x), with named slots for the norms and scales that a scheme puts inside it.

    The slot `q-norm` is the attribute `q_norm`; an empty slot is None.
    """

    branch_kind: Kind | None = None
    """Whether this is attention or an MLP; None: by its place in the block."""

    offers: frozenset[str] = frozenset()
    """Names of the slots."""

    kernels: str = "reference"
    """Which kernels to use: auto, reference or triton; set by the model."""

    @property
    def casts_input(self) -> bool:
        """Whether the input goes to one linear layer alone, which casts it under autocast."""
        return False

    def accept(self, need: str, module: nn.Module | float) -> None:
        """Put `module` into the slot `need`; raises if it is filled already."""
        name = type(self).__name__
        if need not in self.offers:
            raise unknown(f"slot of {name}", need, self.offers)
        if getattr(self, _attribute(need)) is not None:
            raise NormLabError(f"{name}: slot {need!r} is already filled; expected one scheme to fill it, once")
        self._check_filling(need, module)
        setattr(self, _attribute(need), module)

    def _check_filling(self, need: str, module: nn.Module | float) -> None:
        if not isinstance(module, nn.Module):
            raise NormLabError(f"slot {need!r} holds {module!r}; expected an nn.Module; try nn.RMSNorm(width)")


def through(slot: nn.Module | None, x: torch.Tensor) -> torch.Tensor:
    """Apply the module in a slot to x; an empty slot returns x."""
    return x if slot is None else slot(x)


def project(x: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
    """linear(x) in the weight's dtype, so that an fp32 residual stream works with bf16 weights.

    Under autocast the linear layer casts by itself.
    """
    if autocast_dtype(x) is None:
        x = x.to(linear.weight.dtype)
    return linear(x)


def scale_rows(weight: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Scale the output rows of a weight or bias by `factor`, a scalar or a vector."""
    across = factor if factor.ndim == 0 else factor.view(-1, *(1,) * (weight.ndim - 1))
    return (widen(weight) * across).to(weight.dtype)


def is_plain(linear: nn.Module) -> bool:
    """Whether a module is an unmodified `nn.Linear`: no hooks, no replaced forward, no tensor subclass as weight."""
    if type(linear) is not nn.Linear or "forward" in vars(linear) or is_traceable_wrapper_subclass(linear.weight):
        return False
    return not has_hooks(linear)


def runs_as_written(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module runs the `forward` of `kind` and nothing else.

    Not a subclass's own, nor one put in its place (some LoRAs), nor hooks, which may look at the input or change it.
    """
    return type(module).forward is kind.forward and not own_hooks(module)


def product_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """The dtype in which `project` multiplies x and weight, for products that autocast does not cover."""
    # Like autocast, leave float64 alone.
    if weight.dtype == torch.float64:
        return weight.dtype
    return autocast_dtype(x) or weight.dtype


def check_positive(owner: str, **sizes: int) -> None:
    """Raise for a size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise NormLabError(f"{owner}: {name} is {size}; expected a positive whole number")


def _attribute(need: str) -> str:
    return need.replace("-", "_")
