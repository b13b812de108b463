"""Recognise norm layers (RMSNorm, LayerNorm) of any implementation by what they compute, and use them in blocks."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from normlab import norms
from normlab.norms import Gain

_HALF = (torch.float16, torch.bfloat16)
_AGREE = 1e-4
"""Relative tolerance for equal norms; both compute in fp32."""
_ANY_WIDTH = 8
"""Width at which modules without parameters are tried."""
_TINY = 1e-3
"""Scale of the input that reveals epsilon: its mean square is similar to common epsilons."""


@dataclass(frozen=True)
class NormOptions:
    """Kind, epsilon, gain and bias of a norm, as options of a scheme."""

    norm: Literal["rms", "layer"]
    eps: float
    gain: Gain
    bias: bool
    input_gain: Gain = "none"
    """Gain on the norm's input (Muse Spark): a scale of what is normalised, no option of a scheme."""

    def scheme_options(self) -> dict[str, Any]:
        """The options by their names in a scheme."""
        return {"norm": self.norm, "eps": self.eps, "gain": self.gain, "bias": self.bias}

    def matches(self, norm: norms.Norm) -> bool:
        """Whether a NormLab norm has these options and initial gain 1."""
        gain = "none" if norm.weight is None else "offset" if norm.offset else "plain"
        made = (type(norm), norm.eps, gain, norm.bias is not None, norm.init)
        return made == (norms.NORMS[self.norm], self.eps, self.gain, self.bias, 1.0)

    def serves(self, norm: norms.Norm, usual: NormOptions) -> bool:
        """Whether such a norm can take the place of one that was built with the `usual` options of its model.

        It may have another epsilon, and its gain another form.
        """
        alike = (self.norm, self.gain == "none", self.bias) == (usual.norm, norm.weight is None, norm.bias is not None)
        expected = dataclasses.replace(usual, gain="none" if norm.weight is None else usual.gain, bias=self.bias)
        return alike and expected.matches(norm)

    def build(self, dim: int) -> norms.Norm:
        return norms.norm(self.norm, dim, eps=self.eps, gain=self.gain, bias=self.bias)


class ModelNorm(nn.Module):
    """Wrapper of a model's own norm for use in a NormLab block.

    NormLab adds in fp32 and normalises the sum before rounding; the original model rounds first, and so does this.
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
            gain.fill_(self._neutral)
        if bias is not None:
            bias.zero_()

    @property
    def is_fresh(self) -> bool:
        """Whether the gain has its initial value."""
        gain, _ = _parameters(self.norm)
        return gain is None or gain.is_meta or bool((gain == self._neutral).all())

    @property
    def _neutral(self) -> float:
        """The gain's value that changes nothing."""
        return 0.0 if "offset" in (self.options.gain, self.options.input_gain) else 1.0

    @torch.no_grad()
    def rms_bound(self, rms_in: float) -> float:
        """Largest RMS of the output."""
        gain, bias = _parameters(self.norm)
        largest = (
            1.0
            if gain is None or self.options.gain == "none"
            else float((gain.float() + (self.options.gain == "offset")).abs().max())
        )
        return largest + (0.0 if bias is None else float(norms.rms(bias)))


def recognise_norm(module: nn.Module, beside: nn.Module | None = None) -> NormOptions | None:
    """Return the options of a norm module, found by running a copy of it; None if it is no norm of width ≥ 2.

    A norm without a gain may still work at one width only: sizes of parameters of `beside` are tried.
    """
    widths = _widths(module)
    if widths == [_ANY_WIDTH] and beside is not None:
        widths += sorted({size for parameter in beside.parameters() for size in parameter.shape})
    return next((found for dim in widths if dim > 1 and (found := _recognise(module, dim)) is not None), None)


def _recognise(module: nn.Module, dim: int) -> NormOptions | None:
    # On the CPU even if the model is on the meta device: the copy has values.
    with torch.device("cpu"):
        trial = as_trial(module)
        gain, bias = _parameters(trial)
        x = 3.0 * torch.randn(4, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float32) + 0.5
        for kind, form in _candidates(gain is not None):
            likeness = NormOptions(kind, 0.0, form, bias is not None).build(dim)
            if _behaves(trial, likeness, x, gain, bias):
                return NormOptions(kind, _epsilon(trial, likeness, x), form, bias is not None)
        return None if gain is None or bias is not None else _with_input_gain(trial, gain, x)


def _with_input_gain(trial: nn.Module, gain: torch.Tensor, x: torch.Tensor) -> NormOptions | None:
    """Options of a norm that scales its input instead of its output; None if the module is no such norm."""
    forms: list[tuple[Gain, torch.Tensor]] = [("plain", gain.detach()), ("offset", 1.0 + gain.detach())]
    for (form, scale), (kind, none) in itertools.product(forms, _candidates(has_gain=False)):
        unscaled, likeness = _Unscaled(trial, scale), NormOptions(kind, 0.0, none, False).build(x.shape[-1])
        if _behaves(unscaled, likeness, x, None, None):
            return NormOptions(kind, _epsilon(unscaled, likeness, x), none, False, form)
    return None


class _Unscaled(nn.Module):
    """A module whose input is divided by a scale first."""

    def __init__(self, module: nn.Module, scale: torch.Tensor):
        super().__init__()
        self.module, self.scale = module, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x / self.scale)


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
    """Epsilon, estimated from the output for a tiny input, or the float attribute of the module nearest to it."""
    with torch.no_grad():
        shift = torch.zeros_like(x) if likeness.bias is None else likeness.bias
        centred = _TINY * (x - x.mean(-1, keepdim=True) if isinstance(likeness, norms.LayerNorm) else x)
        small, large = _output(trial, _TINY * x), likeness(x)
        assert small is not None
        kept = ((small - shift) / (large - shift)).double().nanmedian(-1).values
        eps = float((centred.double().square().mean(-1) * (kept**-2 - 1.0)).mean())
    own = (value for part in trial.modules() for value in vars(part).values() if isinstance(value, float))
    near = (value for value in own if abs(value - eps) <= 0.02 * abs(eps) + 1e-10)
    return next(near, float(f"{max(eps, 0.0):.2g}"))


def _output(trial: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    try:
        found: Any = trial(x)
    except Exception:
        # A module that does not accept a single tensor is no norm.
        return None
    return found.float() if isinstance(found, torch.Tensor) and found.shape == x.shape else None


def as_trial(module: nn.Module) -> nn.Module:
    """A copy in fp32 with distinct parameter values, also of a module on the meta device."""
    trial = copy.deepcopy(module).to_empty(device="cpu").float()
    with torch.no_grad():
        for place, parameter in enumerate(trial.parameters()):
            parameter.copy_(torch.linspace(0.5, 1.5 + place, parameter.numel(), dtype=torch.float32))
    return trial.eval()


def _widths(module: nn.Module) -> list[int]:
    """Widths to try; empty unless the module has no children and at most a gain and a bias."""
    own = list(module.parameters())
    if next(module.children(), None) is not None or len(own) > 2 or any(one.ndim != 1 for one in own):
        return []
    stated = getattr(module, "normalized_shape", None)
    # Without a gain the width is unknown; most such norms accept any width.
    sizes = {one.numel() for one in own} or {tuple(stated)[-1] if stated else _ANY_WIDTH}
    return list(sizes) if len(sizes) == 1 else []


def _parameters(norm: nn.Module) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(gain, bias)."""
    named = dict(norm.named_parameters())
    bias = next((value for name, value in named.items() if name.endswith("bias")), None)
    return next((value for value in named.values() if value is not bias), None), bias
