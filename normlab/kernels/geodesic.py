"""The geodesic step (GeoNorm, arXiv 2601.22095): move along the great circle through x in the update's direction."""

# torch annotates autograd functions, custom operators and some tensor methods only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any, Literal

import torch

from normlab import geometry
from normlab.errors import NormLabError, unknown
from normlab.kernels import backends
from normlab.norms import widen

Order = Literal["clamp-first", "decay-first"]
"""Whether the angle ‖v‖/‖x‖ is clamped before or after it is multiplied by the decay factor."""

ORDERS: tuple[Order, ...] = ("clamp-first", "decay-first")

SMOOTH = 1e-3
"""The learned offset b fades in below this angle: b itself would make the map discontinuous at a zero update."""

NO_STATE = 1e-12
"""A state shorter than this is returned unchanged: it has no direction."""

FLOOR = 1e-20
"""Lower limit of t² in the clamp c/t. At far smaller values the derivative of c/t is infinite, and 0 · ∞ is NaN."""

Scalar = torch.Tensor | float


def geodesic_step(
    x: torch.Tensor,
    g: torch.Tensor,
    factor: torch.Tensor | float,
    max_angle: float,
    *,
    a: torch.Tensor | float | None = None,
    b: torch.Tensor | float | None = None,
    second_clamp: bool = True,
    order: Order = "clamp-first",
    portion: float = 1.0,
    kernels: str = "auto",
) -> torch.Tensor:
    """x' = cos θ · x + sin θ · ‖x‖ · v/‖v‖, with v the component of g orthogonal to x, on the last dimension.

    With t = ‖v‖/‖x‖ and c = `max_angle`, the angle is, by `order`:

    clamp-first   θ = min(factor · (a · min(t, c) + b), c)
    decay-first   θ = min(a · min(factor · t, c) + b, c)

    The outer clamp is applied if `second_clamp` is set; without `a` and `b` the map a·θ + b is the identity. For small
    t the offset is b · t/√(t² + 1e-6) in place of b. The angle is multiplied by `portion`: 1/m if a step is divided
    into m.

    Everything is a smooth function of t² = (‖v‖/‖x‖)² (θ = ρ·t, and x' = cos θ · x + ρ · sinc θ · v), so the gradient
    at a zero update is the tangent part of the upstream gradient: neither NaN, as ‖v‖ in a denominator gives, nor zero.
    """
    shape = (max_angle, second_clamp, _decay_first(order), portion)
    if _fused(kernels, x, g, factor, a, b):
        return _Step.apply(x, g, *_scalars(x, factor, a, b), *shape, x.dtype)
    return _reference(x, g, factor, a, b, *shape)


