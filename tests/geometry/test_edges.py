"""Where there is no sphere: zero vectors, NaN and bad input."""

import math

import pytest
import torch

from normlab import geometry
from normlab.errors import NormLabError
from normlab.geometry import angle, distance, exp, log, norm, project, sinc_sqrt, transport, unit
from tests.geometry.points import FUNCTIONS, gaussian, rounding, vectors

POINTS = [(function, count) for function, count in FUNCTIONS if count > 1]


def test_choices_at_zero():
    zero, y, u = torch.zeros(5), gaussian(5, dtype=torch.float32), gaussian(5, seed=1, dtype=torch.float32)
    assert torch.equal(project(zero, u), u)
    assert torch.equal(exp(zero, 1e30 * u), zero)
    assert torch.equal(log(zero, y), zero)
    assert torch.equal(log(y, zero), zero)
    assert distance(zero, y) == angle(zero, y) == angle(y, zero) == angle(zero, zero) == 0
    assert torch.equal(transport(zero, zero, u), u)
    for moved in (transport(zero, y, u), transport(y, zero, u)):
        torch.testing.assert_close(moved, project(y, u), rtol=0, atol=4 * rounding(5, torch.float32))


@pytest.mark.parametrize(("function", "count"), POINTS)
@pytest.mark.parametrize("zeros", [(True, False), (False, True), (True, True)])
def test_gradients_and_second_derivatives_are_finite_at_zero(function, count, zeros):
    arguments = [v.requires_grad_() for v in vectors(count, 5, dtype=torch.float32)]
    for argument, is_zero in zip(arguments, zeros, strict=False):
        argument.data *= not is_zero
    slopes = torch.autograd.grad(function(*arguments).sum(), arguments, create_graph=True)
    curvatures = torch.autograd.grad(
        sum((s * (1 + v)).sum() for s, v in zip(slopes, arguments, strict=True)), arguments
    )
    for tensor in (*slopes, *curvatures):
        assert tensor.isfinite().all()


@pytest.mark.parametrize(("function", "count"), FUNCTIONS)
def test_nan_is_passed_on(function, count):
    for k in range(count):
        arguments = vectors(count, 2, 3)
        arguments[k][0, 1] = math.nan
        answer = function(*arguments)
        assert answer[0].isnan().any()
        assert answer[1].isfinite().all()


def test_arguments_may_be_named():
    x, y, u = vectors(3, 4)
    assert torch.equal(transport(x, u=u, y=y), transport(x, y, u))


BAD = [
    (lambda: exp(torch.ones(3), torch.ones(4)), "exp: last dimensions must be equal, got shapes (3,) and (4,)"),
    (lambda: project(torch.ones(2, 3), torch.ones(2, 1)), "project: last dimensions must be equal"),
    (lambda: log(torch.ones(3), torch.ones(3, dtype=torch.int64)), "log: expected floating point"),
    (lambda: unit(torch.ones(3, dtype=torch.complex64)), "unit: expected floating point"),
    (lambda: sinc_sqrt(torch.ones(3, dtype=torch.int32)), "sinc_sqrt: expected floating point"),
    (lambda: norm(torch.tensor(1.0)), "norm: expected vectors along the last dimension, got shape ()"),
    (lambda: angle(torch.ones(2, 0), torch.ones(2, 0)), "angle: expected vectors along the last dimension"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises(NormLabError) as error:
        call()
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_module_has_no_other_public_functions():
    own = [name for name, value in vars(geometry).items() if getattr(value, "__module__", "") == geometry.__name__]
    public = {name for name in own if not name.startswith("_") and name != "P"}
    assert public == {function.__name__ for function, _ in FUNCTIONS} | {"sinc_sqrt", "versine_sqrt"}
