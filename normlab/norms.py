"""Norm functions: what a scheme places. Every one works on the last dimension and returns its input's type.

Statistics, gain and bias are applied in fp32 (fp64 for fp64 input) and the result is cast once at the end: squares of
fp16 activations overflow above 255, and a cast before the gain multiplies rounding errors by it.

Gains are created in fp32 whatever the default type, because a bf16 gain at 1.0 cannot move by less than 2^-8 and stays
there for a whole run. Whoever trains in pure bf16 takes `gain="offset"`: the parameter is then the distance from one.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import nn

from normlab.errors import NormLabError, unknown

Gain = Literal["plain", "offset", "none"]


def widen(x: torch.Tensor) -> torch.Tensor:
    """`x` in the type that arithmetic is done in: fp32 for half precision, unchanged otherwise."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def rms(x: torch.Tensor) -> torch.Tensor:
    """Root mean square over the last dimension, kept as a dimension of one."""
    return widen(x).square().mean(-1, keepdim=True).sqrt()


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / √(mean x² + eps), without gain, in the widened type."""
    x = widen(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def layer_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """(x − mean x) / √(var x + eps), without gain, in the widened type."""
    x = widen(x)
    return rms_norm(x - x.mean(-1, keepdim=True), eps)


def l2_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / √(Σ x² + eps²): unit length; smooth at zero, where a plain division gives NaN."""
    x = widen(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps**2)


class Norm(nn.Module):
    """Gain ⊙ core(x) + bias. A subclass gives the core and the largest RMS that the core can return."""

    def __init__(self, dim: int, *, eps: float = 1e-6, gain: Gain = "plain", bias: bool = False, init: float = 1.0):
        super().__init__()
        if dim < 1:
            raise NormLabError(f"{type(self).__name__}: width must be at least 1, got {dim}")
        if eps < 0:
            raise NormLabError(f"{type(self).__name__}: eps must not be negative, got {eps}")
        if gain not in ("plain", "offset", "none"):
            raise unknown("gain", str(gain), ("plain", "offset", "none"))
        self.dim, self.eps, self.init = dim, eps, init
        self.offset = gain == "offset"
        self.weight = None if gain == "none" else nn.Parameter(torch.empty(dim, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(dim, dtype=torch.float32)) if bias else None
        self.add_parameters()
        self.reset_parameters()

    def add_parameters(self) -> None:
        """Parameters beyond gain and bias."""

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, self.init - 1.0 if self.offset else self.init)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def scale(self) -> torch.Tensor | None:
        """The gain that multiplies: the parameter, or one plus it."""
        if self.weight is None:
            return None
        return widen(self.weight) + 1.0 if self.offset else widen(self.weight)

    def core(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.core(x)
        gain = self.scale()
        if gain is not None:
            y = y * gain
        if self.bias is not None:
            y = y + widen(self.bias)
        return y.to(x.dtype)

    def core_bound(self, rms_in: float) -> float:
        """Largest RMS that `core` returns for an input of RMS at most `rms_in`."""
        raise NotImplementedError

    def rms_bound(self, rms_in: float) -> float:
        """Largest RMS of the output: needs no data, only the gain and the bias as they are now."""
        gain, bound = self.scale(), self.core_bound(rms_in)
        if gain is not None:
            bound *= float(gain.detach().abs().max())
        if self.bias is not None:
            bound += float(rms(self.bias.detach()))
        return bound

    def extra_repr(self) -> str:
        gain = "none" if self.weight is None else "offset" if self.offset else "plain"
        return f"{self.dim}, eps={self.eps}, gain={gain}, bias={self.bias is not None}"


class RMSNorm(Norm):
    """γ ⊙ x / √(mean x² + eps)."""

    def core(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.eps)

    def core_bound(self, rms_in: float) -> float:
        return 1.0


class LayerNorm(Norm):
    """γ ⊙ (x − mean x) / √(var x + eps) + b."""

    def core(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.eps)

    def core_bound(self, rms_in: float) -> float:
        return 1.0


class L2Norm(Norm):
    """γ ⊙ x / ‖x‖."""

    def core(self, x: torch.Tensor) -> torch.Tensor:
        return l2_norm(x, self.eps)

    def core_bound(self, rms_in: float) -> float:
        return 1.0 / math.sqrt(self.dim)


class Identity(Norm):
    """γ ⊙ x: nothing is normalised, so that "no norm" can be placed like any other."""

    def core(self, x: torch.Tensor) -> torch.Tensor:
        return widen(x)

    def core_bound(self, rms_in: float) -> float:
        return rms_in


class DyT(Norm):
    """γ ⊙ tanh(αx) + b: bounded like a norm, but not invariant to the size of its input."""

    slope: ClassVar[float] = 0.5

    def add_parameters(self) -> None:
        self.alpha = nn.Parameter(torch.empty(1, dtype=torch.float32))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.alpha, self.slope)

    def core(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(widen(self.alpha) * widen(x))

    def core_bound(self, rms_in: float) -> float:
        return 1.0


class Derf(DyT):
    """γ ⊙ erf(αx + s) + b (arXiv 2512.10938)."""

    def add_parameters(self) -> None:
        super().add_parameters()
        self.shift = nn.Parameter(torch.empty(1, dtype=torch.float32))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.shift)

    def core(self, x: torch.Tensor) -> torch.Tensor:
        return torch.erf(widen(self.alpha) * widen(x) + widen(self.shift))


NORMS: dict[str, type[Norm]] = {
    "rms": RMSNorm,
    "layer": LayerNorm,
    "l2": L2Norm,
    "dyt": DyT,
    "derf": Derf,
    "identity": Identity,
}


def norm(kind: str, dim: int, **options) -> Norm:
    """A norm by name: `norm("layer", 768, bias=True)`."""
    if kind not in NORMS:
        raise unknown("norm", kind, NORMS)
    return NORMS[kind](dim, **options)
