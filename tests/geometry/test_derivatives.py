"""Derivatives by every road: finite differences, forward and reverse mode, vmap, one compiled graph."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from normlab.geometry import exp, log, project, transport, unit
from tests.geometry.points import FUNCTIONS, eps, gaussian, rounding, vectors
from tests.matrix import parametrize


@parametrize(("function", "count"), FUNCTIONS, quick=[unit, exp, log])
def test_gradcheck_and_gradgradcheck(function, count):
    arguments = tuple(v.requires_grad_() for v in vectors(count, 2, 3, seed=3))
    assert gradcheck(function, arguments, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, arguments, check_fwd_over_rev=True)


@parametrize("function", [project, exp], quick=[exp])
def test_gradcheck_and_gradgradcheck_at_zero_tangent(function):
    x = gaussian(2, 3).requires_grad_()
    zero = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(function, (x, zero), check_forward_ad=True)
    assert gradgradcheck(function, (x, zero), check_fwd_over_rev=True)


@parametrize("function", [log, transport], quick=[log])
def test_gradcheck_and_gradgradcheck_at_equal_points(function):
    x, y, u = (v.requires_grad_() for v in (gaussian(2, 3), 2 * gaussian(2, 3), gaussian(2, 3, seed=1)))
    arguments = (x, y) if function is log else (x, y, u)
    assert gradcheck(function, arguments, check_forward_ad=True)
    assert gradgradcheck(function, arguments, check_fwd_over_rev=True)


def everything(x, y, u):
    return [function(*(x, u) if function in (project, exp) else (x, y, u)[:count]) for function, count in FUNCTIONS]


def special_points(dtype=torch.float64):
    """A generic row, a zero tangent at x = y, an antipode, x = 0, y = 0 and x = y = 0."""
    x, y, u = vectors(3, 6, 4, seed=4, dtype=dtype)
    y[1], u[1] = x[1], 0
    y[2] = -x[2]
    x[3] = y[4] = x[5] = y[5] = 0
    return x, y, u


@pytest.mark.full
def test_compiles_to_one_graph_with_the_same_values_and_gradients():
    def run(function):
        arguments = [v.requires_grad_() for v in special_points()]
        values = function(*arguments)
        return [v.detach() for v in values], torch.autograd.grad(sum(v.square().sum() for v in values), arguments)

    torch._dynamo.reset()
    compiled = run(torch.compile(everything, backend="aot_eager", fullgraph=True))
    # The same kernels in the same order up to decompositions, each a rounding; 64 covers the longest chain of them.
    torch.testing.assert_close(compiled, run(everything), rtol=64 * eps(torch.float64), atol=64 * eps(torch.float64))


def test_vmap_gives_what_the_batch_gives():
    arguments = special_points()
    for mapped, batched in zip(torch.func.vmap(everything)(*arguments), everything(*arguments), strict=True):
        # Reductions over the same four numbers: any order of them costs two roundings.
        torch.testing.assert_close(mapped, batched, rtol=32 * eps(torch.float64), atol=32 * eps(torch.float64))


def test_forward_mode_gives_what_reverse_mode_gives():
    arguments, tangents = special_points(), tuple(vectors(3, 6, 4, seed=6))
    values, forward = torch.func.jvp(everything, arguments, tangents)
    leaves = [v.requires_grad_() for v in special_points()]
    for k, value in enumerate(everything(*leaves)):
        assert torch.equal(value, values[k])
        weight = gaussian(*value.shape, seed=k)
        slopes = torch.autograd.grad((weight * value).sum(), leaves, allow_unused=True)
        pulled = sum((s * t).sum() for s, t in zip(slopes, tangents, strict=True) if s is not None)
        pushed = (weight * forward[k]).sum()
        # Two sums of 24 products of order ten, each entry with the rounding of its function.
        torch.testing.assert_close(pushed, pulled, rtol=0, atol=240 * rounding(4, torch.float64))
