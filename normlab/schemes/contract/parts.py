"""Building blocks of a residual step: reads, writes, and `Step`, which combines them with norms and scales.

A residual step around one sublayer (a branch) has three places that a scheme fills with modules: `read` (what the
branch receives as its input), `shape` (applied to the branch's output) and `write` (how the residual stream is
updated):

    state ──┬── read ── branch ── shape ──┐
            └──────────────────────────write── next state

A `read` whose `write` needs more than the update returns a tuple: the branch's input, then what `write` receives as
further arguments (`split_read`). So coefficients that depend on the state are computed once a step.

Every module also states its `rms_bound`, the largest RMS that it can return. The bound of a whole network is composed
from these, so no scheme has to derive its own.
"""

# torch annotates some tensor functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from normlab import geometry
from normlab.errors import NormLabError
from normlab.kernels import backends
from normlab.kernels.residual import Affine, residual_step
from normlab.norms import LayerNorm, Norm, RMSNorm, autocast_dtype, widen
from normlab.schemes.contract.bounds import BranchBound, rms_bound_of
from normlab.schemes.contract.scales import BoundedSequential, ConstantScale, LearnedScale, factor, tensor_of

Branch = Callable[[torch.Tensor], torch.Tensor]
"""A sublayer (attention or MLP) as a callable: takes its input, returns the update to the residual stream."""

Seen = torch.Tensor | tuple[torch.Tensor, ...]
"""What a `read` returns: the branch's input, or a tuple of it and of what the step's `write` receives."""


class ToSphere(nn.Module):
    """Projects onto a sphere: radius · x/‖x‖, with radius √dim (unit RMS) by default; zero with zero gradient at 0."""

    def __init__(self, dim: int, radius: float | None = None):
        super().__init__()
        self.dim, self.radius = dim, math.sqrt(dim) if radius is None else radius

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (geometry.unit(widen(x)) * self.radius).to(x.dtype)

    def rms_bound(self, rms_in: float) -> float:
        return self.radius / math.sqrt(self.dim)


def split_read(seen: Seen) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """(the branch's input, what the read hands to the write of its step)."""
    return (seen[0], seen[1:]) if isinstance(seen, tuple) else (seen, ())


