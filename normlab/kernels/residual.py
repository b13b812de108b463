"""Fused residual addition and normalisation, the step that most schemes are made of.

    u      = shape(g)                 nothing, a norm, or a learned scale
    s      = keep · x + step · u
    state  = write(s)                 nothing, or a norm
    input  = scale · read(state)      nothing, or a norm: the next branch's input

Pre-Norm has a read norm, Post-Norm and its variants a write norm, Peri-LN shape and read norms, KEEL write and read
norms; a norm on its own is a read norm without an update. State and input are two outputs. One backward kernel takes
both of their gradients, so no separate addition is needed where they join. The input may have a dtype of its own: under
autocast the branch would cast it in a pass over memory, and its gradient in another.
"""

# torch annotates autograd functions, custom operators and some tensor methods only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normlab.errors import NormLabError
from normlab.kernels import backends
from normlab.norms import layer_norm, rms_norm, widen


class Affine(NamedTuple):
    """A norm or a scale in one of the three places: its kind and its parameters."""

    kind: str
    """rms, layer, or scale (gain without normalisation)."""
    gain: Tensor | None
    bias: Tensor | None = None
    eps: float = 0.0
    offset: bool = False
    """The gain is stored as an offset from 1."""


def apply(affine: Affine | None, x: Tensor) -> Tensor:
    """Apply a norm or scale in plain PyTorch; returns fp32 for half-precision input."""
    x = widen(x)
    if affine is None:
        return x
    y = {"rms": rms_norm, "layer": layer_norm}[affine.kind](x, affine.eps) if affine.kind != "scale" else x
    if affine.gain is not None:
        y = y * (widen(affine.gain) + 1.0 if affine.offset else widen(affine.gain))
    return y if affine.bias is None else y + widen(affine.bias)


