"""Recognise gated residual additions of any implementation by what they compute, and use them in blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from normlab.hf.conversion.foreign_norm import as_trial
from normlab.schemes.contract.parts import Write

_AGREE = 1e-4
_LEAST = 1e-3
"""Smallest 1 − t² that is compared: implementations bound it from below, each in its way."""


@dataclass(frozen=True)
class GateOptions:
    """What a gate t = σ(b/T) keeps of the state, and its temperature T, as options of a scheme."""

    keep: Literal["complement", "variance"]
    temperature: float


class ModelGate(Write):
    """Wrapper of a model's own gated addition, a module of (state, update), for use in a NormLab block."""

    def __init__(self, gate: nn.Module):
        super().__init__()
        self.gate = gate

    def forward(self, state: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return self.gate(state, update).to(state.dtype)

    @torch.no_grad()
    def rms_bound(self, state: float, update: float) -> float:
        """By the triangle inequality."""
        logits = next(self.gate.parameters())
        one, none = torch.ones_like(logits), torch.zeros_like(logits)
        kept, taken = self.gate(one, none), self.gate(none, one)
        return float(kept.abs().max()) * state + float(taken.abs().max()) * update


def recognise_gate(module: nn.Module) -> GateOptions | None:
    """Options of a module that adds an update by one gate for each channel; None if the module does anything else."""
    own = list(module.parameters())
    if len(own) != 1 or own[0].ndim != 1:
        return None
    with torch.device("cpu"), torch.no_grad():
        trial = as_trial(module)
        logits = next(trial.parameters())
        x, f = torch.randn(2, 3, logits.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        kept, taken = _output(trial, torch.ones_like(x), 0 * x), _output(trial, 0 * x, torch.ones_like(x))
        if kept is None or taken is None or not bool(((taken > 0) & (taken < 1)).all()):
            return None
        temperature = float((logits / torch.logit(taken)).median())
        joint = _output(trial, x, f)
        gate = torch.sigmoid(logits / temperature)
        if joint is None or not (_same(taken, gate.expand_as(taken)) and _same(joint, kept * x + taken * f)):
            return None
        return next(
            (GateOptions(keep, _stated(module, temperature)) for keep, form in _forms(gate) if _same(kept, form)), None
        )


def _forms(gate: torch.Tensor) -> list[tuple[Literal["complement", "variance"], torch.Tensor]]:
    """What each kind of gate keeps of the state."""
    return [("complement", 1.0 - gate), ("variance", (1.0 - gate.square()).clamp(min=_LEAST).sqrt())]


def _stated(module: nn.Module, estimate: float) -> float:
    """The float attribute of a module that an estimate stands for, or the estimate itself."""
    own = (value for part in module.modules() for value in vars(part).values() if isinstance(value, float))
    return next((value for value in own if abs(value - estimate) <= 1e-3 * estimate), float(f"{estimate:.3g}"))


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected.expand_as(found), rtol=_AGREE, atol=_AGREE)


def _output(trial: nn.Module, *inputs: torch.Tensor) -> torch.Tensor | None:
    try:
        found: Any = trial(*inputs)
    except Exception:
        # A module that does not accept two tensors is no gate.
        return None
    return found.float() if isinstance(found, torch.Tensor) and found.shape == inputs[0].shape else None