def geodesic_pair(
    x: torch.Tensor,
    g: torch.Tensor,
    factor: torch.Tensor | float,
    max_angle: float,
    *,
    a: torch.Tensor | float | None = None,
    b: torch.Tensor | float | None = None,
    second_clamp: bool = True,
    order: Order = "clamp-first",
    portion: float = 1.0,
    input_dtype: torch.dtype | None = None,
    kernels: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`geodesic_step` with two equal outputs: the residual stream, and the input of the next sublayer.

    The backward kernel adds up their two gradients, which saves a separate addition in memory. The second output has
    `input_dtype`, by default that of `x`.
    """
    shape = (max_angle, second_clamp, _decay_first(order), portion)
    if _fused(kernels, x, g, factor, a, b):
        return _Pair.apply(x, g, *_scalars(x, factor, a, b), *shape, input_dtype or x.dtype)
    y = _reference(x, g, factor, a, b, *shape)
    return y, y.to(input_dtype or x.dtype)


def _decay_first(order: str) -> bool:
    if order not in ORDERS:
        raise unknown("order of a geodesic step", order, ORDERS)
    return order == "decay-first"


def _reference(
    x: torch.Tensor,
    g: torch.Tensor,
    factor: Scalar,
    a: Scalar | None,
    b: Scalar | None,
    max_angle: float,
    second_clamp: bool,
    decay_first: bool,
    portion: float,
) -> torch.Tensor:
    state, update = widen(x), widen(g)
    radius = geometry.norm(state)
    alive = radius > NO_STATE
    inverse = torch.where(alive, radius, torch.ones_like(radius)).reciprocal()
    direction = state * inverse
    turn = update * inverse
    turn = turn - (direction * turn).sum(-1, keepdim=True) * direction
    square = turn.square().sum(-1, keepdim=True)
    rate = angle_rate(square, factor, a, b, max_angle, decay_first)
    if second_clamp:
        rate = torch.minimum(rate, _cap(square, max_angle))
    if portion != 1.0:
        rate = portion * rate
    angle_square = rate.square() * square
    # x cos θ as x − x (1 − cos θ): rounding cos θ itself would bias every step in the same direction.
    moved = state - geometry.versine_sqrt(angle_square) * state
    moved = moved + rate * geometry.sinc_sqrt(angle_square) * radius * turn
    return torch.where(alive, moved, state).to(x.dtype)


def angle_rate(
    square: torch.Tensor, factor: Scalar, a: Scalar | None, b: Scalar | None, max_angle: float, decay_first: bool
) -> torch.Tensor:
    """θ/t before the second clamp, as a function of t²: finite at zero."""
    rate = _cap(square, max_angle).clamp_max(factor if decay_first else 1.0)
    if a is not None:
        rate = a * rate
    if b is not None:
        rate = rate + b * torch.rsqrt(square + SMOOTH**2)
    return rate if decay_first else factor * rate


def _cap(square: torch.Tensor, max_angle: float) -> torch.Tensor:
    """max_angle / t; large but finite at t = 0."""
    return max_angle * torch.rsqrt(square.clamp_min(FLOOR))


def _fused(kernels: str, x: torch.Tensor, g: torch.Tensor, factor: Scalar, a: Scalar | None, b: Scalar | None) -> bool:
    """Whether to use the Triton kernel; raises with the reason if it was requested and cannot run."""
    if any(hasattr(tensor, "full_tensor") for tensor in (x, g, a, b)):
        return False  # a distributed tensor: its operators are torch's own
    if backends.choose(kernels, x) == "reference":
        return False
    reason = _unfit(x, g, factor, a, b)
    if reason is not None and kernels == "triton":
        raise NormLabError(f"kernels='triton' cannot take this geodesic step: {reason}; use kernels='reference'")
    return reason is None


def _unfit(x: torch.Tensor, g: torch.Tensor, factor: Scalar, a: Scalar | None, b: Scalar | None) -> str | None:
    if x.shape != g.shape:
        return f"state and update differ in shape, {tuple(x.shape)} and {tuple(g.shape)}"
    if g.dtype == torch.float64:
        return "the update is float64"
    if isinstance(factor, torch.Tensor) and factor.requires_grad:
        return "the factor needs a gradient"
    if any(isinstance(scalar, torch.Tensor) and scalar.numel() != 1 for scalar in (factor, a, b)):
        return "factor, a and b must be single numbers"
    return None


def _scalars(x: torch.Tensor, *scalars: Scalar | None) -> tuple[torch.Tensor | None, ...]:
    """Each as a one-element tensor on the device of `x`, which a kernel can read without a host synchronisation."""
    return tuple(None if scalar is None else _scalar(scalar, x.device) for scalar in scalars)


def _scalar(scalar: Scalar, device: torch.device) -> torch.Tensor:
    if isinstance(scalar, torch.Tensor):
        return scalar.to(device)
    return torch.full((), scalar, dtype=torch.float32, device=device)


_STEP = (
    "Tensor x, Tensor g, Tensor factor, Tensor? a, Tensor? b, "
    "float max_angle, bool second_clamp, bool decay_first, float portion"
)


@torch.library.custom_op(
    "normlab::geodesic_forward", mutates_args=(), schema=f"({_STEP}, ScalarType input_dtype) -> (Tensor y, Tensor seen)"
)
def _forward_op(
    x: torch.Tensor,
    g: torch.Tensor,
    factor: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    max_angle: float,
    second_clamp: bool,
    decay_first: bool,
    portion: float,
    input_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, y in `input_dtype`), the second empty if that is the dtype of `x`: an operator returns no tensor twice."""
    from normlab.kernels.fused import geodesic

    return geodesic.forward(x, g, factor, a, b, max_angle, second_clamp, decay_first, portion, input_dtype)


@_forward_op.register_fake
def _(
    x: torch.Tensor,
    g: torch.Tensor,
    factor: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    max_angle: float,
    second_clamp: bool,
    decay_first: bool,
    portion: float,
    input_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape if input_dtype != x.dtype else 0, dtype=input_dtype)


@torch.library.custom_op(
    "normlab::geodesic_backward",
    mutates_args=(),
    schema=f"({_STEP}, Tensor? d_state, Tensor? d_input) -> (Tensor dx, Tensor dg, Tensor scalars)",
)
def _backward_op(
    x: torch.Tensor,
    g: torch.Tensor,
    factor: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    max_angle: float,
    second_clamp: bool,
    decay_first: bool,
    portion: float,
    d_state: torch.Tensor | None,
    d_input: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from normlab.kernels.fused import geodesic

    return geodesic.backward(x, g, factor, a, b, max_angle, second_clamp, decay_first, portion, d_state, d_input)


@_backward_op.register_fake
def _(
    x: torch.Tensor, g: torch.Tensor, factor: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wanted = sum(scalar is not None for scalar in (a, b))
    return x.new_empty(x.shape), g.new_empty(g.shape), x.new_empty((wanted,), dtype=torch.float32)


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise NormLabError("the fused geodesic step has no second derivative; use kernels='reference'")


_backward_op.register_autograd(_no_second_derivative)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        x: torch.Tensor,
        g: torch.Tensor,
        factor: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        max_angle: float,
        second_clamp: bool,
        decay_first: bool,
        portion: float,
        input_dtype: torch.dtype,
    ) -> Any:
        return _forward_op(x, g, factor, a, b, max_angle, second_clamp, decay_first, portion, input_dtype)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, ctx.shape = inputs[:5], inputs[5:9]
        # The gradient of an unused output is then None, not a tensor of zeros.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        d_state, d_input = grads if len(grads) == 2 else (grads[0], None)
        if d_state is None and d_input is None:
            return (None,) * 10
        x, g, factor, a, b = ctx.saved_tensors
        dx, dg, scalars = _backward_op(x, g, factor, a, b, *ctx.shape, d_state, d_input)
        rest = iter(scalars.unbind(0))
        da, db = (None if scalar is None else next(rest).to(scalar.dtype).view_as(scalar) for scalar in (a, b))
        return dx, dg, None, da, db, None, None, None, None, None


class _Pair(_Step):
    @staticmethod
    def forward(
        x: torch.Tensor,
        g: torch.Tensor,
        factor: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        max_angle: float,
        second_clamp: bool,
        decay_first: bool,
        portion: float,
        input_dtype: torch.dtype,
    ) -> Any:
        y, seen = _forward_op(x, g, factor, a, b, max_angle, second_clamp, decay_first, portion, input_dtype)
        return y, y.view_as(y) if input_dtype == x.dtype else seen