def residual_step(
    x: Tensor,
    g: Tensor | None,
    *,
    keep: Tensor | None = None,
    step: Tensor | None = None,
    shape: Affine | None = None,
    write: Affine | None = None,
    read: Affine | None = None,
    scale: Tensor | None = None,
    input_dtype: torch.dtype | None = None,
    kernels: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Add an update to the residual stream, with norms around it: returns the next state and the next branch's input.

        state = write(keep · x + step · shape(g));  input = scale · read(state)

    `keep`, `step` and `scale` are zero-dimensional tensors; None stands for 1. With `g` None only `read` is applied.
    The input has `input_dtype`, by default the dtype of the state, which is that of `x`.
    """
    input_dtype = input_dtype or x.dtype
    if backends.choose(kernels, x) == "triton" and (g is None or g.dtype != torch.float64):
        affines = [_flat(affine) for affine in (shape, write, read)]
        # A kernel cannot read scalars from host memory.
        keep, step, scale = (None if c is None else c.to(x.device) for c in (keep, step, scale))
        return _Fused.apply(x, g, keep, step, scale, *affines[0][0], *affines[1][0], *affines[2][0],
                            tuple(affine[1] for affine in affines), input_dtype)  # fmt: skip
    state = x if g is None else weighted(keep, widen(x)) + weighted(step, apply(shape, g))
    state = apply(write, state).to(x.dtype) if g is not None else x
    return state, (state if read is None else weighted(scale, apply(read, state))).to(input_dtype)


def weighted(weight: Tensor | None, x: Tensor) -> Tensor:
    return x if weight is None else weight * x


class _Place(NamedTuple):
    """The fields of an `Affine` that are not tensors, as types that an operator accepts."""

    kind: int
    eps: float
    offset: bool


KINDS = {"rms": 1, "layer": 2, "scale": 3}


def _flat(affine: Affine | None) -> tuple[tuple[Tensor | None, Tensor | None], _Place]:
    if affine is None:
        return (None, None), _Place(0, 0.0, False)
    return (affine.gain, affine.bias), _Place(KINDS[affine.kind], affine.eps, affine.offset)


@torch.library.custom_op("normlab::residual_forward", mutates_args=())
def _forward(
    x: Tensor,
    g: Tensor | None,
    constants: list[Tensor | None],
    affines: list[Tensor | None],
    kinds: list[int],
    eps: list[float],
    offsets: list[bool],
    input_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    from normlab.kernels.fused import residual

    return residual.forward(x, g, constants, affines, kinds, eps, offsets, input_dtype)


@_forward.register_fake
def _(
    x: Tensor,
    g: Tensor | None,
    constants: list[Tensor | None],
    affines: list[Tensor | None],
    kinds: list[int],
    eps: list[float],
    offsets: list[bool],
    input_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    state = x.new_empty(x.shape if g is not None else 0)
    return state, x.new_empty(x.shape if has_input(x, kinds, input_dtype) else 0, dtype=input_dtype)


def has_input(x: Tensor, kinds: Sequence[int], input_dtype: torch.dtype) -> bool:
    """Whether the branch's input is a tensor of its own, and not the state."""
    return bool(kinds[2]) or input_dtype != x.dtype


@torch.library.custom_op("normlab::residual_backward", mutates_args=())
def _backward(
    x: Tensor | None,
    g: Tensor | None,
    state: Tensor | None,
    constants: list[Tensor | None],
    affines: list[Tensor | None],
    kinds: list[int],
    eps: list[float],
    offsets: list[bool],
    d_state: Tensor | None,
    d_input: Tensor | None,
    state_dtype: torch.dtype,
    update_dtype: torch.dtype,
    separate: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from normlab.kernels.fused import residual

    return residual.backward(
        x, g, state, constants, affines, kinds, eps, offsets, d_state, d_input, state_dtype, update_dtype, separate
    )


@_backward.register_fake
def _(
    x: Tensor | None,
    g: Tensor | None,
    state: Tensor | None,
    constants: list[Tensor | None],
    affines: list[Tensor | None],
    kinds: list[int],
    eps: list[float],
    offsets: list[bool],
    d_state: Tensor | None,
    d_input: Tensor | None,
    state_dtype: torch.dtype,
    update_dtype: torch.dtype,
    separate: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    like = d_state if d_state is not None else d_input
    assert like is not None
    dx = torch.empty_like(like, dtype=state_dtype, memory_format=torch.contiguous_format)
    dg = torch.empty_like(dx, dtype=update_dtype) if separate else dx.new_empty(0)
    wanted = sum(affine is not None for affine in affines)
    return dx, dg, dx.new_empty((wanted, dx.shape[-1]), dtype=torch.float32)


class _Fused(torch.autograd.Function):
    """Autograd of the fused step. If state and input are equal, both view one tensor, each with its own gradient."""

    @staticmethod
    def forward(
        x: Tensor,
        g: Tensor | None,
        keep: Tensor | None,
        step: Tensor | None,
        scale: Tensor | None,
        sg: Tensor | None,
        sb: Tensor | None,
        wg: Tensor | None,
        wb: Tensor | None,
        rg: Tensor | None,
        rb: Tensor | None,
        places: tuple[_Place, ...],
        input_dtype: torch.dtype,
    ) -> Any:
        kinds, eps, offsets = ([place[i] for place in places] for i in range(3))
        state, seen = torch.ops.normlab.residual_forward(
            x, g, [keep, step, scale], [sg, sb, wg, wb, rg, rb], kinds, eps, offsets, input_dtype
        )
        state = x.view_as(x) if g is None else state
        return state, seen if has_input(x, [place.kind for place in places], input_dtype) else state.view_as(state)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, g, keep, step, scale, *affines, places, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.places, ctx.has_update = places, g is not None
        ctx.dtypes = x.dtype, x.dtype if g is None else g.dtype
        writes, reads, shapes = places[1].kind, places[2].kind, places[0].kind
        # Saved: only what cannot be recomputed for less memory traffic. With a write norm everything is recomputed from
        # x and g; a read norm needs the state that it read; a shape needs the update.
        kept_x = x if writes else None
        kept_state = (output[0] if ctx.has_update else x) if reads and not writes else None
        kept_g = g if shapes or writes else None
        ctx.save_for_backward(kept_x, kept_g, kept_state, keep, step, scale, *affines)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        d_state, d_input = grad_outputs
        if d_state is None and d_input is None:
            return (None,) * 13
        x, g, state, keep, step, scale, *affines = ctx.saved_tensors
        if torch.is_grad_enabled():
            raise NormLabError("the fused step has no second derivative; use kernels='reference'")
        kinds, eps, offsets = ([place[i] for place in ctx.places] for i in range(3))
        separate = ctx.has_update and (
            keep is not None or step is not None or bool(kinds[0]) or ctx.dtypes[0] != ctx.dtypes[1]
        )
        dx, dg, gains = torch.ops.normlab.residual_backward(
            x, g, state, [keep, step, scale], affines, kinds, eps, offsets, d_state, d_input, *ctx.dtypes, separate
        )
        rest = iter(gains.unbind(0))
        found = [None if a is None else next(rest).to(a.dtype) for a in affines]
        update = None if not ctx.has_update else dg if separate else dx
        return dx, update, None, None, None, *found, None, None
