"""The slope of a cross-entropy made in place, in Triton's interpreter, against its twin, float64 and torch's own."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from normlab import NormLabError
from normlab.kernels import cross_entropy_gradient
from normlab.kernels.cross_entropy_gradient import cross_entropy_gradient_
from normlab.kernels.fused import cross_entropy_gradient as fused
from normlab.models.cross_entropy import chunked_cross_entropy
from tests.matrix import parametrize

# NumPy, in which the interpreter computes, warns where a GPU would quietly say NaN.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|divide by zero|overflow|All-NaN slice) encountered:RuntimeWarning"
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def problem(rows=5, width=100, dtype=F32, spread=3.0):
    targets = torch.randint(0, width, (rows,))
    targets[1::3] = -100
    return (spread * torch.randn(rows, width)).to(dtype), targets


def exact(logits, targets, z_loss=0.0, ignore_index=-100):
    """Every row's loss and its gradient by autograd, in float64, on the very numbers that the kernel reads."""
    z = logits.double().requires_grad_()
    normaliser = z.logsumexp(-1)
    counts = targets != ignore_index
    loss = F.cross_entropy(z, targets, reduction="none", ignore_index=ignore_index)
    (slope,) = torch.autograd.grad(loss.sum() + z_loss * normaliser[counts].square().sum(), z)
    return slope, normaliser.detach(), -loss.detach()


def assert_close(logits, targets, z_loss=0.0, ignore_index=-100) -> None:
    slope, normaliser, log_p = exact(logits, targets, z_loss, ignore_index)
    work = logits.clone(memory_format=torch.preserve_format)
    found = cross_entropy_gradient_(work, targets, z_loss=z_loss, ignore_index=ignore_index, kernels="triton")
    assert found.gradient is work
    counts = targets != ignore_index
    # fp32: a sum of V terms costs log2(V) roundings, and every exponential has an argument that is rounded: e^−a moves
    # by a · 2^-24, at most a third of that of the largest probability. The device's exponential is good to 2^-22.
    fp32 = (math.log2(logits.shape[-1]) + 8) * 2.0**-24
    kind = torch.finfo(logits.dtype)
    factor = 1.0 + 2.0 * z_loss * normaliser.abs()
    # A whole ulp of the result, for the interpreter truncates to bf16.
    allowed = kind.eps * slope.abs() + fp32 * factor.unsqueeze(-1) * (slope.abs() + 1.0 / 3) + kind.smallest_normal
    assert ((found.gradient.double() - slope).abs() <= allowed).all()
    assert not found.gradient[~counts].any()
    assert ((found.normaliser - normaliser).abs() <= fp32 * (1.0 + normaliser.abs()))[counts].all()
    spread = logits.double().amax(-1) - logits.double().gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    assert ((found.log_p - log_p).abs() <= fp32 * (1.0 + spread))[counts].all()


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@parametrize("width", [1, 7, 8, 100, 1000, 16384, 16384 + 33], quick=[1, 100, 16384 + 33])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_slope_and_both_numbers(dtype, width, z_loss):
    assert_close(*problem(4, width, dtype), z_loss)


@pytest.mark.parametrize("block", [64, 128])
def test_rows_of_many_pieces(block, monkeypatch):
    monkeypatch.setattr(fused, "BLOCK", block)
    assert_close(*problem(7, 5 * block + 3, BF16), 0.01)


def test_the_widest_vocabulary():
    assert_close(*problem(2, 262144, BF16), 0.01)


@pytest.mark.parametrize("place", ["first", "last", "rising", "falling"])
def test_a_maximum_anywhere(place, monkeypatch):
    monkeypatch.setattr(fused, "BLOCK", 64)
    logits, targets = problem(3, 200)
    if place in ("first", "last"):
        logits[:, 0 if place == "first" else -1] = 80.0
    else:
        logits = logits.sort(descending=place == "falling").values
    assert_close(logits, targets)


