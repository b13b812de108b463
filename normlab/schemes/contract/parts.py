"""The parts a step is made of.

A sublayer's step has three places: `read` (what the branch sees of the state), `shape` (what is done to the branch's
output on its own) and `write` (how the state takes the update). A scheme fills the places; most need nothing else:

    state ──┬── read ── branch ── shape ──┐
            └──────────────────────────write── next state

Every part also knows its `rms_bound`: the largest RMS it can return. A certificate for a whole network is the
composition of its parts' bounds, so no scheme has to derive its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from normlab import geometry
from normlab.errors import NormLabError
from normlab.kernels import backends
from normlab.kernels.residual import Affine, residual_step
from normlab.norms import LayerNorm, Norm, RMSNorm, widen

Branch = Callable[[torch.Tensor], torch.Tensor]
"""A sublayer: the normalised input in, the proposed update out."""

BranchBound = Callable[[float], float]
"""Largest RMS of a branch's output for an input of at most the given RMS."""


def unbounded(rms_in: float) -> float:
    """What is known of a branch whose weights were not looked at."""
    return math.inf


def rms_bound_of(part: nn.Module, rms_in: float) -> float:
    """The bound of a part; a part that states none has none."""
    if isinstance(part, nn.Identity):
        return rms_in
    bound = getattr(part, "rms_bound", unbounded)
    return bound(rms_in)


