"""Norm layers: RMSNorm, LayerNorm, L2 norm, DyT, Derf. All work on the last dimension and keep the input's dtype.

Statistics, gain and bias are computed in fp32 (fp64 for fp64 input) and the result is cast once at the end: squares of
fp16 activations overflow above 255, and a cast before the gain multiplies rounding errors by the gain.

Gains are created in fp32 whatever the default dtype, because a bf16 gain of 1.0 cannot change by less than 2^-8 and
would stay there for a whole run. For training in pure bf16 use `gain="offset"`: the parameter is then the gain minus 1.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from normlab.errors import NormLabError, unknown

__all__ = [
    "NORMS",
    "Derf",
    "DyT",
    "Gain",
    "Identity",
    "L2Norm",
    "LayerNorm",
    "Norm",
    "RMSNorm",
    "l2_norm",
    "layer_norm",
    "norm",
    "rms",
    "rms_norm",
    "widen",
]

Gain = Literal["plain", "offset", "none"]
"""How a gain is stored: as it is, as an offset from 1, or not at all."""


def widen(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype used for arithmetic: fp32 for half precision, unchanged otherwise."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype that autocast casts x to; None if it is off or not available (the meta device)."""
    kind = x.device.type
    # By name: torch 2.11 cannot compile torch.amp.is_autocast_available.
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def rms(x: torch.Tensor) -> torch.Tensor:
    """Root mean square over the last dimension, which is kept with size 1."""
    return widen(x).square().mean(-1, keepdim=True).sqrt()


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / √(mean x² + eps), without gain, in the dtype of `widen`."""
    x = widen(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def layer_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """(x − mean x) / √(var x + eps), without gain, in the dtype of `widen`."""
    x = widen(x)
    return rms_norm(x - x.mean(-1, keepdim=True), eps)


def l2_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / √(Σ x² + eps²): unit length, smooth at zero, where x / ‖x‖ gives NaN."""
    x = widen(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps**2)


class Norm(nn.Module):
    """Base class of norms: gain ⊙ core(x) + bias. A subclass defines `core` and the bound on its RMS."""

    def __init__(self, dim: int, *, eps: float = 1e-6, gain: Gain = "plain", bias: bool = False, init: float = 1.0):
        super().__init__()
        if dim < 1:
            raise NormLabError(f"{type(self).__name__}: width must be at least 1, got {dim}")
        if not 0.0 <= eps < math.inf:
            raise NormLabError(f"{type(self).__name__}: eps must not be negative, and finite, got {eps}")
        if gain not in ("plain", "offset", "none"):
            raise unknown("gain", str(gain), ("plain", "offset", "none"))
        self.dim, self.eps, self.init = dim, eps, init
        self.offset = gain == "offset"
        self.weight = None if gain == "none" else nn.Parameter(torch.empty(dim, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(dim, dtype=torch.float32)) if bias else None
        self.add_parameters()
        self.reset_parameters()

    def add_parameters(self) -> None:
        """Create parameters other than gain and bias."""

    def reset_parameters(self) -> None:
        """Set all parameters to their initial values."""
        if self.weight is not None:
            nn.init.constant_(self.weight, self.init - 1.0 if self.offset else self.init)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def scale(self) -> torch.Tensor | None:
        """The gain: the parameter, or 1 plus it; None without a gain."""
        if self.weight is None:
            return None
        return widen(self.weight) + 1.0 if self.offset else widen(self.weight)

    def core(self, x: torch.Tensor) -> torch.Tensor:
        """The normalised input, without gain and bias."""
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
        """Largest RMS of the output for any input of RMS at most `rms_in`, from the current gain and bias."""
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
    """Root mean square norm: γ ⊙ x / √(mean x² + eps)."""

    def core(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.eps)

    def core_bound(self, rms_in: float) -> float:
        return 1.0


class LayerNorm(Norm):
    """Layer norm: γ ⊙ (x − mean x) / √(var x + eps) + b."""

    def core(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.eps)

    def core_bound(self, rms_in: float) -> float:
        return 1.0


class L2Norm(Norm):
    """Normalises to unit length: γ ⊙ x / ‖x‖."""

    def core(self, x: torch.Tensor) -> torch.Tensor:
        return l2_norm(x, self.eps)

    def core_bound(self, rms_in: float) -> float:
        return 1.0 / math.sqrt(self.dim)


class Identity(Norm):
    """γ ⊙ x: no normalisation, with the interface of a norm."""

    def core(self, x: torch.Tensor) -> torch.Tensor:
        return widen(x)

    def core_bound(self, rms_in: float) -> float:
        return rms_in


class DyT(Norm):
    """Dynamic tanh, γ ⊙ tanh(αx) + b: bounded like a norm, but not invariant to the scale of its input."""

    slope: ClassVar[float] = 0.5
    """Initial α."""

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
"""Norm classes by name."""


def norm(kind: str, dim: int, **options: Any) -> Norm:
    """Make a norm by name: `norm("layer", 768, bias=True)`."""
    if kind not in NORMS:
        raise unknown("norm", kind, NORMS)
    return NORMS[kind](dim, **options)
