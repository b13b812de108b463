"""Triton kernel: backward pass of rotary embeddings; rotates the gradients of q and k back and concatenates q, k, v."""

# Triton's language is not Python's: launch options and compile-time values look wrong to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

TOKENS, HEADS = 4, 4
"""Tokens and heads per program: neighbours in memory in a head-major and in a token-major layout, respectively."""

PER_THREAD = 8
"""Channels of each half per thread, 16 bytes of bf16."""


@triton.jit
def _halves(ptr, t, h, stride_t, stride_h, stride_d, inside, HALF: tl.constexpr, BLOCK: tl.constexpr):
    channel = tl.arange(0, BLOCK)[None, None, :]
    at = t * stride_t + h * stride_h + channel * stride_d
    first = tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(ptr + at + HALF * stride_d, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _lay_down(
    d_ptr, stride_b, stride_t, stride_h, stride_d, cos_ptr, sin_ptr, table_b, table_t, out_ptr,
    batch, start, length, group, before,
    COUNT: tl.constexpr, ROW: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Copy a tile of the `COUNT` heads at `d_ptr` to the output, behind its first `before` heads; rotate if `TURN`."""
    t = tl.arange(0, TOKENS)[:, None, None]
    h = tl.arange(0, HEADS)[None, :, None]
    channel = tl.arange(0, BLOCK)[None, None, :]
    inside = (start + t < length) & (group * HEADS + h < COUNT) & (channel < HALF)
    # 64 bits for the start of a tile only: within it 32 are enough and cost half the registers.
    d_ptr += batch * stride_b + start * stride_t + (group * HEADS).to(tl.int64) * stride_h
    first, second = _halves(d_ptr, t, h, stride_t, stride_h, stride_d, inside, HALF, BLOCK)
    if TURN:
        # Loaded again for every head, from the cache: sharing between threads would need a barrier.
        table = batch * table_b + start * table_t
        cos_1, cos_2 = _halves(cos_ptr + table, t, 0, table_t, 0, 1, inside, HALF, BLOCK)
        sin_1, sin_2 = _halves(sin_ptr + table, t, 0, table_t, 0, 1, inside, HALF, BLOCK)
        first, second = first * cos_1 + second * sin_2, second * cos_2 - first * sin_1
    out_ptr += (batch * length + start) * ROW + (before + group * HEADS) * (2 * HALF)
    at = t * ROW + h * (2 * HALF) + channel
    tl.store(out_ptr + at, first.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + at + HALF, second.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length"])
def _backward(
    dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, out_ptr, length,
    q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, table_b, table_t,
    Q: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    Q_GROUPS: tl.constexpr = (Q + HEADS - 1) // HEADS
    KV_GROUPS: tl.constexpr = (KV + HEADS - 1) // HEADS
    ROW: tl.constexpr = (Q + 2 * KV) * 2 * HALF
    # All heads of a token are consecutive programs, so that programs that write the same pages run together.
    group = tl.program_id(0) % (Q_GROUPS + 2 * KV_GROUPS)
    place = tl.program_id(0) // (Q_GROUPS + 2 * KV_GROUPS)
    tiles = tl.cdiv(length, TOKENS)
    batch = (place // tiles).to(tl.int64)
    start = (place % tiles).to(tl.int64) * TOKENS
    if group < Q_GROUPS:
        _lay_down(
            dq_ptr, q_b, q_t, q_h, q_d, cos_ptr, sin_ptr, table_b, table_t, out_ptr,
            batch, start, length, group, 0, Q, ROW, HALF, BLOCK, TOKENS, HEADS, True,
        )  # fmt: skip
    elif group < Q_GROUPS + KV_GROUPS:
        _lay_down(
            dk_ptr, k_b, k_t, k_h, k_d, cos_ptr, sin_ptr, table_b, table_t, out_ptr,
            batch, start, length, group - Q_GROUPS, Q, KV, ROW, HALF, BLOCK, TOKENS, HEADS, True,
        )  # fmt: skip
    else:
        _lay_down(
            dv_ptr, v_b, v_t, v_h, v_d, cos_ptr, sin_ptr, table_b, table_t, out_ptr,
            batch, start, length, group - Q_GROUPS - KV_GROUPS, Q + KV, KV, ROW, HALF, BLOCK, TOKENS, HEADS, False,
        )  # fmt: skip


def backward(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Gradient of the projection (B, T, width) from those of q, k, v (B, T, heads, head_dim), of any strides."""
    batch, length, heads, head_dim = dq.shape
    kv_heads = dk.shape[2]
    out = torch.empty(batch, length, (heads + 2 * kv_heads) * head_dim, dtype=dq.dtype, device=dq.device)
    cos, sin = (table.contiguous().expand(batch, length, 1, head_dim) for table in (cos, sin))
    together, block = min(HEADS, triton.next_power_of_2(heads)), triton.next_power_of_2(head_dim // 2)
    groups = triton.cdiv(heads, together) + 2 * triton.cdiv(kv_heads, together)
    if out.numel():
        with torch.cuda.device_of(dq):
            _backward[(batch * triton.cdiv(length, TOKENS) * groups,)](
                dq, dk, dv, cos, sin, out, length, *dq.stride(), *dk.stride(), *dv.stride(), *cos.stride()[:2],
                Q=heads, KV=kv_heads, HALF=head_dim // 2, BLOCK=block, TOKENS=TOKENS, HEADS=together,
                num_warps=min(16, max(1, TOKENS * together * block // (32 * PER_THREAD))),
            )  # fmt: skip
    return out
