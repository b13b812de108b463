"""The fused steps that `normlab bench kernels` measures, and how many tensors an ideal kernel of each moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normlab.kernels.dual import dual_step
from normlab.kernels.geodesic import geodesic_pair
from normlab.kernels.lerp import sphere_lerp_pair
from normlab.kernels.residual import Affine, residual_step
from normlab.kernels.streams import read_streams, write_and_read_streams, write_streams

Shape = tuple[int, int]
"""(tokens, width)"""

Outputs = tuple[Tensor, ...]
"""What a step returns: the next state, and the next branch's input if it computes that."""

_N = 4
"""Residual streams of the cases with several, as in published models."""


@dataclass(frozen=True)
class Case:
    """One fused step, and the number of tensors that an ideal kernel reads and writes."""

    name: str
    build: Callable[[Shape, torch.device], tuple[Callable[[Tensor, Tensor, str], Outputs], list[Tensor]]]
    """Returns (function of state, update and kernels; its parameters)."""
    forward: int
    backward: int
    streams: int = 1
    """Residual streams: the state has as many times the size of the update, in whose size traffic is counted."""

    def inputs(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A random state and update."""
        rows, dim = shape
        state = (rows, dim) if self.streams == 1 else (rows, self.streams, dim)
        x, g = (torch.randn(size, device=device).to(dtype).requires_grad_() for size in (state, shape))
        return x, g


def _gain(dim: int, device: torch.device) -> Tensor:
    return torch.ones(dim, device=device, requires_grad=True)


def _residual(*places: str):
    def build(shape: Shape, device: torch.device):
        affines: dict[str, Any] = {name: Affine("rms", _gain(shape[1], device), None, 1e-6) for name in places}
        gains = [affine.gain for affine in affines.values() if affine.gain is not None]
        return lambda x, g, kernels: residual_step(x, g, **affines, kernels=kernels), gains

    return build


def _geodesic(shape: Shape, device: torch.device):
    a, b = torch.ones(1, device=device, requires_grad=True), torch.zeros(1, device=device, requires_grad=True)
    factor = torch.full((), 0.5, device=device)
    return lambda x, g, kernels: geodesic_pair(x, g, factor, 0.785, a=a, b=b, kernels=kernels), [a, b]


def _lerp(shape: Shape, device: torch.device):
    alpha = torch.full((shape[1],), 0.05, device=device, requires_grad=True)
    return lambda h, g, kernels: sphere_lerp_pair(h, g, alpha, 1e-6, kernels=kernels), [alpha]


def _dual(shape: Shape, device: torch.device):
    gain = _gain(shape[1], device)
    norm = Affine("rms", gain, None, 1e-6)
    return lambda x, g, kernels: dual_step(x, g, norm, kernels=kernels), [gain]


def _norm(kind: str):
    def build(shape: Shape, device: torch.device):
        gain = _gain(shape[1], device)
        norm = Affine(kind, gain, None, 1e-6)
        return lambda x, g, kernels: residual_step(x, None, read=norm, kernels=kernels), [gain]

    return build


def _coefficients(*shapes: tuple[int, ...], device: torch.device) -> list[Tensor]:
    # Away from zero: a token whose weights nearly vanish has a norm that magnifies the roundings of a peer which stores
    # the sum and its gradient in half precision between two kernels (Liger); speed does not depend on values.
    return [(torch.rand(shape, device=device) + 0.5).requires_grad_() for shape in shapes]


def _static_streams(shape: Shape, device: torch.device):
    gain = _gain(shape[1], device)
    post, comb, pre = _coefficients((_N,), (_N, _N), (_N,), device=device)
    norm = Affine("rms", gain, None, 1e-6)

    def step(x: Tensor, g: Tensor, kernels: str) -> Outputs:
        return write_and_read_streams(x, g, post, comb, pre, norm, kernels=kernels)

    return step, [gain, post, comb, pre]


def _write_streams(shape: Shape, device: torch.device):
    post, comb = _coefficients((shape[0], _N), (shape[0], _N, _N), device=device)
    return lambda x, g, kernels: (write_streams(x, g, post, comb, kernels=kernels),), [post, comb]


def _read_streams(shape: Shape, device: torch.device):
    gain, (pre,) = _gain(shape[1], device), _coefficients((shape[0], _N), device=device)
    norm = Affine("rms", gain, None, 1e-6)
    return lambda x, g, kernels: read_streams(x, pre, norm, kernels=kernels), [gain, pre]


CASES = (
    Case("geodesic step", _geodesic, 3, 6),
    Case("add + norm (pre)", _residual("read"), 4, 4),
    Case("norm of sum (post)", _residual("write"), 3, 5),
    Case("norm-add-norm (peri)", _residual("shape", "read"), 4, 6),
    Case("norm of sum + norm (keel)", _residual("write", "read"), 4, 5),
    Case("spherical lerp (ngpt)", _lerp, 3, 6),
    Case("two streams (dual)", _dual, 5, 8, streams=2),
    Case("4 streams, write + norm (hc static)", _static_streams, 10, 15, streams=_N),
    Case("4 streams, write (mhc)", _write_streams, 9, 14, streams=_N),
    Case("4 streams, sum + norm (mhc)", _read_streams, 5, 13, streams=_N),
    Case("RMSNorm", _norm("rms"), 2, 4),
    Case("LayerNorm", _norm("layer"), 2, 4),
)
