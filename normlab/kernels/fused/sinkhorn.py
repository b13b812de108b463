"""Triton kernels: Sinkhorn's algorithm on one small matrix per token, forward and backward.

A thread has the whole matrix of a token: entries are separate tensors, one element for each token, so no sum goes from
thread to thread. The backward kernel runs the algorithm again, keeps the sums of all divisions in registers, and walks
back with L = M ⊙ dM, the gradient of log M. A division M' = M / (Σ M + eps) along an axis has

    dM = (dM' − Σ dM' ⊙ M') / (Σ M + eps),  so  L = L' − M' · Σ L'  and  M = M' · (Σ M + eps)

and L stays of the size of the gradient however small an entry is, where dM would not. At the start M = p + eps with
p = softmax(z), and with t = p ⊙ dM = L · p / M the gradient is dz = t − p · Σ t over each row.
"""

# Triton's language is not Python's: launch options and compile-time values look wrong to a type checker.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false
# ruff: noqa: RUF005  # Triton's tuples grow by addition only

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from normlab.kernels.fused.tuples import columns, joined

_ROWS = 32
"""Tokens of a program: one warp. Backward a thread takes nearly all of its 255 registers at 20 rounds with n = 4."""


def forward(logits: Tensor, rounds: int, eps: float) -> Tensor:
    """The normalised matrices, in fp32."""
    return _launch(_forward, logits, (logits,), rounds, eps)


def backward(logits: Tensor, d_matrix: Tensor, rounds: int, eps: float) -> Tensor:
    """Gradient of the logits."""
    return _launch(_backward, logits, (logits, d_matrix), rounds, eps)


def _launch(kernel, like: Tensor, inputs: tuple[Tensor, ...], rounds: int, eps: float) -> Tensor:
    size = like.shape[-1]
    out = torch.empty(like.shape, dtype=torch.float32, device=like.device)
    rows = out.numel() // (size * size)
    if rows:
        with torch.cuda.device_of(like):
            kernel[(triton.cdiv(rows, _ROWS),)](
                *(t.contiguous() for t in inputs), out, rows, eps, size, triton.next_power_of_2(size), 2 * rounds - 1,
                _ROWS, num_warps=1,
            )  # fmt: skip
    return out


@triton.jit
def _places(rows, N: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr):
    """(where the entries of a tile of matrices are, which of them exist), each matrix padded to P × P."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    entry = tl.arange(0, P * P)[None, :]
    exists = (token < rows) & (entry // P < N) & (entry % P < N)
    return token * (N * N) + (entry // P * N + entry % P), exists


@triton.jit
def _load(at, places, exists, N: tl.constexpr, P: tl.constexpr):
    """All entries of every token's matrix, row by row: one load, since compilation takes time with their number."""
    parts = columns(tl.load(at + places, mask=exists, other=0.0), P * P)
    found = ()
    for place in tl.static_range(N * N):
        found = found + (tl.reshape(parts[place // N * P + place % N], (places.shape[0],)),)
    return found


@triton.jit
def _store(at, places, exists, values, N: tl.constexpr, P: tl.constexpr):
    """Store all entries, likewise at once; padding gets any of them and is not stored."""
    parts = ()
    for entry in tl.static_range(P * P):
        parts = parts + (values[min(entry // P, N - 1) * N + min(entry % P, N - 1)],)
    tl.store(at + places, tl.reshape(joined(parts, P * P), places.shape), mask=exists)


@triton.jit
def _softmax(logits, N: tl.constexpr):
    """Softmax over each row."""
    found = ()
    for row in tl.static_range(N):
        largest = logits[row * N]
        for i in tl.static_range(1, N):
            largest = tl.maximum(largest, logits[row * N + i])
        powers = ()
        for i in tl.static_range(N):
            powers = powers + (tl.exp(logits[row * N + i] - largest),)
        total = powers[0]
        for i in tl.static_range(1, N):
            total += powers[i]
        for i in tl.static_range(N):
            found = found + (powers[i] / total,)
    return found


@triton.jit
def _plus(values, eps, SIZE: tl.constexpr):
    found = ()
    for i in tl.static_range(SIZE):
        found = found + (values[i] + eps,)
    return found


@triton.jit
def _sums(matrix, N: tl.constexpr, ROWWISE: tl.constexpr):
    """The sum of each row, or of each column."""
    NEXT: tl.constexpr = 1 if ROWWISE else N
    found = ()
    for line in tl.static_range(N):
        total = matrix[line * N if ROWWISE else line]
        for i in tl.static_range(1, N):
            total += matrix[(line * N if ROWWISE else line) + i * NEXT]
        found = found + (total,)
    return found


@triton.jit
def _times(matrix, factors, N: tl.constexpr, ROWWISE: tl.constexpr):
    """Each row, or each column, times a factor of its own."""
    found = ()
    for place in tl.static_range(N * N):
        found = found + (matrix[place] * factors[place // N if ROWWISE else place % N],)
    return found


@triton.jit
def _inverses(values, N: tl.constexpr):
    found = ()
    for i in tl.static_range(N):
        found = found + (1.0 / values[i],)
    return found


@triton.jit
def _products(left, right, SIZE: tl.constexpr):
    found = ()
    for i in tl.static_range(SIZE):
        found = found + (left[i] * right[i],)
    return found


@triton.jit
def _without(gradient, matrix, N: tl.constexpr, ROWWISE: tl.constexpr):
    """L' − M' · Σ L' over each row, or over each column."""
    along = _sums(gradient, N, ROWWISE)
    found = ()
    for place in tl.static_range(N * N):
        found = found + (gradient[place] - matrix[place] * along[place // N if ROWWISE else place % N],)
    return found


@triton.jit
def _divided(matrix, eps, N: tl.constexpr, DIVISIONS: tl.constexpr):
    """(the matrix after all divisions, what each of them divided by): columns, then rows and columns in turn."""
    kept = ()
    for k in tl.static_range(DIVISIONS):
        sums = _plus(_sums(matrix, N, k % 2 == 1), eps, N)
        matrix = _times(matrix, _inverses(sums, N), N, k % 2 == 1)
        kept = kept + (sums,)
    return matrix, kept


@triton.jit(do_not_specialize=["rows"])
def _forward(
    logits_at, matrix_at, rows, eps, N: tl.constexpr, P: tl.constexpr, DIVISIONS: tl.constexpr, ROWS: tl.constexpr
):
    places, exists = _places(rows, N, P, ROWS)
    soft = _softmax(_load(logits_at, places, exists, N, P), N)
    matrix, _ = _divided(_plus(soft, eps, N * N), eps, N, DIVISIONS)
    _store(matrix_at, places, exists, matrix, N, P)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    logits_at, d_matrix_at, d_logits_at, rows, eps,
    N: tl.constexpr, P: tl.constexpr, DIVISIONS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    places, exists = _places(rows, N, P, ROWS)
    soft = _softmax(_load(logits_at, places, exists, N, P), N)
    matrix, kept = _divided(_plus(soft, eps, N * N), eps, N, DIVISIONS)
    gradient = _products(matrix, _load(d_matrix_at, places, exists, N, P), N * N)
    # The first and the last division are of columns: from either end every second one is of rows.
    for back in tl.static_range(DIVISIONS):
        gradient = _without(gradient, matrix, N, back % 2 == 1)
        matrix = _times(matrix, kept[DIVISIONS - 1 - back], N, back % 2 == 1)
    shares = ()
    for place in tl.static_range(N * N):
        shares = shares + (gradient[place] * (soft[place] / (soft[place] + eps)),)
    _store(d_logits_at, places, exists, _without(shares, soft, N, True), N, P)
