"""Hyper-connections: n streams with learned weights to read them, to mix them and to write to them."""

# torch annotates some tensor functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.kernels.dynamic_streams import DynamicRead
from normlab.kernels.normalised_projection import fuses_projection, normalised_projection
from normlab.norms import Norm, RMSNorm, widen
from normlab.roles import OUTPUTS, Role, Spec
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.bounds import BranchBound
from normlab.schemes.contract.parts import Step
from normlab.schemes.contract.scales import factor
from normlab.schemes.contract.site import Site
from normlab.schemes.contract.streams import (
    MeanNorm,
    MixProjection,
    StreamRead,
    StreamScheme,
    StreamWrite,
    add_update,
    mix_streams,
    mixing_matrix,
    part_of_step,
    set_values_,
)


@dataclass(frozen=True, kw_only=True)
class HC(StreamScheme):
    """
    Hyper-connections: n residual streams with learned weights for what a branch reads, mixes and writes.

    Formula    h = Σ_s a_s·X_s; X_t ← Σ_s A[s,t]·X_s + b_t·F(N(h))
               a, A, b = learned numbers; dynamic: + α·tanh(W·N_s(X_s)), row s from stream s alone
               exit N(Σ_s X_s)
    Placement  X ─┬─ Σ a ─ N ─ F ─ ·b ─┐
                  └─ Aᵀ ───────────────+─ X'
    Init       n copies of the embedding; A = 1, b = 1, a picks stream k mod n in the k-th sublayer; W = 0, α = 0.01
               output projections ÷ √(2L) as Pre-Norm and ÷ √n; W decays, a, A, b and α do not
    Source     Zhu et al. 2024, arXiv 2409.19606
    Law        Pre-Norm's at initialisation, which it equals; trained, the largest stream may grow by max_t Σ_s |A[s,t]|
               a sublayer
    Fails      nothing bounds the product of the A: gains of 3000 and a surge of the loss at 27B (arXiv 2512.24880);
               use mhc
    """

    name = "hc"
    aliases = ("hyper-connections", "hyper-connection", "dhc")
    variants = MappingProxyType({"shc": {"dynamic": False}})

    dynamic: bool = True
    """Add a part to the weights that depends on the token; False: learned numbers alone."""
    tanh: bool = True
    """Squash the dynamic part; the paper's variant without it is slightly better at n = 4, but has no bound."""
    alpha: float = 0.01
    """Initial value of α, the weight of the dynamic part."""

    def check(self) -> None:
        super().check()
        if not self.dynamic and (self.tanh, self.alpha) != (True, 0.01):
            raise NormLabError("hc: tanh and alpha belong to dynamic=True; leave them out")

    def sublayer(self, site: Site) -> Step:
        dynamic = self._dynamic(site.dim) if self.dynamic else None
        return HCStep(HCRead(self.streams, site.step % self.streams, self.new_norm(site.dim), dynamic), site.dt)

    def _dynamic(self, dim: int) -> DynamicWeights:
        return DynamicWeights(self.new_norm(dim), self.streams, alpha=self.alpha, tanh=self.tanh)

    def exit(self, bound: BoundScheme) -> nn.Module:
        return MeanNorm(self.new_norm(bound.dim), total=True)

    def initial_std(self, role: Role, base: float, bound: BoundScheme) -> float:
        if role.role == "mix":
            return 0.0
        std = super().initial_std(role, base, bound)
        # Every stream takes every update, and the exit adds up the streams.
        return std / math.sqrt(self.streams) if role.role in OUTPUTS else std


