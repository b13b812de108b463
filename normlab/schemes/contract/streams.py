"""States of several residual streams, (..., n, D): the base class of such schemes, and parts to build them from.

Coefficients of the streams are computed in fp32 (fp64 for an fp64 state) whatever the stream's dtype and autocast say.
With fused kernels the matrix product of streams in half precision is exact to 2^-15 of its terms, not to 2^-24.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.kernels import backends
from normlab.kernels.dynamic_streams import DynamicRead, dynamic_step, fuses_step
from normlab.kernels.normalised_projection import fuses_projection, normalised_projection
from normlab.kernels.streams import read_streams, uses_kernel, write_and_read_streams, write_streams
from normlab.norms import Norm, rms_norm, widen
from normlab.roles import COEFFICIENTS, Role, Spec
from normlab.schemes.contract.bound_scheme import BoundScheme
from normlab.schemes.contract.law import Law
from normlab.schemes.contract.parts import Seen, Write, affine_of, read_state
from normlab.schemes.contract.scheme import Scheme

_MIX_STD = 0.02
"""Initial std of matrices that compute coefficients: that of the public code, whatever the std of other matrices."""


@dataclass(frozen=True, kw_only=True)
class StreamScheme(Scheme):
    """Base class of schemes with n copies of the embedding as streams, which are Pre-Norm at initialisation.

    Branches read a weighted sum of the streams; a probe sees their mean. All branches of a block would have to share
    one set of coefficients if they ran in parallel, so blocks are serial.
    """

    topologies = ("serial",)
    depth_rule = "its own initialisation, output projections ÷ √(2L); no constant is changed"

    streams: int = 4  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]  # an option here
    """Residual streams n."""
    depth_init: bool = True
    """Divide output projections by √(2L) at initialisation, as Pre-Norm does."""

    fewest_streams = 1
    read_options: ClassVar[tuple[str, ...]] = ()
    """Options on which a branch's input and the coefficients of its write depend, if published layers read so."""
    exit_options: ClassVar[tuple[str, ...]] = ()
    """Options on which only the exit depends."""

    def check(self) -> None:
        if self.streams < self.fewest_streams:
            raise NormLabError(
                f"{self.name}: streams must be at least {self.fewest_streams}, got {self.streams}; try 4"
            )

    def entry(self, bound: BoundScheme) -> nn.Module:
        return CopyStreams(self.streams)

    def hidden(self, state: torch.Tensor) -> torch.Tensor:
        return mean_stream(state)

    def initial_std(self, role: Role, base: float, bound: BoundScheme) -> float:
        if role.role in COEFFICIENTS:
            return _MIX_STD
        return bound.output_std(role, base) if self.depth_init else base

    def law(self, depth: int) -> Law:
        return Law(
            speed=lambda m: m.radius,
            radial=lambda m: m.radial,
            rms=lambda i: math.sqrt(1 + i),
            forward="linear",
            backward="power law in depth",
            note="the law of the mean stream at initialisation, which is Pre-Norm's; none is known for trained"
            " coefficients",
        )


class CopyStreams(nn.Module):
    """x → n copies of x, stacked before the last dimension."""

    def __init__(self, streams: int):
        super().__init__()
        self.streams = streams

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x] * self.streams, dim=-2)

    def rms_bound(self, rms_in: float) -> float:
        return rms_in

    def extra_repr(self) -> str:
        return f"{self.streams}"


class FirstStreamRead(nn.Module):
    """X → N(X_0): the branch's input is the normalised first stream."""

    def __init__(self, norm: Norm):
        super().__init__()
        self.norm = norm

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return self.norm(state[..., 0, :])

    def rms_bound(self, rms_in: float) -> float:
        return self.norm.rms_bound(rms_in)


class MeanNorm(nn.Module):
    """N(mean of the streams); with `total` N(sum of the streams), which differs by the norm's epsilon."""

    def __init__(self, norm: Norm, *, total: bool = False):
        super().__init__()
        self.norm, self.total = norm, total

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        wide = widen(state)
        return self.norm(wide.sum(-2) if self.total else wide.mean(-2)).to(state.dtype)


