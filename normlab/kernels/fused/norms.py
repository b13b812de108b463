"""Triton functions: norms of the rows of a tile, with their gradients, and gains per column."""

# Triton's decorator hides signatures, and names bound under a constant condition look unbound.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

# KIND of a norm: 1 RMSNorm, 2 LayerNorm, 3 a scale.


@triton.jit
def column_values(pointer, columns, inside, HAS: tl.constexpr, OFFSET: tl.constexpr, DEFAULT: tl.constexpr):
    """A gain or bias in fp32, or `DEFAULT` if there is none."""
    if HAS:
        value = tl.load(pointer + columns, mask=inside, other=0.0).to(tl.float32)
        if OFFSET:
            value += 1.0
    else:
        value = tl.full(columns.shape, DEFAULT, tl.float32)
    return value


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def sums(a, b, PAIRED: tl.constexpr):
    """Both row sums; paired, they need one reduction instead of two."""
    if PAIRED:
        first, second = tl.reduce((a, b), 1, _add_both)
    else:
        first = tl.sum(a, axis=1)
        second = tl.sum(b, axis=1)
    return first, second


@triton.jit
def centre(v, inside, DIM: tl.constexpr, KIND: tl.constexpr):
    """Subtract the mean of each row for LayerNorm. Columns beyond the width stay zero."""
    if KIND == 2:
        v = tl.where(inside, v - (tl.sum(v, axis=1) / DIM)[:, None], 0.0)
    return v


@triton.jit
def inverse_size(squares, eps, DIM: tl.constexpr):
    """1/√(mean square + eps). Padding rows are zero and must stay finite if eps is 0."""
    square = squares / DIM + eps
    return 1.0 / tl.sqrt(tl.where(square == 0.0, 1.0, square))


@triton.jit
def normalise(v, inside, eps, DIM: tl.constexpr, KIND: tl.constexpr):
    """(normalised rows, inverse RMS); a scale leaves rows unchanged."""
    if KIND == 3:
        inverse = tl.full((v.shape[0],), 1.0, tl.float32)
        n = v
    else:
        v = centre(v, inside, DIM, KIND)
        inverse = inverse_size(tl.sum(v * v, axis=1), eps, DIM)
        n = v * inverse[:, None]
    return n, inverse


@triton.jit
def normalise_back(d, n, inverse, inside, DIM: tl.constexpr, KIND: tl.constexpr):
    """Gradient of the rows, given that of the normalised rows."""
    if KIND != 3:
        along = tl.sum(d * n, axis=1) / DIM
        d = centre(d, inside, DIM, KIND)
        d = (d - n * along[:, None]) * inverse[:, None]
    return d
