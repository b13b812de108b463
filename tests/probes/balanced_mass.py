"""Balanced mass of a softmax from all of its keys."""

from __future__ import annotations

import torch


def balanced_mass(p: torch.Tensor) -> torch.Tensor:
    """θ(p) of arXiv 2602.18849, how sensitive a softmax is: the norm of its Jacobian diag(p) − p pᵀ from largest entry
    to sum of magnitudes. 1 where the keys can be parted into two halves of equal mass, 0 where one key has it all.

    A norm is convex, so it is largest at signs s, and there Σ p_i |s_i − ⟨p, s⟩| = 1 − ⟨p, s⟩²: it takes the parting
    with the least difference. Each key, the heaviest first, goes to the lighter side: never too much, exact where a
    key holds half of the mass, and the heavier side is at most 7/6 of the best (Graham 1969).
    """
    apart = torch.zeros_like(p[..., 0])
    for weight in p.sort(-1, descending=True).values.unbind(-1):
        apart = (apart - weight).abs()
    return 1.0 - apart.square()
