"""The geodesic step (GeoNorm, arXiv 2601.22095): walk along the great circle through x that the update points at."""

from __future__ import annotations

import torch

from normlab import geometry
from normlab.norms import widen

SMOOTH = 1e-3
"""Below this angle the learned offset b fades in: b itself would make the map jump at a zero update."""

NO_STATE = 1e-12
"""A state shorter than this has no sphere to walk on and stays where it is."""


def geodesic_step(
    x: torch.Tensor,
    g: torch.Tensor,
    factor: torch.Tensor | float,
    max_angle: float,
    *,
    a: torch.Tensor | float | None = None,
    b: torch.Tensor | float | None = None,
    second_clamp: bool = True,
) -> torch.Tensor:
    """x' = cos θ · x + sin θ · ‖x‖ · v/‖v‖, with v the part of g across x, on the last dimension.

    θ = min(factor · (a · min(‖v‖/‖x‖, max_angle) + b), max_angle); without `a` and `b` the inner map is the identity.

    Everything is a smooth function of t² = (‖v‖/‖x‖)² (θ = ρ·t, and x' = cos θ · x + ρ · sinc θ · v), so the gradient
    at a zero update is the tangent part of the upstream gradient: neither NaN, as ‖v‖ in a denominator gives, nor zero.
    """
    state, update = widen(x), widen(g)
    radius = geometry.norm(state)
    alive = radius > NO_STATE
    inverse = torch.where(alive, radius, torch.ones_like(radius)).reciprocal()
    direction = state * inverse
    turn = update * inverse
    turn = turn - (direction * turn).sum(-1, keepdim=True) * direction
    square = turn.square().sum(-1, keepdim=True)
    rate = factor * _angle_map(square, max_angle, a, b)
    if second_clamp:
        rate = torch.minimum(rate, _cap(square, max_angle))
    angle_square = rate.square() * square
    # x cos θ as x − x (1 − cos θ): rounding cos θ itself would pull every step of a walk the same way.
    moved = state - geometry.versine_sqrt(angle_square) * state
    moved = moved + rate * geometry.sinc_sqrt(angle_square) * radius * turn
    return torch.where(alive, moved, state).to(x.dtype)


def _angle_map(square, max_angle, a, b) -> torch.Tensor:
    """(a · min(t, c) + b)/t as a function of t²: finite at zero."""
    rate = _cap(square, max_angle).clamp_max(1.0)
    if a is not None:
        rate = a * rate
    if b is not None:
        rate = rate + b * torch.rsqrt(square + SMOOTH**2)
    return rate


def _cap(square: torch.Tensor, max_angle: float) -> torch.Tensor:
    """max_angle / t, large but finite where t is zero."""
    tiny = torch.finfo(square.dtype).tiny
    return max_angle * torch.rsqrt(square.clamp_min(tiny))
