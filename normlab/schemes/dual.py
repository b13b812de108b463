"""ResiDual: a Post-Norm and a Pre-Norm residual stream in parallel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.kernels import backends
from normlab.kernels.dual import dual_step
from normlab.norms import Norm, widen
from normlab.schemes.contract.blocks import Block
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.law import Law, Value, on_sphere, squared_radius
from normlab.schemes.contract.learnt import main_gains
from normlab.schemes.contract.parts import Seen, Step, Write, affine_of
from normlab.schemes.contract.scales import factor, tensor_of
from normlab.schemes.contract.scheme import Scheme
from normlab.schemes.contract.site import Site


@dataclass(frozen=True, kw_only=True)
class Dual(Scheme):
    """
    ResiDual: branches read a Post-Norm stream p; a second stream u accumulates their unnormalised outputs.

    Formula    p ← N(p + f), u ← u + s·f, f = F(p)
               exit a·p + N_f(u)
    Placement  p ─┬─ F ─┬─┐
                  └─────│─+─ N ─ p'
               u ───────+·s ──── u'
    Init       base std; p₀ = x₀, u₀ = s·x₀
               the exit adds two streams of unit RMS: the first loss is up to 2·width·std² above ln V, not ½·width·std²
               at width 768, 12 blocks and std 0.02 it is 0.49 above ln V, Pre-Norm's 0.15
    Source     Xie et al. 2023, arXiv 2304.14802
    Law        RMS(p) = 1 at every depth; u grows like Pre-Norm's state, the final norm removes s
    Fails      u overflows fp16 in deep stacks: use scale=0.05
    """

    name = "dual"
    aliases = ("residual-dual", "resi-dual", "residual", "dual-residual")
    depth_rule = "no constant depends on the depth, and none is changed"

    scale: float = 1.0
    """Factor s on everything added to the stream u; below 1 it prevents overflow in fp16."""
    post_weight: float = 1.0
    """Weight a of the stream p in the exit."""
    final_eps: float = 1e-7
    """Epsilon of the final norm; small, because s·u may be small."""

    def check(self) -> None:
        if self.scale <= 0.0:
            raise NormLabError(f"dual: scale must be positive, got {self.scale}; try 0.05 for fp16")
        if self.final_eps < 0.0:
            raise NormLabError(f"dual: final_eps must not be negative, got {self.final_eps}; try 1e-7")

    @property
    def streams(self) -> int:
        return 2

    def sublayer(self, site: Site) -> Step:
        return DualStep(DualWrite(self.new_norm(site.dim), self.scale, site.dt), read=FirstStream())

    def entry(self, bound: BoundScheme) -> nn.Module:
        return DualEntry(self.scale)

    def exit(self, bound: BoundScheme) -> nn.Module:
        return DualExit(self.new_norm(bound.dim, eps=self.final_eps), self.post_weight)

    def hidden(self, state: torch.Tensor) -> torch.Tensor:
        return state[..., 0, :]

    def law(self, depth: int, blocks: Sequence[Block] = ()) -> Law:
        gain = Value("gain", 1.0).learnt(main_gains(blocks))
        return Law(
            speed=lambda m: torch.ones_like(m.radius),
            temperature=squared_radius(gain),
            values=(gain,),
            rms=on_sphere,
            forward="bounded",
            backward="as Pre-Norm: the gradient in the stream u passes no norm",
            note="the law of the stream p, which the branches read",
        )


class FirstStream(nn.Module):
    """(p, u) → p: the stream that branches read."""

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return state[..., 0, :]

    def rms_bound(self, rms_in: float) -> float:
        return rms_in


class DualEntry(nn.Module):
    """x → (x, s·x), stacked before the last dimension."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale = factor(scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, self.scale(x)], dim=-2)

    def rms_bound(self, rms_in: float) -> float:
        return rms_in


class DualWrite(Write):
    """p ← N(p + dt·f), u ← u + s·dt·f."""

    def __init__(self, norm: Norm, scale: float, dt: float):
        super().__init__()
        self.norm, self.scale, self.dt = norm, factor(scale), factor(dt)

    def forward(self, state: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        post, collected = widen(state).unbind(-2)
        update = self.dt(widen(update))
        return torch.stack([self.norm(post + update), collected + self.scale(update)], dim=-2).to(state.dtype)

    def write_and_read(
        self,
        state: torch.Tensor,
        update: torch.Tensor,
        shape: nn.Module,
        read: nn.Module,
        kernels: str,
        *carry: torch.Tensor,
    ) -> tuple[torch.Tensor, Seen]:
        norm = affine_of(self.norm)
        if backends.choose(kernels, state) != "triton" or not isinstance(shape, nn.Identity):
            return super().write_and_read(state, update, shape, read, kernels, *carry)
        if norm is None or norm[0] is None or update.dtype == torch.float64:
            return super().write_and_read(state, update, shape, read, kernels, *carry)
        step, scale = tensor_of(self.dt), tensor_of(self.scale)
        state, seen = dual_step(state, update, norm[0], step=step, scale=scale, kernels=kernels)
        return state, seen if isinstance(read, FirstStream) else read(state)

    def rms_bound(self, state: float, update: float) -> float:
        return self.norm.rms_bound(state + update)


class DualStep(Step):
    """The step of ResiDual: less traffic than its parts suggest."""

    def traffic(self, streams: int = 1) -> tuple[int, int]:
        # A branch reads a view of p, and the gradient of u needs neither state nor update (`normlab/kernels/dual.py`).
        return 5, 8


class DualExit(nn.Module):
    """a·p + N_f(u)."""

    def __init__(self, norm: Norm, post_weight: float):
        super().__init__()
        self.norm, self.post_weight = norm, factor(post_weight)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        post, collected = state.unbind(-2)
        return (self.post_weight(widen(post)) + widen(self.norm(collected))).to(state.dtype)