class ConstantScale(nn.Module):
    """Multiplies by a number that depends on depth.

    The number is a Python float, so it is right after a build on the meta device, and never part of a state dict.
    Compiled code must not see the float, or it would specialise on it and compile every block anew: it sees a
    zero-dimensional tensor instead, made again from the float whenever the module moves to another device.
    """

    def __init__(self, value: float):
        super().__init__()
        self.value = float(value)
        default = torch.get_default_device()
        self._tensor = _scalar(self.value, torch.device("cpu") if default.type == "meta" else default)

    def _apply(self, fn, recurse=True):
        device = fn(torch.empty(0, device=self._tensor.device)).device
        if device.type != "meta":
            self._tensor = _scalar(self.value, device)
        return super()._apply(fn, recurse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self._tensor

    @property
    def tensor(self) -> torch.Tensor:
        """The number as compiled code may see it."""
        return self._tensor

    def rms_bound(self, rms_in: float) -> float:
        return abs(self.value) * rms_in

    def extra_repr(self) -> str:
        return f"{self.value:.6g}"


def _scalar(value: float, device: torch.device) -> torch.Tensor:
    # fp64 costs nothing in one element: it never promotes a tensor that has dimensions.
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.full((), value, dtype=dtype, device=device)


def factor(value: float) -> nn.Module:
    """Multiplication by `value`; nothing at all where it is one."""
    return nn.Identity() if value == 1.0 else ConstantScale(value)


class LearnedScale(nn.Module):
    """Multiplies by a learned vector: `raw` holds `scaling`, the product is `init` (nGPT's parameter trick).

    An optimiser that takes steps of a fixed size moves the product by a relative `1/scaling` a step, so `scaling` sets
    its effective learning rate. With scaling = init the raw parameter is the product itself.
    """

    def __init__(self, dim: int | tuple[int, ...], init: float = 1.0, scaling: float | None = None):
        super().__init__()
        self.init, self.scaling = init, init if scaling is None else scaling
        self.weight = nn.Parameter(torch.empty(dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.scaling)

    def value(self) -> torch.Tensor:
        weight = widen(self.weight)
        return weight if self.init == self.scaling else weight * (self.init / self.scaling)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (widen(x) * self.value()).to(x.dtype)

    def rms_bound(self, rms_in: float) -> float:
        return float(self.value().detach().abs().max()) * rms_in

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, init={self.init:.4g}, scaling={self.scaling:.4g}"


class BoundedSequential(nn.Sequential):
    """Parts one after the other, bounded one after the other."""

    def rms_bound(self, rms_in: float) -> float:
        for part in self:
            rms_in = rms_bound_of(part, rms_in)
        return rms_in


def channel_factor(part: nn.Module | None) -> torch.Tensor | None:
    """What a part multiplies every channel by; None where it does anything else.

    It may as well multiply the rows of the matrix before it, of which there are far fewer than of activations.
    """
    if isinstance(part, LearnedScale):
        return part.value()
    if isinstance(part, ConstantScale):
        return part.tensor
    factors = [channel_factor(link) for link in part] if isinstance(part, BoundedSequential) else []
    known = [factor for factor in factors if factor is not None]
    return torch.stack(torch.broadcast_tensors(*known)).prod(0) if known and len(known) == len(factors) else None


class ToSphere(nn.Module):
    """√d · x/‖x‖, or x/‖x‖ with radius 1: puts an embedding where a scheme wants it. Zero stays zero, gradient too."""

    def __init__(self, dim: int, radius: float | None = None):
        super().__init__()
        self.dim, self.radius = dim, math.sqrt(dim) if radius is None else radius

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (geometry.unit(widen(x)) * self.radius).to(x.dtype)

    def rms_bound(self, rms_in: float) -> float:
        return self.radius / math.sqrt(self.dim)


class Write(nn.Module):
    """How the state takes an update. The result has the state's type."""

    linear = False
    """True when the write keeps nothing of its inputs for the backward pass."""

    same_gradient = False
    """True when state and update receive the same gradient, so that one tensor serves both."""

    keeps_norm = False
    """True when a token is as long after the write as it was before."""

    def forward(self, state: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def clamped(self, state: torch.Tensor, update: torch.Tensor) -> torch.Tensor | None:
        """For each token whether the step was cut short by a clamp; None where nothing clamps."""
        return None

    def write_and_read(
        self, state: torch.Tensor, update: torch.Tensor, shape: nn.Module, read: nn.Module, kernels: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(next state, what `read` makes of it), for an update as the branch returned it.

        A write that can take in the parts around it overrides this with one kernel; what it returns is the same.
        """
        state = self(state, shape(update))
        return state, read(state)

    def rms_bound(self, state: float, update: float) -> float:
        """Largest RMS of the next state, given the largest RMS of state and update."""
        return math.inf


class _Residual(Write):
    """A weighted sum, with or without a norm behind it: settled in one kernel with the parts around it."""

    def terms(self) -> tuple[nn.Module, nn.Module, Norm | None]:
        """(factor on the state, factor on the update, norm of the sum)."""
        raise NotImplementedError

    def write_and_read(
        self, state: torch.Tensor, update: torch.Tensor, shape: nn.Module, read: nn.Module, kernels: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keep, step, norm = self.terms()
        before, at, behind = _affine(shape), _affine(norm), _affine(read)
        if backends.choose(kernels, state) != "triton" or before is None or at is None or behind is None:
            return super().write_and_read(state, update, shape, read, kernels)
        return residual_step(
            state,
            update,
            keep=_tensor(keep),
            step=_tensor(step),
            shape=before[0],
            write=at[0],
            read=behind[0],
            scale=behind[1],
            kernels=kernels,
        )


def _tensor(constant: nn.Module) -> torch.Tensor | None:
    return constant.tensor if isinstance(constant, ConstantScale) else None


def _affine(part: nn.Module | None) -> tuple[Affine | None, torch.Tensor | None] | None:
    """(norm or scale, factor on it) as the kernel takes them; None where it cannot."""
    if part is None or isinstance(part, nn.Identity):
        return None, None
    if isinstance(part, Norm) and type(part) in _NORM_KINDS:
        return Affine(_NORM_KINDS[type(part)], part.weight, part.bias, part.eps, part.offset), None
    if isinstance(part, LearnedScale) and part.weight.numel() > 1:
        return Affine("scale", part.value()), None
    if isinstance(part, BoundedSequential) and len(part) == 2:
        norm, constant = _affine(part[0]), part[1]
        if norm is not None and norm[0] is not None and isinstance(constant, ConstantScale):
            return norm[0], constant.tensor
    return None


_NORM_KINDS: dict[type, str] = {RMSNorm: "rms", LayerNorm: "layer"}


def read_state(state: torch.Tensor, read: nn.Module, kernels: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(state, what `read` makes of it): a norm on its own, whose backward takes in both gradients."""
    found = _affine(read)
    if backends.choose(kernels, state) != "triton" or found is None or found[0] is None:
        return state, read(state)
    return residual_step(state, None, read=found[0], scale=found[1], kernels=kernels)


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
    """The branch's update, refused in one line if it is not one."""
    update = branch(x)
    if not isinstance(update, torch.Tensor):
        raise NormLabError(
            f"a branch must return one tensor, got {type(update).__name__}; "
            "wrap it so that it returns its update alone, e.g. lambda x: attention(x)[0]"
        )
    if update.shape != x.shape:
        raise NormLabError(
            f"a branch must keep the shape: it was given {tuple(x.shape)} and returned {tuple(update.shape)}"
        )
    return update


class Step(nn.Module):
    """One sublayer's step: write(x, shape(branch(read(x)))).

    Blocks call its parts, not the step, so that neighbours can settle together: hooks belong on read, shape and write.
    """

    def __init__(self, write: Write, *, read: nn.Module | None = None, shape: nn.Module | None = None):
        super().__init__()
        self.read = read or nn.Identity()
        self.shape = shape or nn.Identity()
        self.write = write

    def update(self, state: torch.Tensor, branch: Branch) -> torch.Tensor:
        """What the branch proposes at this state, ready to be written."""
        return self.shape(call_branch(branch, self.read(state)))

    def forward(self, state: torch.Tensor, branch: Branch) -> torch.Tensor:
        return self.write(state, self.update(state, branch))

    def update_bound(self, state: float, branch: BranchBound) -> float:
        return rms_bound_of(self.shape, branch(rms_bound_of(self.read, state)))

    def rms_bound(self, state: float, branch: BranchBound) -> float:
        return self.write.rms_bound(state, self.update_bound(state, branch))

    def traffic(self, streams: int = 1) -> tuple[int, int]:
        """Tensors of one token's width that a fused step has to move, forward and backward.

        Forward: the state and the update come in, the next state goes out, and its normalised copy where the next
        branch reads one. Backward: what the write or the norms need again, two gradients in (the next branch's and
        the next step's), and one or two gradients out.
        """
        reads = not isinstance(self.read, nn.Identity)
        shapes = not isinstance(self.shape, nn.Identity)
        forward = 2 * streams + 1 + reads
        kept = (reads + shapes) if self.write.linear else 1 + streams
        out = streams if self.write.same_gradient and not shapes else 1 + streams
        return forward, kept + (1 + streams) + out