class StreamRead(nn.Module):
    """Base class of reads X → (N(Σ_j pre_j X_j), post, comb): a branch's input and the coefficients of its write.

    A read with pre alone, such as that of an exit, returns no tuple.
    """

    norm: Norm

    @property
    def static(self) -> bool:
        """Whether the coefficients are the same for every state, so that a write need not wait for its streams."""
        return False

    def further_traffic(self, streams: int) -> tuple[int, int]:
        """Vectors per token that the kernels of the read move beside those of the write, (forward, backward).

        Coefficients that depend on the state are sums over all of it, and so are their gradients. Forward, what was
        written of the state is read again while the cache still holds it. Backward, the state and the gradient of the
        branch's input are read once more for the gradients of the coefficients, and the state for that of the weight.
        """
        return (0, 0) if self.static else (0, 2 * streams + 1)

    def coefficients(self, state: torch.Tensor, kernels: str = "reference") -> tuple[torch.Tensor, ...]:
        """(state, pre, post, comb), coefficients in fp32 or fp64; no comb without mixing.

        Go on with the state that it returns: a fused kernel adds the state's gradient to that of the coefficients.
        """
        raise NotImplementedError

    def dynamic_read(self) -> DynamicRead | None:
        """How `pre` follows from the state, if that is a formula that the kernel of the whole step has."""
        return None

    def carried(self, u: torch.Tensor, kernels: str) -> tuple[torch.Tensor, ...]:
        """(post, comb), given the logits u of that formula."""
        raise NotImplementedError

    def forward(self, state: torch.Tensor) -> Seen:
        wide = widen(state)
        with full_precision(state):
            wide, pre, *carry = self.coefficients(wide)
            seen = self.norm(weighted_sum(pre, wide)).to(state.dtype)
        return (seen, *carry) if carry else seen

    def read_state(self, state: torch.Tensor, kernels: str) -> tuple[torch.Tensor, Seen]:
        """(state, what `forward` returns), with fused kernels where they can run."""
        norm = affine_of(self.norm)
        if norm is None or not _fuses(kernels, state):
            return state, self(state)
        with full_precision(state):
            state, pre, *carry = self.coefficients(state, kernels)
        state, seen = read_streams(state, pre, norm[0], kernels=kernels)
        return state, (seen, *carry) if carry else seen


class StreamWrite(Write):
    """Base class of writes X_t ← Σ_s comb[s, t]·X_s + post_t·f, (post, comb) from a `StreamRead`, with fused kernels.

    A static read shares the write's kernel, and so does one with a `dynamic_read`. For any other, whose coefficients
    depend on the streams written, a kernel writes, others compute coefficients and read, and each of these adds up the
    gradients of the streams and its own.
    """

    dt: nn.Module

    def write_and_read(
        self,
        state: torch.Tensor,
        update: torch.Tensor,
        shape: nn.Module,
        read: nn.Module,
        kernels: str,
        *carry: torch.Tensor,
    ) -> tuple[torch.Tensor, Seen]:
        if not isinstance(shape, nn.Identity) or not _fuses(kernels, state, update):
            return super().write_and_read(state, update, shape, read, kernels, *carry)
        post, comb = self.dt(carry[0]), None if len(carry) < 2 else _refined(carry[1], self.dt)
        norm = affine_of(read.norm) if isinstance(read, StreamRead) else None
        if norm is not None and isinstance(read, StreamRead) and read.static:
            _, pre, *carry_on = read.coefficients(state)
            state, seen = write_and_read_streams(state, update, post, comb, pre, norm[0], kernels=kernels)
            return state, (seen, *carry_on)
        found = self._dynamic(state, update, post, comb, read, kernels)
        if found is not None:
            return found
        state = write_streams(state, update, post, comb, kernels=kernels)
        return read_state(state, read, kernels)

    def _dynamic(
        self,
        state: torch.Tensor,
        update: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor | None,
        read: nn.Module,
        kernels: str,
    ) -> tuple[torch.Tensor, Seen] | None:
        """Write and read with one kernel that also computes the weights of the read; None if there is none."""
        norm = affine_of(read.norm) if isinstance(read, StreamRead) else None
        if norm is None or not isinstance(read, StreamRead):
            return None
        with full_precision(state):
            dynamic = read.dynamic_read()
            if dynamic is None or not fuses_step(kernels, state, update, dynamic, norm[0]):
                return None
            state, seen, u = dynamic_step(state, update, post, comb, dynamic, norm[0], kernels=kernels)
            carry = read.carried(u, kernels)
        return state, (seen, *carry) if carry else seen


def _fuses(kernels: str, state: torch.Tensor, update: torch.Tensor | None = None) -> bool:
    if backends.choose(kernels, state) != "triton" or (update is not None and update.dtype == torch.float64):
        return False
    return uses_kernel(kernels, state)


