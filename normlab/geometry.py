"""Geometry of the sphere: tangent projection, exponential map, logarithm, distance and parallel transport.

The sphere is the one through the base point x: centre 0, radius ‖x‖, along the last dimension; leading dimensions are
batches and broadcast. The base point is the first argument. A tangent vector u is projected onto the tangent space at
the base point; of a second point y only the direction matters. Half precision is computed in float32 and returned in
the arguments' common dtype.

In degenerate cases values and gradients stay finite by these conventions:

- x = 0 has no sphere: `project` returns u, `exp` returns x, `log` and `distance` are 0.
- A zero vector has no direction: it takes the direction of the other point, so the angle is 0.
- y opposite to x (within rounding, 4 eps): every direction is shortest. The coordinate axis least aligned with x
  (the first of equals), projected at x, is chosen by `log` and `transport` alike; it does not depend on y.
- Width 1 is two points: tangents are 0, so is `log`, although the angle can be π.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch import Tensor

from normlab.errors import NormLabError

__all__ = [
    "angle",
    "distance",
    "exp",
    "log",
    "norm",
    "project",
    "sinc_sqrt",
    "transport",
    "unit",
    "versine_sqrt",
]

P = ParamSpec("P")

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Series terms per dtype: at the switch t = 1 the first term left out, differentiated twice, is n(n-1)/(2n + 1)!: 3e-11
# for n = 7 and 4e-21 for n = 11, both far below eps times the second derivative, 1/60.
_TERMS = {torch.float32: 7, torch.float64: 11}


def _check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _DTYPES:
        raise NormLabError(f"{name}: expected floating point (float16 to float64), got {tensor.dtype}; try .float()")


def _check_vectors(name: str, tensors: tuple[Tensor, ...]) -> None:
    for tensor in tensors:
        _check_dtype(name, tensor)
        if tensor.ndim == 0 or tensor.shape[-1] == 0:
            shape = tuple(tensor.shape)
            raise NormLabError(f"{name}: expected vectors along the last dimension, got shape {shape}; try (..., D)")
    if len({tensor.shape[-1] for tensor in tensors}) > 1:
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise NormLabError(f"{name}: last dimensions must be equal, got shapes {shapes}; try vectors of one width")


def _on_vectors(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Decorator that checks the vectors, computes in float32 at least and returns their common dtype."""
    name = function.__name__
    compute: Callable[..., Tensor] = function

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Tensor:
        tensors = (*args, *kwargs.values())
        _check_vectors(name, tensors)
        dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
        wide = [tensor.to(torch.promote_types(dtype, torch.float32)) for tensor in tensors]
        by_name = dict(zip(kwargs, wide[len(args) :], strict=True))
        return compute(*wide[: len(args)], **by_name).to(dtype)

    return checked


def sinc_sqrt(t: Tensor) -> Tensor:
    """sin √t / √t for t ≥ 0, elementwise, 1 at 0, with all derivatives finite there.

    A series Σ (-t)^k / (2k + 1)! below t = 1, the closed form in √t above.
    """
    _check_dtype("sinc_sqrt", t)
    work = t.to(torch.promote_types(t.dtype, torch.float32))
    inside = work < 1
    # Each branch gets a safe argument where it is not used: a NaN there would reach the gradient as 0 · NaN.
    near, root = torch.where(inside, work, 0.0), torch.where(inside, 1.0, work).sqrt()
    series = torch.ones_like(near)
    for n in range(2 * _TERMS[work.dtype] - 1, 1, -2):
        series = 1 - series * near / (n * (n - 1))
    return torch.where(inside, series, root.sin() / root).to(t.dtype)


def versine_sqrt(t: Tensor) -> Tensor:
    """1 - cos √t for t ≥ 0, elementwise, with full relative precision near 0, as 2 sin²(√t / 2)."""
    work = t.to(torch.promote_types(t.dtype, torch.float32))
    return (work / 2 * sinc_sqrt(work / 4).square()).to(t.dtype)


def _angle_over_sine(q: Tensor) -> Tensor:
    """Series of θ / sin θ in q = sin²(θ/2), for q ≤ 0.01: Σ q^k Π 2j / (2j + 1)."""
    series = torch.ones_like(q)
    for k in range(_TERMS[q.dtype] - 1, 0, -1):
        series = 1 + series * q * (2 * k / (2 * k + 1))
    return series


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def _nonzero(length: Tensor) -> Tensor:
    """A safe divisor: 1 in place of 0."""
    return torch.where(length == 0, 1.0, length)


@_on_vectors
def norm(x: Tensor) -> Tensor:
    """‖x‖ with the last dimension kept as 1; squares neither overflow nor underflow; the gradient at 0 is 0."""
    # The length does not depend on the scale, so the scale carries no gradient.
    scale = x.detach().abs().amax(-1, keepdim=True)
    scaled = torch.where(scale == 0, 1.0, x / _nonzero(scale))
    return scale * scaled.square().sum(-1, keepdim=True).sqrt()


