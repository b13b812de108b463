"""The fused steps that `normlab bench kernels` measures, and how many tensors an ideal kernel of each moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normlab.kernels.dual import dual_step
from normlab.kernels.dynamic_streams import DynamicRead, dynamic_step
from normlab.kernels.geodesic import geodesic_pair
from normlab.kernels.lerp import sphere_lerp_pair
from normlab.kernels.normalised_projection import normalised_projection
from normlab.kernels.residual import Affine, residual_step
from normlab.kernels.sinkhorn import sinkhorn
from normlab.kernels.streams import read_streams, write_and_read_streams, write_streams

Shape = tuple[int, int]
"""(tokens, width)"""

Outputs = tuple[Tensor, ...]
"""What a step returns: the next state, and the next branch's input if it computes that."""

_N = 4
"""Residual streams of the cases with several, as in published models."""
_ROUNDS = 20
"""Rounds of Sinkhorn's algorithm, likewise."""


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
    numbers: tuple[int, int] = (0, 0)
    """Numbers in fp32 that are moved for each token beside those tensors, forward and backward."""

    def bytes_moved(self, shape: Shape, dtype: torch.dtype) -> dict[str, int]:
        """Bytes that an ideal kernel reads and writes, by direction."""
        rows, dim = shape
        tensors = {"forward": self.forward, "backward": self.backward}
        small = dict(zip(tensors, self.numbers, strict=True))
        return {way: rows * (count * dim * dtype.itemsize + small[way] * 4) for way, count in tensors.items()}

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


def _logits(rows: int, outputs: int):
    """RMSNorm and linear map of all streams of a token together (1 row) or of each of them (n rows)."""

    def build(shape: Shape, device: torch.device):
        width = _N * shape[1] // rows
        weight = (torch.randn(outputs, width, device=device) * 0.02).requires_grad_()

        def step(x: Tensor, g: Tensor, kernels: str) -> Outputs:
            flat, found = normalised_projection(x.view(-1, rows, width), weight, 1e-6, kernels=kernels)
            return flat.view(x.shape), found

        return step, [weight]

    return build


def _dynamic(together: bool):
    """A whole step with logits of all streams of a token together (mhc), or of each of them (hc)."""

    def build(shape: Shape, device: torch.device):
        post, comb = _coefficients((shape[0], _N), (shape[0], _N, _N), device=device)
        size = (_N * (_N + 2), _N * shape[1]) if together else (_N + 2, shape[1])
        weight = (torch.randn(size, device=device) * 0.02).requires_grad_()
        gain, (scale, base) = _gain(shape[1], device), _coefficients((_N,), (_N,), device=device)
        norm = Affine("rms", gain, None, 1e-6)
        read = DynamicRead(weight, 1e-6, scale, base, "sigmoid" if together else "tanh", inside=together)

        def step(x: Tensor, g: Tensor, kernels: str) -> Outputs:
            return dynamic_step(x, g, post, comb, read, norm, kernels=kernels)

        return step, [gain, post, comb, weight, scale, base]

    return build


def _sinkhorn(shape: Shape, device: torch.device):
    logits = torch.randn(shape[0], _N, _N, device=device, requires_grad=True)
    return lambda x, g, kernels: (sinkhorn(logits, _ROUNDS, 1e-6, kernels=kernels),), [logits]


def _stream_coefficients(shape: Shape, device: torch.device):
    weight = (torch.randn(_N * (_N + 2), _N * shape[1], device=device) * 0.02).requires_grad_()
    base = torch.zeros(_N * (_N + 2), device=device, requires_grad=True)
    scales = [torch.ones((), device=device, requires_grad=True) for _ in range(3)]

    def step(x: Tensor, g: Tensor, kernels: str) -> Outputs:
        flat, found = normalised_projection(x.flatten(-2), weight, 1e-6, kernels=kernels)
        sizes = (_N, _N, _N * _N)
        factors = torch.cat([scale.expand(size) for scale, size in zip(scales, sizes, strict=True)])
        pre, post, comb = (factors * found + base).split(sizes, dim=-1)
        mixing = sinkhorn(comb.unflatten(-1, (_N, _N)), _ROUNDS, 1e-6, kernels=kernels)
        return flat.view(x.shape), pre.sigmoid() + 1e-6, 2.0 * post.sigmoid(), mixing

    return step, [weight, base, *scales]


CASES = (
    Case("geodesic step", _geodesic, 3, 6),
    Case("add + norm (pre)", _residual("read"), 4, 4),
    Case("norm of sum (post)", _residual("write"), 3, 5),
    Case("norm-add-norm (peri)", _residual("shape", "read"), 4, 6),
    Case("norm of sum + norm (keel)", _residual("write", "read"), 4, 5),
    Case("spherical lerp (ngpt)", _lerp, 3, 6),
    Case("two streams (dual)", _dual, 5, 8, streams=2),
    Case("4 streams, write + norm (hc static)", _static_streams, 10, 15, streams=_N),
    # 20 coefficients of the write come in and 24 logits go out; backward both, and the gradients of both.
    Case("4 streams, write + coefficients + norm (mhc)", _dynamic(True), 10, 24, streams=_N, numbers=(44, 88)),
    Case("4 streams, write + coefficients + norm (hc)", _dynamic(False), 10, 24, streams=_N, numbers=(44, 88)),
    Case("4 streams, write (mhc)", _write_streams, 9, 14, streams=_N),
    Case("4 streams, sum + norm (mhc)", _read_streams, 5, 13, streams=_N),
    # The state is read, and backward its gradient read and written; a row's result and inverse RMS are small.
    Case("4 streams, logits (mhc)", _logits(1, 24), 4, 12, streams=_N, numbers=(25, 49)),
    Case("4 streams, logits (hc)", _logits(_N, 6), 4, 12, streams=_N, numbers=(28, 52)),
    Case("4 streams, Sinkhorn (mhc)", _sinkhorn, 0, 0, streams=_N, numbers=(32, 48)),
    Case("4 streams, coefficients (mhc)", _stream_coefficients, 4, 12, streams=_N, numbers=(49, 73)),
    Case("RMSNorm", _norm("rms"), 2, 4),
    Case("LayerNorm", _norm("layer"), 2, 4),
)