class MixProjection(nn.Module):
    """W·x without bias, in full precision: from normalised streams to logits of coefficients. Zero before `init_`."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def parameter_roles(self) -> Mapping[str, Spec]:
        return {"weight": "mix"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with full_precision(x):
            return nn.functional.linear(widen(x), widen(self.weight))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} to {self.weight.shape[0]}"


class StreamLogits(nn.Module):
    """scale · (rms(X)·Wᵀ) + base over the flattened streams: logits in groups, with one scale for each group.

    The RMS is one number per token, without gain. `start` holds the initial base of every group, `alpha` the initial
    scale.
    """

    def __init__(self, streams: int, dim: int, start: Sequence[Sequence[float]], *, alpha: float, eps: float):
        super().__init__()
        self.start, self.alpha, self.eps = [list(group) for group in start], alpha, eps
        self.sizes = [len(group) for group in start]
        self.project = MixProjection(streams * dim, sum(self.sizes))
        self.base = nn.Parameter(torch.empty(sum(self.sizes), dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(len(self.sizes), dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        set_values_(self.base, torch.tensor([value for group in self.start for value in group], device="cpu"))
        nn.init.constant_(self.scale, self.alpha)

    def forward(self, state: torch.Tensor, kernels: str = "reference") -> tuple[torch.Tensor, ...]:
        """(state, logits of every group); go on with this state, as with that of `StreamRead.coefficients`."""
        flat, weight = state.flatten(-2), self.project.weight
        if fuses_projection(kernels, flat, weight):
            flat, found = normalised_projection(flat, weight, self.eps, kernels=kernels)
            state = flat.view(state.shape)
        else:
            found = self.project(rms_norm(flat, self.eps))
        return state, *self.groups(found)

    def groups(self, found: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The logits of every group, given rms(X)·Wᵀ."""
        # One product and one sum for all groups, which are nodes of a graph at every sublayer.
        scales = [scale.expand(size) for scale, size in zip(torch.split(widen(self.scale), 1), self.sizes, strict=True)]
        return torch.split(torch.cat(scales) * found + widen(self.base), self.sizes, dim=-1)

    def first_group(self, constant: float) -> DynamicRead:
        """The weights σ(logit) + constant of the streams, from the logits of the first group."""
        size = self.sizes[0]
        scale, base = widen(self.scale)[0].expand(size), widen(self.base)[:size]
        return DynamicRead(self.project.weight, self.eps, scale, base, "sigmoid", inside=True, constant=constant)


def weighted_sum(weights: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Σ_j weights_j · state_j over the streams: (..., n) and (..., n, D) give (..., D)."""
    return (weights.unsqueeze(-1) * state).sum(-2)


def mix_streams(matrix: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """matrixᵀ·state: stream t of the result is Σ_s matrix[s, t] · state_s. The sum is over the **first** index."""
    with full_precision(state):
        return matrix.transpose(-1, -2) @ state


def add_update(state: torch.Tensor, weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """state_t + weights_t · update for every stream t."""
    return state + weights.unsqueeze(-1) * update.unsqueeze(-2)


def part_of_step(state: torch.Tensor, mixed: torch.Tensor, dt: nn.Module) -> torch.Tensor:
    """(1 − dt)·state + dt·mixed: a refined step goes a part of the way."""
    return mixed if isinstance(dt, nn.Identity) else state + dt(mixed - state)


def mixing_matrix(matrix: torch.Tensor, dt: nn.Module) -> torch.Tensor:
    """What a step multiplies the streams by from the left: matrixᵀ, or (1 − dt)·1 + dt·matrixᵀ for a refined step."""
    return _refined(matrix, dt).mT


def _refined(matrix: torch.Tensor, dt: nn.Module) -> torch.Tensor:
    return part_of_step(torch.eye(matrix.shape[-1]).to(matrix), matrix, dt)


@torch.no_grad()
def set_values_(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Copy values into a parameter, which may be sharded (FSDP2)."""
    target: Any = parameter
    if hasattr(target, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        values = distribute_tensor(values.to(target.device), target.device_mesh, target.placements)
    target.copy_(values)


def mean_stream(state: torch.Tensor) -> torch.Tensor:
    """The mean of the streams, (..., n, D) → (..., D)."""
    return widen(state).mean(-2).to(state.dtype)


def full_precision(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Context manager that turns autocast off."""
    kind = x.device.type
    # Not on the meta device, which autocast does not know; by name, because torch 2.11 cannot compile the question.
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)
