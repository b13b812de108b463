"""The network itself: a scheme's own blocks, the code that trains, with particle attention as their branch.

Block k takes tokens from time k to k + 1. Cut m times (`Scheme.refine`), m blocks do, and as m grows the network must
follow the scheme's law: this is what ties simulator, theory and training code together. A drift is added to what
attention proposes, as in a parallel block: laws that look at the length of an update look at that of the sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from normlab.dynamics.attention import Attention
from normlab.dynamics.flow import Drift, Layers, State, length, unit
from normlab.dynamics.integrate import check
from normlab.dynamics.threads import suited
from normlab.errors import NormLabError
from normlab.schemes.base import Bound, Scheme


class Network:
    """`depth` blocks of a scheme over particle attention, every step cut `cut` times."""

    def __init__(
        self, scheme: Scheme, attention: Layers, *, depth: int, cut: int = 1, drift: Drift | None = None
    ) -> None:
        # An epsilon would be a radius that no law knows; this one only keeps the norm of zero at zero.
        self.scheme = dataclasses.replace(scheme, eps=1e-30).refine(cut)
        self.attention, self.drift, self.depth, self.cut = attention, drift, depth, cut
        self.law = scheme.law(depth)

    def orbit(self, start: State, times: Sequence[float]) -> Iterator[State]:
        """The state at each of the times, which are those of blocks."""
        blocks = [round(time * self.cut) for time in times]
        if any(abs(block / self.cut - time) > 1e-9 for block, time in zip(blocks, times, strict=True)):
            raise NormLabError(f"a network cut {self.cut} times has states at multiples of 1/{self.cut} alone")
        bound = self.scheme.bind(depth=self.depth * self.cut, dim=start.theta.shape[-1])
        size, done = self.scheme.sphere(bound.dim), 0
        state = bound.entry().to(start.theta)(size * start.radius.unsqueeze(-1) * start.theta)
        for block in blocks:
            with suited(start.theta):
                for k in range(done, block):
                    state = self._step(bound, k, state, size)
            done = max(done, block)
            yield self._seen(state, size, start, done / self.cut)

    @torch.no_grad()
    def _step(self, bound: Bound, k: int, state: Tensor, size: float) -> Tensor:
        """One block. Its MLP proposes nothing, or what it reads, as the law says."""
        block = bound.block(k).to(state)
        block.kernels = "reference"
        attention = self.attention if isinstance(self.attention, Attention) else self.attention(k // self.cut)
        mlp = torch.zeros_like if self.law.mlp == "nothing" else torch.clone

        def branch(x: Tensor) -> Tensor:
            pull = attention(x / size)
            return size * (pull if self.drift is None else pull + self.drift(x / size))

        return block(state, [branch, mlp])

    def _seen(self, state: Tensor, size: float, start: State, time: float) -> State:
        hidden = self.scheme.hidden(state) / size
        seen = State(unit(hidden), length(hidden), start.time + time)
        check(seen)
        return seen


def renormalises(scheme: Scheme) -> bool:
    """Whether entry and first block, with nothing to add, put a state that is off the sphere on it."""
    theta = unit(torch.tensor([[[1.0, -2.0, 0.5, 0.5], [0.5, 1.0, -1.0, -0.5]]], dtype=torch.float64))
    nothing = Attention(beta=torch.zeros(1), value=torch.zeros(1, 4, 4))
    begin = State(theta, theta.new_full((1, 2), 2.0), theta.new_zeros(1))
    end = next(Network(scheme, nothing, depth=4).orbit(begin, [1.0]))
    return bool((end.radius < 1.5).all())
