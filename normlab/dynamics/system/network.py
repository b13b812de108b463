"""Particle network: run a scheme's own blocks, the code that is trained, with particle attention as their branch.

Block k covers the time from k to k + 1. With every step divided by m (`Scheme.refine`), m blocks do; as m grows the
network must converge to the scheme's law, which ties simulator, theory and training code together. The output of an
MLP (`drift`) is added to that of attention, as in a parallel block, so laws that use the norm of an update see the sum.

Given the blocks of a trained network, their parameters are loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from normlab.dynamics.system.attention import ParticleAttention
from normlab.dynamics.system.flow import Drift, LayerAttention, ParticleState, length, unit
from normlab.dynamics.system.integrators import check_state
from normlab.dynamics.system.small_systems import limit_threads
from normlab.errors import NormLabError
from normlab.schemes.contract.blocks import Block, ParallelBlock
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.scheme import Scheme

_NOTHING = {torch.float64: 1e-30, torch.float32: 1e-18}
"""Epsilon of the norms, small enough not to change any radius. The norm of zero stays zero, and its square, which nGPT
adds, is still representable."""


class ParticleNetwork:
    """`depth` blocks of a scheme over particle attention, every step divided by `cut`.

    learnt    blocks of a trained network whose parameters are loaded
    entered   whether the initial tokens have already passed the scheme's entry
    """

    def __init__(
        self,
        scheme: Scheme,
        attention: LayerAttention,
        *,
        depth: int,
        cut: int = 1,
        drift: Drift | None = None,
        learnt: Sequence[Block] = (),
        entered: bool = False,
    ) -> None:
        if learnt and len(learnt) != depth:
            raise NormLabError(f"a network of {depth} blocks cannot take over what {len(learnt)} have learnt")
        self.scheme = scheme.refine(cut)
        self.attention, self.drift, self.depth, self.cut = attention, drift, depth, cut
        self.learnt, self.entered = learnt, entered
        self.law = scheme.law(depth)

    def orbit(self, start: ParticleState, times: Sequence[float]) -> Iterator[ParticleState]:
        """Yield the state at each of the times, which must be multiples of 1/cut."""
        blocks = [round(time * self.cut) for time in times]
        if any(abs(block / self.cut - time) > 1e-9 for block, time in zip(blocks, times, strict=True)):
            raise NormLabError(f"a network cut {self.cut} times has states at multiples of 1/{self.cut} alone")
        bound = self._bound(start.theta)
        size, done = self.scheme.sphere(bound.dim), 0
        state = self._enter(bound, size * start.radius.unsqueeze(-1) * start.theta)
        for block in blocks:
            with limit_threads(start.theta):
                for k in range(done, block):
                    state = self._step(bound, k, state, size)
            done = max(done, block)
            yield self._seen(state, size, start, done / self.cut)

    def _bound(self, theta: Tensor) -> BoundScheme:
        scheme = dataclasses.replace(self.scheme, eps=_NOTHING[theta.dtype])
        depth, dim = self.depth * self.cut, theta.shape[-1]
        if not self.learnt:
            return scheme.bind(depth=depth, dim=dim)
        topology = "parallel" if isinstance(self.learnt[0], ParallelBlock) else "serial"
        return scheme.bind(depth=depth, dim=dim, topology=topology, branches=self.learnt[0].branches)

    def _enter(self, bound: BoundScheme, x: Tensor) -> Tensor:
        # Without extra streams the tokens after the entry are the state.
        if self.entered and self.scheme.hidden(x) is x:
            return x
        return bound.entry().to(x)(x)

    def _block(self, bound: BoundScheme, k: int) -> Block:
        block = bound.block(k)
        if self.learnt:
            like = self.learnt[k // self.cut]
            if isinstance(block, ParallelBlock) and isinstance(like, ParallelBlock) and like.shares_read:
                block.share_read()
            # Parts of a divided block may have fewer norms: some are in the first part only.
            block.load_state_dict(like.state_dict(), strict=self.cut == 1)
        return block

    @torch.no_grad()
    def _step(self, bound: BoundScheme, k: int, state: Tensor, size: float) -> Tensor:
        """Run one block. Its MLP returns zero or its input, as the law assumes."""
        block = self._block(bound, k).to(state)
        block.kernels = "reference"
        attention = self.attention if isinstance(self.attention, ParticleAttention) else self.attention(k // self.cut)
        mlp = torch.zeros_like if self.law.mlp == "nothing" else torch.clone

        def branch(x: Tensor) -> Tensor:
            pull = attention(x / size)
            return size * (pull if self.drift is None else pull + self.drift(x / size))

        return block(state, [branch, *[mlp] * (block.branches - 1)])

    def _seen(self, state: Tensor, size: float, start: ParticleState, time: float) -> ParticleState:
        hidden = self.scheme.hidden(state) / size
        seen = ParticleState(unit(hidden), length(hidden), start.time + time)
        check_state(seen)
        return seen


def renormalises(scheme: Scheme) -> bool:
    """Whether entry and first block, with zero updates, project a state to the unit sphere."""
    theta = unit(torch.tensor([[[1.0, -2.0, 0.5, 0.5], [0.5, 1.0, -1.0, -0.5]]], dtype=torch.float64))
    nothing = ParticleAttention(beta=torch.zeros(1), value=torch.zeros(1, 4, 4))
    begin = ParticleState(theta, theta.new_full((1, 2), 2.0), theta.new_zeros(1))
    end = next(ParticleNetwork(scheme, nothing, depth=4).orbit(begin, [1.0]))
    return bool((end.radius < 1.5).all())
