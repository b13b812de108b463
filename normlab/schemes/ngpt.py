"""nGPT: normalised Transformer with states and weights on the unit sphere."""

# torch annotates some tensor functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.kernels.lerp import sphere_lerp, sphere_lerp_pair, unit_rows_
from normlab.norms import l2_norm
from normlab.roles import Role, whole_parameters
from normlab.schemes.contract.blocks import Block
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.law import Law, Value, on_sphere
from normlab.schemes.contract.learnt import first_steps, mean
from normlab.schemes.contract.needs import Need
from normlab.schemes.contract.parts import Step, ToSphere, WriteTwice
from normlab.schemes.contract.scales import BoundedSequential, ConstantScale, LearnedScale, factor
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.contract.site import Site


@dataclass(frozen=True, kw_only=True)
class NGPT(Scheme):
    """
    nGPT: states, weights, queries and keys are unit vectors; a residual step is an interpolation.

    Formula    h ← n(h + |α| ⊙ (n(F(h)) − h))
               n(v) = v/‖v‖
    Placement  h ─┬─ F ─ n ─ lerp(α) ─ n ─ h'
                  └───────────┘
               inside: q, k ← s_qk ⊙ n(·) after rotary, softmax scale √d_h; gate ← s_v √d ⊙ gate, up ← s_u ⊙ up
    Init       std 1/√d, then unit length along the model dimension, again after every optimiser step
    Source     Loshchilov et al. 2024, arXiv 2410.01131
    Law        ‖h‖ = 1 at every depth; tokens merge at the rate e^(−2∫α)
    Fails      output projections that start at zero (no direction; refused); a tied head; weight decay; the best
               learning rate depends on the width: at 125M, 4 of 4 runs are above the unigram entropy after 200 steps at
               6e-4, 0 of 4 at 1.2e-3
    """

    name = "ngpt"
    aliases = ("n-gpt", "normalized-gpt", "normalised-gpt")
    zero_outputs = False
    depth_rule = "its own α, learned from one initial value at every depth"

    alpha: float = 0.05
    """Initial step size α of the interpolation."""
    alpha_scaling: float | None = None
    """Initial value of α's parameter, which sets its effective learning rate; None: 1/√d."""

    def check(self) -> None:
        if not 0.0 < self.alpha <= 1.0:
            raise NormLabError(f"ngpt: alpha must lie in (0, 1], got {self.alpha}; try 0.05")
        if self.alpha_scaling is not None and self.alpha_scaling <= 0.0:
            raise NormLabError(f"ngpt: alpha_scaling must be positive, got {self.alpha_scaling}; leave it out")
        if self.qk_norm != "none":
            raise NormLabError("ngpt normalises q and k itself; leave qk_norm off")
        if self.norm != "rms" or self.bias or self.gain != "plain":
            raise NormLabError("ngpt has no norms with gain; leave norm, gain and bias at their defaults")

    def sublayer(self, site: Site) -> Step:
        scaling = 1.0 / math.sqrt(site.dim) if self.alpha_scaling is None else self.alpha_scaling
        return Step(SphereLerp(LearnedScale(site.dim, self.alpha, scaling), self.eps, site.dt))

    def entry(self, bound: BoundScheme) -> nn.Module:
        return ToSphere(bound.dim, radius=1.0)

    def exit(self, bound: BoundScheme) -> nn.Module:
        return nn.Identity()

    @property
    def needs(self) -> tuple[Need, ...]:
        return (
            Need("qk-after-rotary", lambda attention: UnitHeads(attention, self.eps)),
            Need("softmax-scale", lambda attention: math.sqrt(attention.head_dim)),
            Need("gate-scale", _gate_scale),
            Need("up-scale", lambda mlp: LearnedScale(mlp.hidden)),
            Need("logit-scale", lambda head: LearnedScale(head.vocab_size, 1.0, 1.0 / math.sqrt(head.dim))),
            Need("untied-head", lambda head: 1.0),
        )

    def base_std(self, dim: int) -> float:
        return 1.0 / math.sqrt(dim)

    def decays(self, role: Role) -> bool:
        return False

    def constrain_(self, roles: Sequence[Role]) -> None:
        for role in whole_parameters(roles):
            # The published model has no router; a router's matrix is not normalised.
            if role.is_matrix and role.role != "router":
                unit_rows_(role.view(), role.model_axis)

    def sphere(self, dim: int) -> float:
        return 1.0

    def law(self, depth: int, blocks: Sequence[Block] = ()) -> Law:
        found = [mean(step.write.alpha.value().abs()) for step in first_steps(blocks)]
        alpha = Value("α", self.alpha).learnt(found)
        return Law(
            speed=lambda m: m.attention / alpha(m.time),
            values=(alpha,),
            rms=on_sphere,
            forward="bounded",
            backward="bounded: each step is a contraction toward a unit vector",
        )


def _gate_scale(mlp: Any) -> nn.Module:
    """s_v·√d on the gate."""
    return BoundedSequential(LearnedScale(mlp.hidden), ConstantScale(math.sqrt(mlp.dim)))


class SphereLerp(WriteTwice):
    """n(h + |α| ⊙ (n(g) − h))."""

    keeps_norm = True

    def __init__(self, alpha: LearnedScale, eps: float, dt: float):
        super().__init__()
        self.alpha, self.eps, self.dt = alpha, eps, factor(dt)

    def step_size(self) -> torch.Tensor:
        """|α|, times the fraction of a step in refined schemes."""
        return self.dt(self.alpha.value().abs())

    def forward(self, state: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return sphere_lerp(state, update, self.step_size(), self.eps, kernels="reference")

    def write_twice(
        self, state: torch.Tensor, update: torch.Tensor, input_dtype: torch.dtype, kernels: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return sphere_lerp_pair(state, update, self.step_size(), self.eps, input_dtype=input_dtype, kernels=kernels)

    def rms_bound(self, state: float, update: float) -> float:
        return 1.0 / math.sqrt(self.alpha.weight.shape[-1])


class UnitHeads(nn.Module):
    """s_qk ⊙ n(x) per head, one s_qk for queries and keys.

    With grouped queries there is one entry per key head, shared by the query heads that read it.
    """

    def __init__(self, attention: Any, eps: float):
        super().__init__()
        self.eps = eps
        shape = (attention.kv_heads, 1, attention.head_dim)
        self.scale = LearnedScale(shape, 1.0, 1.0 / math.sqrt(attention.dim))

    def parameter_roles(self) -> dict[str, str]:
        return {"scale.weight": "vector"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grouped = l2_norm(x, self.eps).unflatten(-2, (self.scale.weight.shape[0], -1))
        return (grouped * self.scale.value()).flatten(-3, -2).to(x.dtype)