class DynamicWeights(nn.Module):
    """X → α·tanh(W·N(X_s)) for every stream s: what is added to a_s, to the row A[s, :] and to b_s."""

    def __init__(self, norm: Norm, streams: int, *, alpha: float, tanh: bool):
        super().__init__()
        self.norm, self.streams, self.alpha, self.tanh = norm, streams, alpha, tanh
        self.project = MixProjection(norm.dim, streams + 2)
        self.scale = nn.Parameter(torch.empty(2, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, self.alpha)

    def forward(self, state: torch.Tensor, kernels: str = "reference") -> tuple[torch.Tensor, ...]:
        """(state, what is added); go on with this state, as with that of `StreamRead.coefficients`."""
        state, found = self._projected(state, kernels)
        return state, *self.weights(found)

    def weights(self, found: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What is added to a, A and b, given W·N(X_s) for every stream s."""
        found = (found.tanh() if self.tanh else found) * self._scales()
        read, mix, write = found.split([1, self.streams, 1], dim=-1)
        return read.squeeze(-1), mix, write.squeeze(-1)

    def dynamic_read(self, base: torch.Tensor) -> DynamicRead | None:
        """The weights of the read as a formula, if the norm is one that it has; `base` is the part they all share."""
        weight = self._plain_weight()
        if weight is None:
            return None
        scale, act = widen(self.scale)[0].expand(self.streams), "tanh" if self.tanh else "identity"
        return DynamicRead(weight, self.norm.eps, scale, base, act, inside=False)

    def _projected(self, state: torch.Tensor, kernels: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(state, W·N(X_s) for every stream s)."""
        if fuses_projection(kernels, state, self.project.weight):
            weight = self._plain_weight()
            if weight is not None:
                return normalised_projection(state, weight, self.norm.eps, kernels=kernels)
        return state, self.project(self.norm(widen(state)))

    def _plain_weight(self) -> torch.Tensor | None:
        """W behind a norm without gain, which the kernels have: the gain becomes a part of the far smaller weight."""
        if type(self.norm) is not RMSNorm or self.norm.bias is not None:
            return None
        gain = self.norm.scale()
        return widen(self.project.weight) if gain is None else widen(self.project.weight) * gain

    def limits(self) -> tuple[float, torch.Tensor, float]:
        """Largest absolute values that are added to a_s, to A[s, t] for each t, and to b_s."""
        weight = widen(self.project.weight.detach())
        # |w·x| ≤ ‖w‖·√D·RMS(x)
        largest = torch.linalg.vector_norm(weight, dim=-1) * math.sqrt(weight.shape[-1]) * self.norm.rms_bound(math.inf)
        largest = largest.nan_to_num(math.inf).clamp(max=1.0 if self.tanh else math.inf)
        found = largest * self._scales().detach().abs()
        return float(found[0]), found[1:-1], float(found[-1])

    def _scales(self) -> torch.Tensor:
        """One scale for the weights that read and mix, one for those that write."""
        shared, write = widen(self.scale).unbind(0)
        return torch.stack([shared] * (self.streams + 1) + [write])


class HCRead(StreamRead):
    """X → (N(Σ_s a_s X_s), b, A): a branch's input and the weights of its write."""

    def __init__(self, streams: int, first: int, norm: Norm, dynamic: DynamicWeights | None):
        super().__init__()
        self.first, self.norm, self.dynamic = first, norm, dynamic
        self.read = nn.Parameter(torch.empty(streams, dtype=torch.float32))
        self.mix = nn.Parameter(torch.empty(streams, streams, dtype=torch.float32))
        self.write = nn.Parameter(torch.empty(streams, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        one = torch.eye(len(self.mix), device="cpu")
        set_values_(self.read, one[self.first])
        set_values_(self.mix, one)
        nn.init.ones_(self.write)

    def parameter_roles(self) -> Mapping[str, Spec]:
        # n × n numbers, whatever the width: no matrix of the model.
        return {"mix": "vector"}

    @property
    def static(self) -> bool:
        return self.dynamic is None

    def coefficients(self, state: torch.Tensor, kernels: str = "reference") -> tuple[torch.Tensor, ...]:
        read, mix, write = widen(self.read), widen(self.mix), widen(self.write)
        if self.dynamic is not None:
            state, *more = self.dynamic(state, kernels)
            read, mix, write = (one + other for one, other in zip((read, mix, write), more, strict=True))
        return state, read, write, mix

    def dynamic_read(self) -> DynamicRead | None:
        return None if self.dynamic is None else self.dynamic.dynamic_read(widen(self.read))

    def carried(self, u: torch.Tensor, kernels: str) -> tuple[torch.Tensor, ...]:
        assert self.dynamic is not None
        _, mix, write = self.dynamic.weights(u)
        return widen(self.write) + write, widen(self.mix) + mix

    def limits(self) -> tuple[float, float, float]:
        """(Σ |a_s|, max_t Σ_s |A[s, t]|, max |b_t|), each the largest for any state."""
        read, mix, write = (widen(one.detach()).abs() for one in (self.read, self.mix, self.write))
        more = (0.0, 0.0, 0.0) if self.dynamic is None else self.dynamic.limits()
        return float((read + more[0]).sum()), float((mix + more[1]).sum(0).max()), float((write + more[2]).max())

    def rms_bound(self, rms_in: float) -> float:
        return self.norm.rms_bound(self.limits()[0] * rms_in)


class HCWrite(StreamWrite):
    """X_t ← Σ_s A[s, t]·X_s + b_t·f; a refined step mixes by (1 − dt)·1 + dt·Aᵀ."""

    def __init__(self, dt: float):
        super().__init__()
        self.dt = factor(dt)

    def forward(self, state: torch.Tensor, update: torch.Tensor, *carry: torch.Tensor) -> torch.Tensor:
        write, mix = carry
        wide = widen(state)
        mixed = part_of_step(wide, mix_streams(mix, wide), self.dt)
        return add_update(mixed, self.dt(write), widen(update)).to(state.dtype)

    def mixing(self, *carry: torch.Tensor) -> torch.Tensor:
        return mixing_matrix(carry[1], self.dt)


class HCStep(Step):
    """The step of hyper-connections: its bound needs the weights of the read and the step of the write."""

    def __init__(self, read: HCRead, dt: float):
        super().__init__(HCWrite(dt), read=read)
        self.fraction = dt

    def rms_bound(self, state: float, branch: BranchBound) -> float:
        _, mix, write = cast(HCRead, self.read).limits()
        grown = (1.0 - self.fraction + self.fraction * mix) * state
        return grown + self.fraction * write * self.update_bound(state, branch)
