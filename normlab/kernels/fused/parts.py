"""Triton functions: matrix products on tensor cores, with numbers of more than bf16 as sums of bf16 parts.

Tensor cores multiply bf16 exactly and add up in fp32. A number of more bits is the sum of two parts, the number rounded
to bf16 and the rest rounded to bf16, which are exact to 2^-16 of it (two roundings of 2^-8); fp16 is exact in two
parts, bf16 in one. The product of two second parts, 2^-16 of the whole, is left out. So a product of fp32 numbers is
wrong by at most 3 · 2^-16 of Σ |a|·|b|, one of fp32 numbers and half-precision ones by 2^-16 (2 · 2^-16 in fp16),
beside the roundings of the sum. bf16 has the range of fp32: gradients need no scale.
"""

# Triton's language is not Python's: launch options and compile-time values look wrong to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def padded(outputs: int) -> int:
    """A number of outputs as tensor cores take it: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(outputs))


def in_parts(weight: Tensor) -> Tensor:
    """Split an fp32 matrix into two bf16 parts, (2, K, D), once, for kernels that read it many times."""
    found = torch.empty((2, *weight.shape), dtype=torch.bfloat16, device=weight.device)
    size = weight.numel()
    with torch.cuda.device_of(weight):
        _in_parts[(triton.cdiv(size, _BLOCK),)](weight.contiguous(), found, size, _BLOCK)
    return found


@triton.jit
def _in_parts(weight_at, found_at, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    high, low = parts(tl.load(weight_at + place, mask=inside, other=0.0))
    tl.store(found_at + place, high, mask=inside)
    tl.store(found_at + size + place, low, mask=inside)


@triton.jit
def parts(value):
    """The value as one bf16 tensor or as the sum of two."""
    found = (value,)
    if value.dtype != tl.bfloat16:
        wide = value.to(tl.float32)
        high = wide.to(tl.bfloat16)
        found = (high, (wide - high.to(tl.float32)).to(tl.bfloat16))
    return found


@triton.jit
def transposed(values):
    found = ()
    for i in tl.static_range(len(values)):
        found = found + (tl.trans(values[i]),)  # noqa: RUF005  # Triton's tuples
    return found


@triton.jit
def product(left, right, total, INTERPRETED: tl.constexpr):
    """total + left·right for matrices in parts, without the product of two second parts."""
    for i in tl.static_range(len(left)):
        for j in tl.static_range(len(right)):
            if i + j < 2:
                # The interpreter takes bf16 for integers.
                a = left[i].to(tl.float32) if INTERPRETED else left[i]
                b = right[j].to(tl.float32) if INTERPRETED else right[j]
                total = tl.dot(a, b, total)
    return total


@triton.jit
def load_parts(at, offset, mask, step):
    """Both parts of a matrix; the second is `step` behind the first."""
    return (tl.load(at + offset, mask=mask, other=0.0), tl.load(at + offset + step, mask=mask, other=0.0))
