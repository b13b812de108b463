"""The fused Sinkhorn algorithm against its definition, forward and backward, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from normlab import NormLabError
from normlab.kernels import sinkhorn as module
from normlab.kernels.sinkhorn import sinkhorn
from tests.matrix import parametrize

pytestmark = pytest.mark.filterwarnings(
    # Dynamo itself instantiates autograd functions.
    "ignore:.*should not be instantiated:DeprecationWarning",
)

EPS = 1e-6
# Of an entry by one division: three additions and epsilon in a sum, two for the inverse, one for the product.
ROUNDINGS = 7 * 2.0**-24
# Of a power by softmax: its argument, rounded twice, is at most 14 where the power is larger than epsilon; a division.
SOFTMAX = 2 * 14 * 2.0**-24 + ROUNDINGS


def equation(logits: Tensor, rounds: int, eps: float = EPS) -> Tensor:
    """The algorithm written out, without the code under test."""
    matrix = logits.exp() / logits.exp().sum(-1, keepdim=True) + eps
    for k in range(2 * rounds - 1):
        matrix = matrix / (matrix.sum(-1 if k % 2 else -2, keepdim=True) + eps)
    return matrix


def run(logits: Tensor, upstream: Tensor, rounds: int, kernels="triton") -> tuple[Tensor, Tensor]:
    """The matrix, and the gradient of the logits."""
    logits = logits.detach().requires_grad_()
    matrix = sinkhorn(logits, rounds, EPS, kernels=kernels)
    (gradient,) = torch.autograd.grad(matrix, logits, upstream.to(matrix.dtype))
    return matrix.detach(), gradient


def check(logits: Tensor, rounds: int, upstream: Tensor | None = None) -> None:
    upstream = torch.randn(logits.shape) if upstream is None else upstream
    matrix, gradient = run(logits, upstream, rounds)
    exact, exact_gradient = run(logits.double(), upstream, rounds, "reference")
    # What a division rounds, the next one divides by: relative errors of an entry add up at most.
    bound = SOFTMAX + (2 * rounds - 1) * ROUNDINGS
    assert ((matrix - exact).abs() <= bound * exact).all()
    # The gradient is made of products of entries, at most 1 and with lines that sum to at most 1, and upstream.
    assert ((gradient - exact_gradient).abs() <= bound * upstream.abs().amax((-1, -2), keepdim=True)).all()


@parametrize(("n", "rounds"), [(n, r) for n in (1, 2, 3, 4) for r in (1, 2, 20)], quick=[(4, 20), (3, 2), (2, 1)])
def test_values_and_gradients(n, rounds):
    # Two programs, the second with few tokens.
    check(2.0 * torch.randn(5, 7, n, n), rounds)


@parametrize("rounds", [3, 20], quick=[3])
@pytest.mark.parametrize("size", [0.0, 1e-4, 30.0, 1e4])
def test_zero_tiny_and_huge_logits(rounds, size):
    check(size * torch.randn(9, 4, 4), rounds)


@parametrize("rounds", [3, 20], quick=[3])
def test_matrices_that_pick_one_entry_of_each_row(rounds):
    one = torch.eye(4)
    # The identity, a permutation, all rows with the same column, two rows with one column.
    chosen = [one, one[[2, 0, 3, 1]], one[[0, 0, 0, 0]], one[[0, 0, 2, 3]]]
    for sharp in (12.0, 60.0, 1e4):
        check(sharp * torch.stack(chosen), rounds)


def test_reference_is_the_definition():
    logits = 2.0 * torch.randn(6, 4, 4).double()
    found = sinkhorn(logits, 20, EPS, kernels="reference")
    assert (found - equation(logits, 20)).abs().max() <= 40 * ROUNDINGS * 2.0**-29
    assert (found.sum(-2) <= 1.0).all()


def test_rows_and_columns_are_told_apart():
    logits = 2.0 * torch.randn(6, 4, 4)
    ours, other = sinkhorn(logits, 2, EPS, kernels="triton"), equation(logits.mT.double(), 2).mT
    assert (ours - other).abs().max() > 100 * ROUNDINGS


def test_no_gradient_gives_none():
    _, gradient = run(torch.randn(3, 4, 4), torch.zeros(3, 4, 4), 2)
    assert torch.equal(gradient, torch.zeros(3, 4, 4))


def test_what_is_not_a_number_stays_in_its_token():
    logits = torch.randn(3, 4, 4)
    logits[1, 2, 3] = torch.nan
    matrix, gradient = run(logits, torch.randn(3, 4, 4), 2)
    for found in (matrix, gradient):
        assert found[1].isnan().all()
        assert found[[0, 2]].isfinite().all()


def test_shapes_and_strides():
    check(torch.randn(3, 5, 4, 4).transpose(0, 1).mT, 2)
    check(torch.randn(4, 4), 2)
    check(torch.randn(3, 3, 3), 2, torch.ones(()).expand(3, 3, 3))
    matrix, gradient = run(torch.randn(2, 0, 4, 4), torch.randn(2, 0, 4, 4), 2)
    assert matrix.shape == gradient.shape == (2, 0, 4, 4)


@pytest.mark.full
def test_kernel_is_as_exact_as_the_reference_in_fp32():
    logits, upstream = 3.0 * torch.randn(300, 4, 4), torch.randn(300, 4, 4)
    exact = run(logits.double(), upstream, 20, "reference")
    ours, theirs = (run(logits, upstream, 20, kernels) for kernels in ("triton", "reference"))
    for one, two, true in zip(ours, theirs, exact, strict=True):
        assert (one - true).square().mean() <= 1.5**2 * (two - true).square().mean()


def test_reference_has_first_and_second_derivatives():
    logits = torch.randn(2, 3, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: sinkhorn(z, 3, EPS, kernels="reference"), (logits,))
    assert torch.autograd.gradgradcheck(lambda z: sinkhorn(z, 3, EPS, kernels="reference"), (logits,))


def test_second_derivative_of_the_kernel_says_what_to_do():
    logits = torch.randn(2, 3, 3).requires_grad_()
    matrix = sinkhorn(logits, 2, EPS, kernels="triton")
    (first,) = torch.autograd.grad(matrix.square().sum(), logits, create_graph=True)
    with pytest.raises(NormLabError, match="kernels='reference'"):
        first.sum().backward()


def test_operators_keep_their_promises():
    logits, upstream = torch.randn(2, 3, 2, 2), torch.randn(2, 3, 2, 2)
    torch.library.opcheck(module._forward_op, (logits, 2, EPS))
    torch.library.opcheck(module._backward_op, (logits, upstream, 2, EPS))


def chain(logits: Tensor) -> Tensor:
    matrix = sinkhorn(torch.sin(logits), 2, EPS, kernels="triton")
    return sinkhorn(matrix * 3.0, 1, EPS, kernels="triton").square().sum()


@parametrize("way", ["compiled", "checkpointed"], quick=["checkpointed"])
def test_compiled_and_checkpointed_chains_give_the_same(way, request):
    torch._dynamo.reset()
    logits = torch.randn(3, 3, 3)
    request.getfixturevalue("no_default_device")
    other = {
        "compiled": torch.compile(chain, fullgraph=True, backend="aot_eager"),
        "checkpointed": lambda z: checkpoint(chain, z, use_reentrant=False),
    }[way]
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    chain(ours).backward()
    other(theirs).backward()
    assert torch.equal(ours.grad, theirs.grad)
    with torch.no_grad():
        assert torch.equal(other(logits), chain(logits))


def uses_kernel(monkeypatch, *inputs, **named) -> bool:
    calls = []
    monkeypatch.setattr(module._Sinkhorn, "apply", lambda z, *_: calls.append(1) or z)
    sinkhorn(*inputs, **named)
    return bool(calls)


@pytest.mark.parametrize(
    ("size", "rounds", "eps", "dtype", "expected"),
    [
        (4, 20, EPS, torch.float32, True),
        (2, 40, EPS, torch.float32, True),
        (5, 2, EPS, torch.float32, False),
        (4, 21, EPS, torch.float32, False),
        # A column of logits may be so small that the inverse of its sum overflows.
        (4, 20, 0.0, torch.float32, False),
        (4, 20, EPS, torch.float64, False),
    ],
)
def test_what_registers_do_not_hold_uses_the_reference(size, rounds, eps, dtype, expected, monkeypatch):
    logits = torch.randn(2, size, size, dtype=dtype)
    assert uses_kernel(monkeypatch, logits, rounds, eps, kernels="triton") == expected
    assert not uses_kernel(monkeypatch, logits, rounds, eps, kernels="reference")


def test_wrong_inputs_are_named():
    with pytest.raises(NormLabError, match=r"expected logits \(\.\.\., n, n\), got \(2, 3, 4\)"):
        sinkhorn(torch.randn(2, 3, 4), 2, EPS)
    with pytest.raises(NormLabError, match="rounds must be at least 1, got 0"):
        sinkhorn(torch.randn(2, 4, 4), 0, EPS)