@_on_vectors
def unit(x: Tensor) -> Tensor:
    """x / ‖x‖; at 0 the value and the gradient are 0."""
    length = norm(x)
    return torch.where(length == 0, 0.0, x / _nonzero(length))


def _tangent(a: Tensor, u: Tensor) -> Tensor:
    """u minus its component along the unit (or zero) vector a."""
    # Twice: one pass leaves eps ‖u‖ along a, which is not small beside the tangent part of a nearly radial u.
    once = u - _dot(a, u) * a
    return once - _dot(a, once) * a


def _directions(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors of x and y; a zero vector takes the direction of the other."""
    a, b = unit(x), unit(y)
    return torch.where(norm(x) == 0, b, a), torch.where(norm(y) == 0, a, b)


def _angle(a: Tensor, b: Tensor) -> Tensor:
    apart, together = norm(a - b), norm(a + b)
    # For equal directions any second argument gives the angle 0; atan2(0, 0) would have a NaN gradient.
    return 2 * torch.atan2(apart, torch.where(apart == 0, 1.0, together))


def _chosen_axis(a: Tensor) -> Tensor:
    """The unit tangent at a that is chosen as the direction to the antipode."""
    axis = torch.arange(a.shape[-1], device=a.device) == a.abs().argmin(-1, keepdim=True)
    return unit(_tangent(a, axis.to(a.dtype)))


def _heading(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(tangent at a towards b, of length sin θ, or the chosen axis at the antipode; mask of antipodal pairs)."""
    facing_away = _dot(a, b) < 0
    # b ∓ a has the same tangent part as b and is exact near a and near -a, where b itself would cancel.
    towards = _tangent(a, torch.where(facing_away, b + a, b - a))
    # Two normalisations and a projection leave rounding errors up to about 2 eps: below 4 eps there is no direction.
    antipodal = facing_away & (norm(towards) <= 4 * torch.finfo(a.dtype).eps)
    return torch.where(antipodal, _chosen_axis(a), towards), antipodal


@_on_vectors
def project(x: Tensor, u: Tensor) -> Tensor:
    """Tangent part of u at x, u - ⟨x̂, u⟩ x̂; u itself at x = 0."""
    return _tangent(unit(x), u)


@_on_vectors
def exp(x: Tensor, u: Tensor) -> Tensor:
    """The point at arc length ‖u‖ from x on the great circle along u (its tangent part): cos√t x + sinc√t u,
    t = ‖u‖² / ‖x‖². Angles may exceed π. They are limited to 1/eps radians, beyond which no digit is significant.
    """
    length = norm(x)
    radius = _nonzero(length)
    tangent = torch.where(length == 0, 0.0, project(x, u))
    # Limited so that t cannot overflow; a constant 1, and so without gradient, for every meaningful angle.
    held = (radius / torch.finfo(x.dtype).eps / norm(tangent)).clamp(max=1).detach()
    tangent = held * tangent
    t = (tangent / radius).square().sum(-1, keepdim=True)
    # x cos √t as x - x (1 - cos √t): rounding cos itself would bias every step in the same direction.
    return x - versine_sqrt(t) * x + sinc_sqrt(t) * tangent


@_on_vectors
def angle(x: Tensor, y: Tensor) -> Tensor:
    """Angle between x and y in [0, π], without the last dimension; the gradient at both ends is 0."""
    return _angle(*_directions(x, y)).squeeze(-1)


@_on_vectors
def distance(x: Tensor, y: Tensor) -> Tensor:
    """Arc length ‖x‖ · angle(x, y), without the last dimension; of y only the direction matters."""
    return norm(x).squeeze(-1) * angle(x, y)


@_on_vectors
def log(x: Tensor, y: Tensor) -> Tensor:
    """The shortest tangent u at x with exp(x, u) = y ‖x‖ / ‖y‖; the antipode is reached along the chosen axis."""
    a, b = _directions(x, y)
    heading, _ = _heading(a, b)
    q = (a - b).square().sum(-1, keepdim=True) / 4
    # θ / sin θ is 0/0 at x = y: a series keeps its derivatives of every order there.
    near = q < 0.01
    sine = torch.where(near, 1.0, _nonzero(norm(heading)))
    factor = torch.where(near, _angle_over_sine(torch.where(near, q, 0.0)), _angle(a, b) / sine)
    return norm(x) * factor * heading


@_on_vectors
def transport(x: Tensor, y: Tensor, u: Tensor) -> Tensor:
    """Parallel transport of u (its tangent part at x) along the shortest great circle to y: same length, tangent at y.

    Formula v - ⟨b, v⟩ / (1 + ⟨a, b⟩) (a + b) for unit a, b: the reflection of v along a + b, since ⟨a, v⟩ = 0.
    """
    a, b = _directions(x, y)
    heading, antipodal = _heading(a, b)
    v = _tangent(a, u)
    # Near the antipode a + b converges to the heading, so the choice made there continues the formula.
    mirror = unit(torch.where(antipodal, heading, a + b))
    return v - 2 * _dot(mirror, v) * mirror
