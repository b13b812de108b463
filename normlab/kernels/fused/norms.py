"""Triton functions: norms of the rows of a tile, with their gradients, and gains per column."""

# Triton's decorator hides signatures, and names bound under a constant condition look unbound.
# pyright: reportCallIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

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


@triton.jit
def _centred(values, insides, DIM: tl.constexpr, CHUNKS: tl.constexpr):
    """Rows without their mean; columns beyond the width stay zero."""
    total = values[0]
    for c in tl.static_range(1, CHUNKS):
        total += values[c]
    mean = (tl.sum(total, axis=1) / DIM)[:, None]
    found = ()
    for c in tl.static_range(CHUNKS):
        found = found + (tl.where(insides[c], values[c] - mean, 0.0),)  # noqa: RUF005
    return found


@triton.jit
def _products(left, right, CHUNKS: tl.constexpr):
    """Σ left·right over chunks, column by column."""
    total = left[0] * right[0]
    for c in tl.static_range(1, CHUNKS):
        total += left[c] * right[c]
    return total


@triton.jit
def normalise_and_back_chunks(
    v, d, insides, eps, DIM: tl.constexpr, KIND: tl.constexpr, CHUNKS: tl.constexpr, PAIRED: tl.constexpr
):
    """(normalised rows, gradient of the rows) in chunks, given the rows and the gradient of the normalised rows."""
    n = v
    if KIND != 3:
        if KIND == 2:
            v = _centred(v, insides, DIM, CHUNKS)
        squares, along = sums(_products(v, v, CHUNKS), _products(d, v, CHUNKS), PAIRED)
        if KIND == 2:
            d = _centred(d, insides, DIM, CHUNKS)
        inverse = inverse_size(squares, eps, DIM)[:, None]
        along = along[:, None] * inverse / DIM
        n = ()
        back = ()
        for c in tl.static_range(CHUNKS):
            n = n + (v[c] * inverse,)  # noqa: RUF005  # Triton's tuples
            back = back + ((d[c] - n[c] * along) * inverse,)  # noqa: RUF005
        d = back
    return n, d