class Write(nn.Module):
    """Base class of the ways to add an update to the residual stream: `write(state, update)` returns the next state.

    The result has the state's dtype. If the step's `read` returns a tuple, its further tensors follow the update.
    """

    linear = False
    """True if the backward pass needs neither state nor update."""

    same_gradient = False
    """True if state and update receive the same gradient, so that one tensor serves both."""

    keeps_norm = False
    """True if the write does not change the length of a token's state."""

    def forward(self, state: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def mixing(self, *carry: torch.Tensor) -> torch.Tensor | None:
        """The matrix (..., n, n) by which a write multiplies n streams, given what the read handed on; None if none."""
        return None

    def clamped(self, state: torch.Tensor, update: torch.Tensor) -> torch.Tensor | None:
        """A boolean for each token: whether a clamp shortened its step. None for writes without a clamp."""
        return None

    def write_and_read(
        self,
        state: torch.Tensor,
        update: torch.Tensor,
        shape: nn.Module,
        read: nn.Module,
        kernels: str,
        *carry: torch.Tensor,
    ) -> tuple[torch.Tensor, Seen]:
        """Apply the update and compute the next branch's input: returns (next state, read(next state)).

        `update` is the branch's output, before `shape`; `carry` is what this step's read handed on. A subclass that has
        a fused kernel for these operations overrides this method; the result must be the same.
        """
        state = self(state, shape(update), *carry)
        return state, read(state)

    def rms_bound(self, state: float, update: float) -> float:
        """Largest RMS of the next state, given the largest RMS of state and update."""
        return math.inf


class _Residual(Write):
    """A weighted sum, optionally normalised: one fused kernel applies it together with `shape` and `read`."""

    def terms(self) -> tuple[nn.Module, nn.Module, Norm | None]:
        """(factor on the state, factor on the update, norm of the sum or None)."""
        raise NotImplementedError

    def write_and_read(
        self,
        state: torch.Tensor,
        update: torch.Tensor,
        shape: nn.Module,
        read: nn.Module,
        kernels: str,
        *carry: torch.Tensor,
    ) -> tuple[torch.Tensor, Seen]:
        keep, step, norm = self.terms()
        before, at, behind = affine_of(shape), affine_of(norm), affine_of(read)
        if backends.choose(kernels, state) != "triton" or before is None or at is None or behind is None:
            return super().write_and_read(state, update, shape, read, kernels, *carry)
        return residual_step(
            state,
            update,
            keep=tensor_of(keep),
            step=tensor_of(step),
            shape=before[0],
            write=at[0],
            read=behind[0],
            scale=behind[1],
            input_dtype=input_dtype(read, state),
            kernels=kernels,
        )


def affine_of(part: nn.Module | None) -> tuple[Affine | None, torch.Tensor | None] | None:
    """(norm or scale, constant factor) as the kernel's arguments; None for a module that the kernel does not cover."""
    if part is None or isinstance(part, nn.Identity):
        return None, None
    if isinstance(part, Norm) and type(part) in _NORM_KINDS:
        return Affine(_NORM_KINDS[type(part)], part.weight, part.bias, part.eps, part.offset), None
    if isinstance(part, LearnedScale) and part.weight.numel() > 1:
        return Affine("scale", part.value()), None
    if isinstance(part, BoundedSequential) and len(part) == 2:
        norm, constant = affine_of(part[0]), part[1]
        if norm is not None and norm[0] is not None and isinstance(constant, ConstantScale):
            return norm[0], constant.tensor
    return None


_NORM_KINDS: dict[type, str] = {RMSNorm: "rms", LayerNorm: "layer"}


def read_state(state: torch.Tensor, read: nn.Module, kernels: str) -> tuple[torch.Tensor, Seen]:
    """Returns (state, read(state)), for a norm with one kernel whose backward pass adds up both gradients.

    A module with kernels of its own has a method `read_state(state, kernels)`.
    """
    own = getattr(read, "read_state", None)
    if own is not None:
        return own(state, kernels)
    found = affine_of(read)
    if backends.choose(kernels, state) != "triton" or found is None or found[0] is None:
        return state, read(state)
    dtype = input_dtype(read, state)
    return residual_step(state, None, read=found[0], scale=found[1], input_dtype=dtype, kernels=kernels)


def input_dtype(read: nn.Module, state: torch.Tensor) -> torch.dtype:
    """The dtype in which a fused step hands over what `read` returns: the state's, or autocast's if the branch casts.

    Under autocast a linear layer casts its input, and the gradient of it back. A fused step that writes the input and
    reads its gradient in autocast's dtype saves these two passes over memory. Values are the same, up to the order in
    which a compiler sums along a row.
    """
    narrow = autocast_dtype(state)
    # The branch is asked last: a graph that did not ask serves the last block, whose exit has none.
    if narrow is None or state.dtype != torch.float32 or not getattr(read, "branch_casts", False):
        return state.dtype
    return narrow


class WriteTwice(Write):
    """A write with a kernel of its own that returns the next state twice: for the stream, and for the next branch.

    The backward kernel adds up their two gradients.
    """

    def write_twice(
        self, state: torch.Tensor, update: torch.Tensor, input_dtype: torch.dtype, kernels: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(next state, the same in `input_dtype`), by the fused kernel."""
        raise NotImplementedError

    def write_and_read(
        self,
        state: torch.Tensor,
        update: torch.Tensor,
        shape: nn.Module,
        read: nn.Module,
        kernels: str,
        *carry: torch.Tensor,
    ) -> tuple[torch.Tensor, Seen]:
        if backends.choose(kernels, state) != "triton" or not isinstance(shape, nn.Identity):
            return super().write_and_read(state, update, shape, read, kernels, *carry)
        plain = isinstance(read, nn.Identity)
        dtype = input_dtype(read, state) if plain else state.dtype
        state, seen = self.write_twice(state, update, dtype, kernels)
        return (state, seen) if plain else read_state(state, read, kernels)


class Add(_Residual):
    """x + step · g."""

    linear = True

    def __init__(self, step: float = 1.0):
        super().__init__()
        self.step = factor(step)
        self.same_gradient = step == 1.0

    def terms(self) -> tuple[nn.Module, nn.Module, Norm | None]:
        return nn.Identity(), self.step, None

    def forward(self, state: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return (widen(state) + self.step(widen(update))).to(state.dtype)

    def rms_bound(self, state: float, update: float) -> float:
        return state + rms_bound_of(self.step, update)


class AddNorm(_Residual):
    """N(keep · x + step · g)."""

    def __init__(self, norm: Norm, keep: float = 1.0, step: float = 1.0):
        super().__init__()
        self.norm, self.keep, self.step = norm, factor(keep), factor(step)
        self.same_gradient = keep == step

    def terms(self) -> tuple[nn.Module, nn.Module, Norm | None]:
        return self.keep, self.step, self.norm

    def forward(self, state: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return self.norm(self.keep(widen(state)) + self.step(widen(update))).to(state.dtype)

    def rms_bound(self, state: float, update: float) -> float:
        return self.norm.rms_bound(rms_bound_of(self.keep, state) + rms_bound_of(self.step, update))


def call_branch(branch: Branch, x: torch.Tensor) -> torch.Tensor:
    """Call a branch and check that it returns one tensor of the shape of its input."""
    # A user's module may return anything, whatever its annotation says.
    update: Any = branch(x)
    if not isinstance(update, torch.Tensor):
        raise NormLabError(
            f"a branch must return one tensor, got {type(update).__name__}; "
            "wrap it in a module that returns its update alone, attention(x)[0]"
        )
    if update.shape != x.shape:
        raise NormLabError(
            f"a branch must keep the shape: it was given {tuple(x.shape)} and returned {tuple(update.shape)}"
        )
    return update


class Step(nn.Module):
    """The residual step of one sublayer: write(x, shape(branch(read(x)))).

    Blocks call `read`, `shape` and `write` themselves, so that a write can share a kernel with the next read; a block
    with a hook on one of its steps calls its steps instead. Only the steps of a parallel block, which share one write,
    never run as modules: hook their `read`, `shape` and `write`.
    """

    def __init__(self, write: Write, *, read: nn.Module | None = None, shape: nn.Module | None = None):
        super().__init__()
        self.read = read or nn.Identity()
        self.shape = shape or nn.Identity()
        self.write = write

    def update(self, state: torch.Tensor, branch: Branch) -> torch.Tensor:
        """The update that `write` receives: shape(branch(read(state)))."""
        return self.shape(call_branch(branch, split_read(self.read(state))[0]))

    def forward(self, state: torch.Tensor, branch: Branch, onto: torch.Tensor | None = None) -> torch.Tensor:
        """The next state. The step reads `state` and writes onto the same, or onto another state."""
        x, carry = split_read(self.read(state))
        return self.write(state if onto is None else onto, self.shape(call_branch(branch, x)), *carry)

    def update_bound(self, state: float, branch: BranchBound) -> float:
        """Largest RMS of the update, given the largest RMS of the state."""
        return rms_bound_of(self.shape, branch(rms_bound_of(self.read, state)))

    def rms_bound(self, state: float, branch: BranchBound) -> float:
        """Largest RMS of the next state, given the largest RMS of the state."""
        return self.write.rms_bound(state, self.update_bound(state, branch))

    def traffic(self, streams: int = 1) -> tuple[int, int]:
        """Memory traffic of a fused step in vectors per token, (forward, backward).

        Forward: state and update are read; the next state is written, and its normalised copy if the next branch reads
        through a norm. Backward: what the write or the norms need again is read, two gradients come in (from the next
        branch and the next step), and one or two gradients go out. A read whose kernels pass over the state once more
        has the number of vectors that they move, (forward, backward), as `further_traffic(streams)`.
        """
        reads = not isinstance(self.read, nn.Identity)
        own = getattr(self.read, "further_traffic", None)
        further: tuple[int, int] = (0, 0) if own is None else own(streams)
        shapes = not isinstance(self.shape, nn.Identity)
        forward = 2 * streams + 1 + reads
        kept = (reads + shapes) if self.write.linear else 1 + streams
        out = streams if self.write.same_gradient and not shapes else 1 + streams
        return forward + further[0], kept + (1 + streams) + out + further[1]
