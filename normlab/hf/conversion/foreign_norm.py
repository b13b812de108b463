"""The norms of other people's models: recognised by what they do, used in our steps as they are."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from normlab import norms
from normlab.norms import Gain

_HALF = (torch.float16, torch.bfloat16)
_AGREE = 1e-4
"""Relative difference up to which two norms are the same: both compute in fp32."""
_ANY_WIDTH = 8
"""Width at which a module is tried that has none of its own."""
_TINY = 1e-3
"""Size of the input that shows the epsilon: its mean square is about that of common epsilons."""


@dataclass(frozen=True)
class NormOptions:
    """A norm in the words of a scheme's options."""

    norm: Literal["rms", "layer"]
    eps: float
    gain: Gain
    bias: bool

    def matches(self, norm: norms.Norm) -> bool:
        """Whether a norm that a scheme made is of this kind."""
        gain = "none" if norm.weight is None else "offset" if norm.offset else "plain"
        made = (type(norm), norm.eps, gain, norm.bias is not None, norm.init)
        return made == (norms.NORMS[self.norm], self.eps, self.gain, self.bias, 1.0)

    def build(self, dim: int) -> norms.Norm:
        return norms.norm(self.norm, dim, eps=self.eps, gain=self.gain, bias=self.bias)


class ModelNorm(nn.Module):
    """A norm of the model's own, with its parameters and its arithmetic, at a place of our step.

    Our writes add in fp32 and norm the sum before they round it; the model rounded it first, and so does this.
    """

    def __init__(self, norm: nn.Module, options: NormOptions):
        super().__init__()
        self.norm, self.options = norm, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = next(self.norm.parameters(), None)
        return self.norm(x.to(weight.dtype) if weight is not None and weight.dtype in _HALF else x)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        gain, bias = _parameters(self.norm)
        if gain is not None:
            gain.fill_(0.0 if self.options.gain == "offset" else 1.0)
        if bias is not None:
            bias.zero_()

    @property
    def is_fresh(self) -> bool:
        """Whether its gain is what it was made with."""
        gain, _ = _parameters(self.norm)
        return gain is None or gain.is_meta or bool((gain == (0.0 if self.options.gain == "offset" else 1.0)).all())

    @torch.no_grad()
    def rms_bound(self, rms_in: float) -> float:
        """Largest RMS of what it returns."""
        gain, bias = _parameters(self.norm)
        largest = 1.0 if gain is None else float((gain.float() + (self.options.gain == "offset")).abs().max())
        return largest + (0.0 if bias is None else float(norms.rms(bias)))


def recognise(module: nn.Module, beside: nn.Module | None = None) -> NormOptions | None:
    """What norm a module is, found by feeding a copy of it; None if it is none of width two or more.

    A norm without a gain may still be of one width alone: then it is one that a module `beside` it has.
    """
    widths = _widths(module)
    if widths == [_ANY_WIDTH] and beside is not None:
        widths += sorted({size for parameter in beside.parameters() for size in parameter.shape})
    return next((found for dim in widths if dim > 1 and (found := _recognise(module, dim)) is not None), None)


def _recognise(module: nn.Module, dim: int) -> NormOptions | None:
    # On the CPU also where a model is being made without values: the copy has some.
    with torch.device("cpu"):
        trial = _trial(module)
        gain, bias = _parameters(trial)
        x = 3.0 * torch.randn(4, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float32) + 0.5
        for kind, form in _candidates(gain is not None):
            likeness = NormOptions(kind, 0.0, form, bias is not None).build(dim)
            if _behaves(trial, likeness, x, gain, bias):
                return NormOptions(kind, _epsilon(trial, likeness, x), form, bias is not None)
    return None


def _candidates(has_gain: bool) -> list[tuple[Literal["rms", "layer"], Gain]]:
    gains: list[Gain] = ["plain", "offset"] if has_gain else ["none"]
    return [(kind, gain) for kind in ("rms", "layer") for gain in gains]


def _behaves(
    trial: nn.Module, likeness: norms.Norm, x: torch.Tensor, gain: torch.Tensor | None, bias: torch.Tensor | None
) -> bool:
    with torch.no_grad():
        for mine, theirs in ((likeness.weight, gain), (likeness.bias, bias)):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)
        found = _output(trial, x)
        return found is not None and torch.allclose(found, likeness(x), rtol=_AGREE, atol=_AGREE)


def _epsilon(trial: nn.Module, likeness: norms.Norm, x: torch.Tensor) -> float:
    """The number of the module's own that explains how it shrinks a tiny input; else what that shrinkage says."""
    with torch.no_grad():
        shift = torch.zeros_like(x) if likeness.bias is None else likeness.bias
        centred = _TINY * (x - x.mean(-1, keepdim=True) if isinstance(likeness, norms.LayerNorm) else x)
        small, large = _output(trial, _TINY * x), likeness(x)
        assert small is not None
        kept = ((small - shift) / (large - shift)).double().nanmedian(-1).values
        eps = float((centred.double().square().mean(-1) * (kept**-2 - 1.0)).mean())
    own = (value for value in vars(trial).values() if isinstance(value, float))
    near = (value for value in own if abs(value - eps) <= 0.02 * abs(eps) + 1e-10)
    return next(near, float(f"{max(eps, 0.0):.2g}"))


def _output(trial: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    try:
        found: Any = trial(x)
    except Exception:
        # Other people's modules take what they like; one that does not take a tensor is no norm.
        return None
    return found.float() if isinstance(found, torch.Tensor) and found.shape == x.shape else None


def _trial(module: nn.Module) -> nn.Module:
    """A copy with gains of its own in fp32, also of a module that has no values yet."""
    trial = copy.deepcopy(module).to_empty(device="cpu").float()
    with torch.no_grad():
        for place, parameter in enumerate(trial.parameters()):
            parameter.copy_(torch.linspace(0.5, 1.5 + place, parameter.numel(), dtype=torch.float32))
    return trial.eval()


def _widths(module: nn.Module) -> list[int]:
    """Widths to try of a module that may be a norm: it has no parts, and at most a gain and a bias."""
    own = list(module.parameters())
    if next(module.children(), None) is not None or len(own) > 2 or any(one.ndim != 1 for one in own):
        return []
    stated = getattr(module, "normalized_shape", None)
    # Without a gain nothing says how wide it is: most such norms take any width.
    sizes = {one.numel() for one in own} or {tuple(stated)[-1] if stated else _ANY_WIDTH}
    return list(sizes) if len(sizes) == 1 else []


def _parameters(norm: nn.Module) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(gain, bias)."""
    named = dict(norm.named_parameters())
    bias = next((value for name, value in named.items() if name.endswith("bias")), None)
    return next((value for value in named.values() if value is not bias), None), bias
