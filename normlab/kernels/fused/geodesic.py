"""Triton kernels: the geodesic step and its backward pass.

With r = ‖x‖, α = ⟨x,g⟩/r², v = g − αx and s = ‖v‖²/r², the step is y = x − V·x + K·v. Its row scalars V = 1 − cos θ
and K = ρ·sinc θ depend on s alone: θ² = q = ρ²·s, and ρ(s) is the angle map. For d = ∂L/∂y, û = x/r and w = v/r:

    E  = cos θ·⟨d,w⟩ − ρ·s·sinc θ·⟨d,û⟩                           (∂L/∂ρ)/r
    n  = 2·(E·ρ′(s) + ρ²·(ρ·sinc′(q)·⟨d,w⟩ − ½·sinc θ·⟨d,û⟩))     2·(∂L/∂s)/r
    dg = K·(d − ⟨d,û⟩·û) + n·w
    dx = d − V·d − α·dg − K·⟨d,û⟩·w − n·s·û

Squares are summed without scaling: rows are correct for 1e-12 < ‖x‖ < 1e18 and ‖g‖ < 1e18. A shorter x is returned as
it is.
"""

# Triton's language is not Python's: launch options and compile-time values look wrong to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from normlab.kernels.fused import launch, partials
from normlab.kernels.geodesic import FLOOR, NO_STATE, SMOOTH


@triton.jit
def _sinc(q):
    """sin √q / √q for 0 ≤ q ≤ π²: a series, truncated where the next term is below 2e-10."""
    series = tl.full(q.shape, 1.0, tl.float32)
    for i in tl.static_range(9):
        series = 1.0 - series * q * (1.0 / ((19 - 2 * i) * (18 - 2 * i)))
    return series


@triton.jit
def _rotation(q):
    """sinc θ and 1 − cos θ for θ = √q, any angle."""
    angle = tl.sqrt(q)
    turns = tl.floor(angle * 0.15915494309189535 + 0.5)
    # 2π in two parts, the first with few enough bits for `turns` times it to be exact.
    rest = angle - turns * 6.28125 - turns * 0.0019353071795864769
    square = tl.where(turns > 0.0, rest * rest, q)
    near = _sinc(square)
    sinc = tl.where(turns > 0.0, near * rest / tl.maximum(angle, 1.0), near)
    half = _sinc(0.25 * square)
    return sinc, 0.5 * square * half * half


@triton.jit
def _sinc_slope(q, sinc, cosine):
    """d sinc √q / dq: a series below q = 1, where the closed form cancels."""
    series = -1.0 / 6 + q * (1.0 / 60 - q * (1.0 / 1680 - q * (1.0 / 90720 - q * (1.0 / 7983360 - q / 1037836800.0))))
    return tl.where(q < 1.0, series, (cosine - sinc) / (2.0 * tl.maximum(q, 1.0)))


@triton.jit
def _scalar(pointer, present: tl.constexpr, default: tl.constexpr):
    value = tl.full([], default, tl.float32)
    if present:
        value = tl.load(pointer).to(tl.float32)
    return value


@triton.jit
def _angle_map(
    square, factor, a, b, max_angle, portion,
    FLOOR: tl.constexpr, SMOOTH: tl.constexpr, SECOND: tl.constexpr, DECAY_FIRST: tl.constexpr,
):  # fmt: skip
    """ρ, dρ/ds, the factors of `a` and `b` in ρ, and their share of the gradient at the clamp."""
    inverse = tl.rsqrt(tl.maximum(square, FLOOR))
    cap = max_angle * inverse
    cap_slope = tl.where(square >= FLOOR, -0.5 * cap * inverse * inverse, 0.0)
    # θ = outer·(a·min(knee·t, c) + b): the decay factor is applied before or after the clamp.
    knee = factor if DECAY_FIRST else tl.full([], 1.0, tl.float32)
    outer = tl.full([], 1.0, tl.float32) if DECAY_FIRST else factor
    inner = tl.minimum(cap, knee)
    offset = tl.rsqrt(square + SMOOTH * SMOOTH)
    rate = outer * (a * inner + b * offset)
    slope = outer * (a * tl.where(cap <= knee, cap_slope, 0.0) - 0.5 * b * offset * offset * offset)
    share = tl.full(square.shape, 1.0, tl.float32)
    if SECOND:
        # At a tie autograd gives each side one half; a = 1, b = 0, factor = 1 is a tie in every clamped row.
        share = tl.where(rate < cap, 1.0, tl.where(rate > cap, 0.0, 0.5))
        rate = tl.minimum(rate, cap)
        slope = share * slope + (1.0 - share) * cap_slope
    outer = portion * outer
    return portion * rate, portion * slope, outer * inner, outer * offset, share


