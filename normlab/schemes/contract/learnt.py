"""Learnt parameters as a law takes them: one number a block.

A law moves tokens on a sphere and knows no channels, so a vector enters it as one number: a factor on what a branch
returns (γ of LayerScale, α of nGPT, the gain of an output norm) as its mean, which is the part of γ ⊙ u that points
along u, averaged over all directions of u; the gain of a norm on the main path as its root mean square, which is the
size that it gives the state. The network itself keeps its vectors: `normlab.dynamics.system.network`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from normlab.norms import Norm
from normlab.schemes.contract.blocks import Block
from normlab.schemes.contract.parts import LearnedScale


def first_steps(blocks: Iterable[Block]) -> list[Any]:
    """Attention's step in each block."""
    return [block.steps[0] for block in blocks]


def branch_factors(blocks: Iterable[Block]) -> list[float]:
    """Mean factor on what attention returns in each block: γ of a scale, or the gain of a norm behind the branch."""
    return [mean(_factor(step.shape)) for step in first_steps(blocks)]


def main_gains(blocks: Iterable[Block]) -> list[float]:
    """RMS gain of the last norm that the whole state passes in each block; one where there is none."""
    return [_gain([step.write for step in block.steps]) for block in blocks]  # type: ignore[misc]


def first_gains(blocks: Iterable[Block]) -> list[float]:
    """The same for attention's write alone."""
    return [_gain([step.write]) for step in first_steps(blocks)]


def mean(values: torch.Tensor) -> float:
    """In float64: parameters that are all alike have their own value as their mean."""
    return float(values.detach().double().mean())


def _gain(writes: Sequence[nn.Module]) -> float:
    norms = [norm for write in writes if isinstance(norm := getattr(write, "norm", None), Norm)]
    return mean(_factor(norms[-1]).square()) ** 0.5 if norms else 1.0


def _factor(part: nn.Module) -> torch.Tensor:
    """What a part multiplies channels by, apart from normalising."""
    factor = part.value() if isinstance(part, LearnedScale) else part.scale() if isinstance(part, Norm) else None
    return torch.ones(1) if factor is None else factor.detach().double()
