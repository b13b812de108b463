"""DeepNorm: Post-Norm with a scaled-up skip connection and a scaled-down initialisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.roles import Role, xavier_std
from normlab.schemes.contract.blocks import Block
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.law import Law, Value, on_sphere, squared_radius
from normlab.schemes.contract.learnt import main_gains
from normlab.schemes.contract.parts import AddNorm, Step
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.contract.site import Site

_SCALED = ("v", "o", "gate", "up", "down")


@dataclass(frozen=True, kw_only=True)
class DeepNorm(Scheme):
    """
    DeepNorm: Post-Norm with a factor α > 1 on the skip connection and a factor β < 1 on the initial branch weights.

    Formula    x ← N(α·x + F(x))
               α = (2L)^(1/4), β = (8L)^(−1/4)
    Placement  x ─┬──── F ───┐
                  └── ·α ────+─ N ─ x'
    Init       Xavier normal; gain β for v, o and every MLP matrix, 1 for q and k; biases untouched
    Source     Wang et al. 2022, arXiv 2203.00555
    Law        RMS = 1 at every depth; Post-Norm's flow, slowed by the factor α
    Fails      constants from the wrong depth; scaling all of a fused QKV matrix, or biases; short warm-up: at 125M and
               6e-4 or 1.2e-3, 7 of 8 runs stayed at the unigram entropy with 40 steps of warm-up, 1 of 8 with 100
    """

    name = "deepnorm"
    aliases = ("deep-norm", "deepnet")
    depth_rule = "its own α = (2L)^(1/4) and β = (8L)^(−1/4)"

    alpha: float | None = None
    """Factor α on the skip connection; None: computed from the depth."""
    beta: float | None = None
    """Gain β of the scaled matrices; None: computed from the depth."""
    init: Literal["xavier", "base"] = "xavier"
    """The standard deviation that β multiplies: Xavier's or the base."""
    decoder_depth: int = 0
    """Only for the encoder of an encoder-decoder: the decoder's depth M. (A decoder with cross-attention binds with
    branches=3 and needs no option.)"""

    def check(self) -> None:
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if value is not None and value <= 0.0:
                raise NormLabError(f"deepnorm: {name} must be positive, got {value}; leave it out to derive it")
        if self.decoder_depth < 0:
            raise NormLabError(f"deepnorm: decoder_depth must not be negative, got {self.decoder_depth}")

    def skip_weight(self, sublayers: float, horizon: float) -> float:
        """The factor α on the skip connection."""
        if self.alpha is not None:
            return self.alpha
        if self.decoder_depth:
            return 0.81 * (horizon**4 * self.decoder_depth) ** (1 / 16)
        return sublayers**0.25

    def branch_gain(self, sublayers: float, horizon: float) -> float:
        """The gain β of the scaled matrices at initialisation."""
        if self.beta is not None:
            return self.beta
        if self.decoder_depth:
            return 0.87 * (horizon**4 * self.decoder_depth) ** (-1 / 16)
        return (4.0 * sublayers) ** -0.25

    def sublayer(self, site: Site) -> Step:
        keep = self.skip_weight(site.sublayers, site.horizon)
        return Step(AddNorm(self.new_norm(site.dim), keep=keep, step=site.dt))

    def exit(self, bound: BoundScheme) -> nn.Module:
        return nn.Identity()

    def initial_std(self, role: Role, base: float, bound: BoundScheme) -> float:
        std = xavier_std(role, base) if self.init == "xavier" else base
        return std * self.branch_gain(bound.sublayers, bound.horizon) if role.role in _SCALED else std

    def law(self, depth: int, blocks: Sequence[Block] = ()) -> Law:
        gain = Value("gain", 1.0).learnt(main_gains(blocks))
        alpha = self.skip_weight(2.0 * depth, depth)
        return Law(
            speed=lambda m: torch.full_like(m.radius, alpha),
            temperature=squared_radius(gain),
            values=(gain,),
            rms=on_sphere,
            forward="bounded",
            backward="bounded: the skip path keeps α/√(α²+β²) per sublayer",
            note="α for two sublayers per block",
        )
