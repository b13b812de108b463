"""Triton kernel: backward pass of SwiGLU; gradients of gate and up, and the gated product, in one pass."""

# Triton's language is not Python's: launch options and compile-time values look wrong to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from normlab.kernels.fused import launch

BLOCK = 2048
"""Elements of h per program: a piece of one row, or several rows if they are shorter."""

WARPS = 2
"""Few threads with 32 elements each have more loads in flight than many with eight (measured)."""


@triton.jit(do_not_specialize=["rows"])
def _backward(
    raw_ptr, dh_ptr, d_raw_ptr, h_ptr, rows,
    WIDTH: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # 64 bits for the start of a tile only: within it 32 are enough and cost half the registers.
    start = (tl.program_id(0) // PIECES).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % PIECES * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (start + row < rows) & (column < WIDTH)
    at = start * WIDTH + (row * WIDTH + column)
    gate_at = start * (2 * WIDTH) + (row * (2 * WIDTH) + column)
    gate = tl.load(raw_ptr + gate_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(raw_ptr + gate_at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + at, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = dh * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(d_raw_ptr + gate_at, d_gate.to(d_raw_ptr.dtype.element_ty), mask=mask)
    tl.store(d_raw_ptr + gate_at + WIDTH, (dh * silu).to(d_raw_ptr.dtype.element_ty), mask=mask)
    tl.store(h_ptr + at, (silu * up).to(h_ptr.dtype.element_ty), mask=mask)


def backward(raw: torch.Tensor, dh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of raw, h) for raw (..., 2 · hidden) and dh (..., hidden)."""
    flat_raw, flat_dh = launch.as_rows(raw), launch.as_rows(dh)
    rows, width = flat_dh.shape
    d_raw = torch.empty(raw.shape, dtype=raw.dtype, device=raw.device)
    h = torch.empty(dh.shape, dtype=dh.dtype, device=dh.device)
    block = min(BLOCK, triton.next_power_of_2(width))
    together, pieces = max(1, BLOCK // block), triton.cdiv(width, block)
    if rows:
        with torch.cuda.device_of(raw):
            _backward[(triton.cdiv(rows, together) * pieces,)](
                flat_raw, flat_dh, d_raw, h, rows, WIDTH=width, PIECES=pieces, ROWS=together, BLOCK=block,
                num_warps=WARPS,
            )  # fmt: skip
    return d_raw, h
