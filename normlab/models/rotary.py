"""Rotary position embedding (RoPE): rotate each pair of channels by an angle proportional to the position.

Formula    (a, b) ← (a cos φ - b sin φ, b cos φ + a sin φ),  φ = position · θ^(-2i/d) for pair i of head_dim/2
Pairs      channel i with channel i + head_dim/2 (Llama's half-split convention, not GPT-J's neighbours)
Source     arXiv 2104.09864
Law        an orthogonal map; scores depend on positions only through their difference
"""

from __future__ import annotations

import torch

from normlab.errors import NormLabError
from normlab.kernels.rotary import Table, rotate

__all__ = ["Table", "check_rotary", "rotary_table", "rotate"]


def rotary_table(
    positions: torch.Tensor, head_dim: int, theta: float = 10_000.0, dtype: torch.dtype = torch.float32
) -> Table:
    """Cosines and sines of positions (T,) or (B, T), computed in every call: the meta device would lose a buffer."""
    check_rotary(head_dim, theta)
    return torch.ops.normlab.rotary_table(positions, head_dim, theta, dtype)


def check_rotary(head_dim: int, theta: float) -> None:
    """Raise for a head width that is odd or below 2, or a theta that is not positive."""
    if head_dim < 2 or head_dim % 2:
        raise NormLabError(f"rotary: head_dim is {head_dim}; expected an even number; try {head_dim + head_dim % 2}")
    if not theta > 0:
        raise NormLabError(f"rotary: theta is {theta}; expected a positive number; try 10000")


# A custom operator, because torch.compile would otherwise recompute these fp64 cosines for every element of every query
# and key, forward and backward, and not once.
@torch.library.custom_op("normlab::rotary_table", mutates_args=())
def _table(
    positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    # In fp32 the angle at position 100,000 is wrong by up to 0.004; rounding the cosines to `dtype` is harmless.
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    pair = torch.arange(head_dim // 2, device=positions.device, dtype=exact)
    angles = positions.to(exact).unsqueeze(-1) * theta ** (-2 * pair / head_dim)
    both_halves = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
    return both_halves.cos().to(dtype), both_halves.sin().to(dtype)


@_table.register_fake
def _(positions, head_dim, theta, dtype):
    shape = (*positions.shape, 1, head_dim)
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)
