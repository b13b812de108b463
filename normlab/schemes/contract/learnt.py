"""Learned parameters of trained blocks, reduced to one number per block for use in a `Law`.

A law describes tokens on a sphere and has no channels, so each learned vector becomes one number. A factor on a
branch's output (γ of LayerScale, α of nGPT, the gain of an output norm) becomes its mean: the component of γ ⊙ u along
u, averaged over all directions of u. The gain of a norm on the main path becomes its root mean square: the RMS that it
gives the state. The simulated network itself keeps its vectors (`normlab.dynamics.system.network`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from normlab.norms import Norm
from normlab.schemes.contract.blocks import Block
from normlab.schemes.contract.scales import LearnedScale


def first_steps(blocks: Iterable[Block]) -> list[Any]:
    """The first step (attention's) of each block."""
    return [block.steps[0] for block in blocks]


def branch_factors(blocks: Iterable[Block]) -> list[float]:
    """For each block, the mean factor on attention's output: γ of a scale, or the gain of an output norm."""
    return [mean(_factor(step.shape)) for step in first_steps(blocks)]


def main_gains(blocks: Iterable[Block]) -> list[float]:
    """For each block, the RMS gain of the last norm on the main path; 1 if there is none."""
    return [_gain([step.write for step in block.steps]) for block in blocks]  # type: ignore[misc]


def first_gains(blocks: Iterable[Block]) -> list[float]:
    """For each block, the RMS gain of the norm in attention's write; 1 if there is none."""
    return [_gain([step.write]) for step in first_steps(blocks)]


def mean(values: torch.Tensor) -> float:
    """Mean in float64, so that the mean of equal values is exactly that value."""
    return float(values.detach().double().mean())


def _gain(writes: Sequence[nn.Module]) -> float:
    norms = [norm for write in writes if isinstance(norm := getattr(write, "norm", None), Norm)]
    return mean(_factor(norms[-1]).square()) ** 0.5 if norms else 1.0


def _factor(part: nn.Module) -> torch.Tensor:
    """The factor that a scale or a norm multiplies channels by; 1 for other modules."""
    factor = part.value() if isinstance(part, LearnedScale) else part.scale() if isinstance(part, Norm) else None
    return torch.ones(1) if factor is None else factor.detach().double()