@pytest.mark.parametrize("size", [1e-30, 1e4, 1e30, 1.5e38])
def test_huge_and_tiny_logits(size):
    logits, targets = problem(4, 100)
    assert_close(logits / logits.abs().max() * size, targets)


def test_a_small_loss_beside_large_logits_is_not_lost():
    # 2^14 is the normaliser; the loss, log(1 + 98 e^-10), is far below half of its last place.
    logits = torch.full((1, 99), 2.0**14 - 10.0)
    logits[0, 3] = 2.0**14
    found = cross_entropy_gradient_(logits.clone(), torch.tensor([3]), kernels="triton")
    assert float(-found.log_p) == pytest.approx(math.log1p(98 * math.exp(-10)), rel=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("whole", [True, False])
def test_broken_rows_are_what_torch_says(value, whole):
    logits, _ = problem(3, 100)
    targets = torch.tensor([4, 7, 9])
    logits[1, slice(None) if whole else 50] = value
    slope, _, log_p = exact(logits.float(), targets)
    found = cross_entropy_gradient_(logits.clone(), targets, kernels="triton")
    assert torch.equal(found.gradient.isnan(), slope.isnan())
    assert torch.equal(found.log_p.isnan(), log_p.isnan())
    assert torch.allclose(found.gradient.double().nan_to_num(), slope.nan_to_num(), atol=1e-6)


def test_a_target_that_cannot_be():
    # Excluded by −∞: its loss is infinite, the slope finite, as torch has it.
    logits, _ = problem(2, 100)
    logits[0, 5] = -math.inf
    found = cross_entropy_gradient_(logits.clone(), torch.tensor([5, 6]), kernels="triton")
    assert float(found.log_p[0]) == -math.inf
    assert found.gradient.isfinite().all()


def test_a_target_outside_of_the_vocabulary_is_nan_and_reads_nothing():
    logits, _ = problem(4, 100)
    found = cross_entropy_gradient_(logits.clone(), torch.tensor([5, 100, -1, 10**12]), kernels="triton")
    assert found.log_p.isnan().tolist() == [False, True, True, True]
    assert found.gradient.isnan().all(-1).tolist() == [False, True, True, True]


def test_an_ignored_row_is_zero_whatever_is_in_it():
    logits, _ = problem(2, 100)
    logits[0] = math.nan
    found = cross_entropy_gradient_(logits, torch.tensor([-100, 3]), kernels="triton")
    assert not found.gradient[0].any()
    assert found.gradient[1].any()
    assert_close(*problem()[:1], torch.full((5,), 3), ignore_index=3)


def test_rows_with_a_gap_between_them():
    whole = torch.randn(5, 140)
    rest = whole[:, 100:].clone()
    targets = torch.randint(0, 100, (5,))
    expected = exact(whole[:, :100], targets)[0]
    found = cross_entropy_gradient_(whole[:, :100], targets, kernels="triton").gradient
    assert torch.allclose(found.double(), expected, atol=1e-6)
    assert torch.equal(whole[:, 100:], rest)


def test_columns_with_a_gap_take_the_reference():
    logits, targets = torch.randn(100, 5).T, torch.randint(0, 100, (5,))
    expected = exact(logits, targets)[0]
    assert torch.allclose(cross_entropy_gradient_(logits, targets).gradient.double(), expected, atol=1e-6)
    with pytest.raises(NormLabError, match="without gaps"):
        cross_entropy_gradient_(logits, targets, kernels="triton")


def test_the_twin_is_exact_in_float64():
    logits, targets = problem(6, 53)
    found = cross_entropy_gradient_(logits.double(), targets, z_loss=0.1)
    slope, normaliser, log_p = exact(logits, targets, 0.1)
    counts = targets != -100
    assert torch.allclose(found.gradient, slope, rtol=1e-13, atol=1e-15)
    assert torch.allclose(found.normaliser[counts], normaliser[counts], rtol=1e-13)
    assert torch.allclose(found.log_p[counts], log_p[counts], rtol=1e-13)
    with pytest.raises(NormLabError, match="float64"):
        cross_entropy_gradient_(logits.double(), targets, kernels="triton")


def test_no_rows():
    found = cross_entropy_gradient_(torch.empty(0, 100), torch.empty(0, dtype=torch.int64), kernels="triton")
    assert [tuple(t.shape) for t in found] == [(0, 100), (0,), (0,)]


def test_operator_keeps_its_promises():
    for dtype in (F32, BF16):
        logits, targets = problem(3, 50, dtype)
        torch.library.opcheck(cross_entropy_gradient._gradient_op, (logits, targets, 0.01, -100))
        torch.library.opcheck(cross_entropy_gradient._gradient_op, (logits[:, :40], targets.clamp(max=39), 0.0, -100))


# -- in the chunked loss -----------------------------------------------------------------------------------------------


def loss_problem(n=37, d=16, v=211):
    hidden, weight = (torch.randn(shape, requires_grad=True) for shape in ((n, d), (v, d)))
    targets = torch.randint(0, v, (n,))
    targets[::5] = -100
    return hidden, weight, targets


def gradients(call, hidden, weight):
    loss = call()
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("chunk", [10, None])
def test_the_chunked_loss_and_its_gradients(chunk, z_loss):
    hidden, weight, targets = loss_problem()

    def loss(kernels, *tensors):
        return chunked_cross_entropy(*tensors, targets, z_loss=z_loss, chunk=chunk, kernels=kernels).loss

    ours = gradients(lambda: loss("triton", hidden, weight), hidden, weight)
    theirs = gradients(lambda: loss("reference", hidden, weight), hidden, weight)
    exact = gradients(lambda: loss("reference", hidden.double(), weight.double()), hidden, weight)
    for one, two, three in zip(ours, theirs, exact, strict=True):
        # As good as the reference, which rounds as often: products of 16 to 211 terms, sums of 37 rows.
        roundings = 64 * 2.0**-24 * three.abs().max()
        assert (one - three).abs().max() <= (two - three).abs().max() + roundings


def test_half_precision_is_no_worse_than_the_reference():
    hidden, weight, targets = loss_problem(256, 64, 199)
    exact = gradients(
        lambda: F.cross_entropy(hidden.double() @ weight.double().T, targets, ignore_index=-100), hidden, weight
    )
    errors = {}
    for kernels in ("triton", "reference"):
        with torch.autocast(torch.get_default_device().type, BF16):
            found = gradients(
                lambda kernels=kernels: chunked_cross_entropy(hidden, weight, targets, chunk=50, kernels=kernels).loss,
                hidden,
                weight,
            )
        errors[kernels] = max(float((a - b).norm() / b.norm()) for a, b in zip(found[1:], exact[1:], strict=True))
    # The interpreter truncates the slopes to bf16, which doubles their rounding of 2^-9; nothing else differs.
    assert errors["triton"] <= errors["reference"] + 2.0**-8


@parametrize("backend", ["aot_eager", "inductor"], quick=["aot_eager"])
def test_the_compiled_loss_is_one_graph(backend, request):
    torch._dynamo.reset()
    hidden, weight, targets = loss_problem()
    request.getfixturevalue("no_default_device")

    def loss(h, w, t):
        return chunked_cross_entropy(h, w, t, z_loss=0.01, chunk=10, kernels="triton").loss

    found = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend=backend)):
        with torch.autocast(hidden.device.type, BF16):
            found.append(gradients(lambda run=run: run(hidden, weight, targets), hidden, weight))
    for one, two in zip(*found, strict=True):
        # Compiled code keeps fp32 where eager code rounds to bf16: 2^-8 a value.
        assert (one - two).norm() <= 2.0**-8 * two.norm()


def test_slopes_live_where_the_logits_were():
    hidden, weight, targets = loss_problem(64, 8, 300)
    made = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.numel() == 32 * 300 and not func.is_view:
                made.append(func._schema.name)
            return result

    with Sizes():
        chunked_cross_entropy(hidden, weight, targets, chunk=32, kernels="triton").loss.backward()
    assert made == ["aten::mm"] * 2
