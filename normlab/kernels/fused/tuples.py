"""Triton functions: 2^k tensors as one with more axes, and one tensor as many: one load, store or sum for all."""

# Triton's decorator hides signatures, and its tensors have attributes that a type checker does not know.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
# ruff: noqa: RUF005  # Triton's tuples grow by addition only

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pairs(values, HALF: tl.constexpr):
    """Half as many tensors with one more axis: entry 0 is from the first half, entry 1 from the second."""
    found = ()
    for i in tl.static_range(HALF):
        found = found + (tl.join(values[i], values[i + HALF]),)
    return found


@triton.jit
def joined(values, SIZE: tl.constexpr):
    """2^k tensors as one with k more axes of length 2, which together count them."""
    for level in tl.static_range(10):
        if SIZE >> (level + 1) > 0:
            values = _pairs(values, SIZE >> (level + 1))
    return values[0]


@triton.jit
def _halves(values, COUNT: tl.constexpr):
    """Twice as many tensors with half the columns: the even columns of all, then the odd ones."""
    ROWS: tl.constexpr = values[0].shape[0]
    SIZE: tl.constexpr = values[0].shape[1]
    even = ()
    odd = ()
    for i in tl.static_range(COUNT):
        first, second = tl.split(tl.reshape(values[i], (ROWS, SIZE // 2, 2)))
        even = even + (first,)
        odd = odd + (second,)
    return even + odd


@triton.jit
def columns(value, SIZE: tl.constexpr):
    """All columns of a tensor (rows, 2^k), each with a second axis of length 1."""
    found = (value,)
    for level in tl.static_range(10):
        if 1 << level < SIZE:
            found = _halves(found, 1 << level)
    return found