@triton.jit(do_not_specialize=["rows"])
def _forward(
    x_ptr, g_ptr, y_ptr, seen_ptr, factor_ptr, a_ptr, b_ptr, rows, max_angle, portion,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COPY: tl.constexpr,
    HAS_A: tl.constexpr, HAS_B: tl.constexpr, SECOND: tl.constexpr, DECAY_FIRST: tl.constexpr,
    NO_STATE: tl.constexpr, FLOOR: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    # 64 bits for the start of a tile only: within it 32 are enough and cost half the registers.
    start = tl.program_id(0).to(tl.int64) * ROWS
    mask = (start + row < rows) & (column < DIM)
    at = start * DIM + (row * DIM + column)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(factor_ptr).to(tl.float32)
    a = _scalar(a_ptr, HAS_A, 1.0)
    b = _scalar(b_ptr, HAS_B, 0.0)

    xx = tl.sum(x * x, 1)
    alive = xx > NO_STATE * NO_STATE
    xx = tl.where(alive, xx, 1.0)
    along = tl.sum(x * g, 1) / xx
    v = g - along[:, None] * x
    square = tl.sum(v * v, 1) / xx
    rate, _, _, _, _ = _angle_map(square, factor, a, b, max_angle, portion, FLOOR, SMOOTH, SECOND, DECAY_FIRST)
    sinc, versine = _rotation(rate * rate * square)
    versine = tl.where(alive, versine, 0.0)
    gain = tl.where(alive, rate * sinc, 0.0)
    y = (x - versine[:, None] * x + gain[:, None] * v).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, y, mask=mask)
    if COPY:
        tl.store(seen_ptr + at, y.to(seen_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    x_ptr, g_ptr, d_state_ptr, d_input_ptr, dx_ptr, dg_ptr, partial_ptr,
    factor_ptr, a_ptr, b_ptr, rows, max_angle, portion,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_INPUT: tl.constexpr,
    HAS_A: tl.constexpr, HAS_B: tl.constexpr, SECOND: tl.constexpr, DECAY_FIRST: tl.constexpr,
    NO_STATE: tl.constexpr, FLOOR: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    factor = tl.load(factor_ptr).to(tl.float32)
    a = _scalar(a_ptr, HAS_A, 1.0)
    b = _scalar(b_ptr, HAS_B, 0.0)
    da = tl.zeros([ROWS], tl.float32)
    db = tl.zeros([ROWS], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        start = tl.cast(tile, tl.int64) * ROWS
        mask = (start + row < rows) & (column < DIM)
        at = start * DIM + (row * DIM + column)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_STATE:
            d = tl.load(d_state_ptr + at, mask=mask, other=0.0).to(tl.float32)
            if HAS_INPUT:
                d += tl.load(d_input_ptr + at, mask=mask, other=0.0).to(tl.float32)
        else:
            d = tl.load(d_input_ptr + at, mask=mask, other=0.0).to(tl.float32)

        xx = tl.sum(x * x, 1)
        alive = xx > NO_STATE * NO_STATE
        xx = tl.where(alive, xx, 1.0)
        inverse = tl.rsqrt(xx)
        along = tl.sum(x * g, 1) / xx
        d_radial = tl.sum(d * x, 1) * inverse
        v = g - along[:, None] * x
        square = tl.sum(v * v, 1) / xx
        d_turn = tl.sum(d * v, 1) * inverse

        rate, slope, by_a, by_b, share = _angle_map(
            square, factor, a, b, max_angle, portion, FLOOR, SMOOTH, SECOND, DECAY_FIRST
        )
        q = rate * rate * square
        sinc, versine = _rotation(q)
        cosine = 1.0 - versine
        pull = cosine * d_turn - rate * square * sinc * d_radial
        curve = rate * _sinc_slope(q, sinc, cosine) * d_turn - 0.5 * sinc * d_radial
        n = 2.0 * (pull * slope + rate * rate * curve)

        # For a zero state y = x: dx = d and dg = 0.
        pull = tl.where(alive, pull, 0.0)
        n = tl.where(alive, n * inverse, 0.0)
        versine = tl.where(alive, versine, 0.0)
        gain = tl.where(alive, rate * sinc, 0.0)
        tilt = gain * d_radial * inverse
        dg = gain[:, None] * d - tilt[:, None] * x + n[:, None] * v
        dx = d - versine[:, None] * d - along[:, None] * dg - tilt[:, None] * v - (n * square)[:, None] * x
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dg_ptr + at, dg.to(dg_ptr.dtype.element_ty), mask=mask)
        d_rate = share * pull * (xx * inverse)
        da += d_rate * by_a
        db += d_rate * by_b
    slot = partial_ptr + tl.program_id(0)
    if HAS_A:
        tl.store(slot, tl.sum(da, 0))
        slot += tl.num_programs(0)
    if HAS_B:
        tl.store(slot, tl.sum(db, 0))


def forward(
    x, g, factor, a, b, max_angle: float, second_clamp: bool, decay_first: bool, portion: float, input_dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The geodesic step, and its copy in `input_dtype` if that differs; reads x and g once and writes each once."""
    copies = input_dtype != x.dtype
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    seen = x.new_empty(x.shape if copies else 0, dtype=input_dtype)
    if x.numel() == 0:
        return y, seen
    flat_x, flat_g = launch.as_rows(x), launch.as_rows(g)
    rows, dim = flat_x.shape
    tile = launch.tile(dim)
    with torch.cuda.device_of(x):
        _forward[(triton.cdiv(rows, tile.rows),)](
            flat_x, flat_g, y, seen, factor, launch.pointer_or(a, x), launch.pointer_or(b, x), rows, max_angle, portion,
            DIM=dim, BLOCK=tile.block, ROWS=tile.rows, COPY=copies,
            HAS_A=a is not None, HAS_B=b is not None, SECOND=second_clamp, DECAY_FIRST=decay_first,
            NO_STATE=NO_STATE, FLOOR=FLOOR, SMOOTH=SMOOTH, num_warps=tile.warps,
        )  # fmt: skip
    return y, seen


def _walk(dim: int, rows: int, reads: Sequence[torch.Tensor]) -> launch.Sweep:
    """Grid of the backward kernel; the numbers are the best of searches on an H200."""
    if dim <= 1024 and reads[0].dtype == torch.float32:
        return launch.sweep(dim, rows, reads, elements=1024, per_thread=16, together=4)
    return launch.sweep(dim, rows, reads, elements=2048, per_thread=32, together=4 if dim <= 2048 else 1)


def backward(
    x, g, factor, a, b, max_angle: float, second_clamp: bool, decay_first: bool, portion: float, d_state, d_input
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns dx, dg and the gradients of a and b, if given.

    Reads x, g and each gradient once, writes dx and dg once, sums da and db in a fixed order.
    """
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dg = torch.empty_like(g, memory_format=torch.contiguous_format)
    wanted = sum(scalar is not None for scalar in (a, b))
    if x.numel() == 0:
        return dx, dg, x.new_zeros(wanted, dtype=torch.float32)
    flat_x, flat_g = launch.as_rows(x), launch.as_rows(g)
    rows, dim = flat_x.shape
    gradients = [launch.as_rows(d) for d in (d_state, d_input) if d is not None]
    sweep = _walk(dim, rows, (x, g, *gradients))
    tile, programs = sweep.tile, sweep.programs
    partial = torch.empty(wanted, programs, 1, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _backward[(programs,)](
            flat_x, flat_g, gradients[0], gradients[-1], dx, dg, partial,
            factor, launch.pointer_or(a, x), launch.pointer_or(b, x), rows, max_angle, portion,
            DIM=dim, BLOCK=tile.block, ROWS=tile.rows, STAGES=sweep.stages,
            HAS_STATE=d_state is not None, HAS_INPUT=d_input is not None,
            HAS_A=a is not None, HAS_B=b is not None, SECOND=second_clamp, DECAY_FIRST=decay_first,
            NO_STATE=NO_STATE, FLOOR=FLOOR, SMOOTH=SMOOTH, num_warps=tile.warps,
        )  # fmt: skip
    return dx, dg, partials.sum_partials(partial).flatten()
