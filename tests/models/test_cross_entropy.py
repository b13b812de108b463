"""The chunked loss equals the plain one, in value, gradients and count, and never holds all logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from normlab import Decoder, DecoderConfig, NormLabError
from normlab.models.cross_entropy import CHUNK_BYTES, chunk_rows, chunked_cross_entropy
from normlab.schemes.contract.scales import ConstantScale, LearnedScale

N, D, V = 37, 8, 53


def problem(n=N, d=D, v=V, dtype=torch.float64):
    hidden = torch.randn(n, d, dtype=dtype, requires_grad=True)
    weight = torch.randn(v, d, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, v, (n,))
    targets[::5] = -100
    return hidden, weight, targets


def plain(hidden, weight, targets, transform=None, z_loss=0.0):
    logits = hidden @ weight.T
    logits = logits if transform is None else transform(logits)
    rows = logits[targets != -100]
    return F.cross_entropy(logits, targets, ignore_index=-100) + z_loss * rows.logsumexp(-1).square().mean()


class SoftCap(nn.Module):
    """A transform that no scale of rows can stand for."""

    def __init__(self):
        super().__init__()
        self.cap = nn.Parameter(torch.full((1,), 5.0, dtype=torch.float64))

    def forward(self, logits):
        return self.cap * torch.tanh(logits / self.cap)


def scale() -> LearnedScale:
    made = LearnedScale(V, 2.0, 0.25).double()
    nn.init.uniform_(made.weight, 0.1, 0.5)
    return made


TRANSFORMS = {"none": lambda: None, "scale": scale, "constant": lambda: ConstantScale(0.3), "softcap": SoftCap}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [1, 5, N, N + 10, None])
def test_it_equals_the_plain_path(transform, z_loss, chunk):
    hidden, weight, targets = problem()
    between = transform()
    inputs = [hidden, weight, *(between.parameters() if between is not None else [])]
    ours = chunked_cross_entropy(hidden, weight, targets, logit_transform=between, z_loss=z_loss, chunk=chunk)
    theirs = plain(hidden, weight, targets, between, z_loss)
    # float64, sums of at most 53 · 37 terms of order ten.
    assert torch.allclose(ours.loss, theirs, rtol=1e-13)
    for a, b in zip(torch.autograd.grad(ours.loss, inputs), torch.autograd.grad(theirs, inputs), strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-14)
    assert int(ours.count) == int((targets != -100).sum())
    assert torch.allclose(ours.cross_entropy, plain(hidden, weight, targets, between).detach(), rtol=1e-13)
    assert not ours.z.requires_grad
    with torch.no_grad():
        assert torch.equal(
            chunked_cross_entropy(hidden, weight, targets, logit_transform=between, z_loss=z_loss, chunk=chunk).loss,
            ours.loss,
        )


@pytest.mark.parametrize("z_loss", [0.0, 0.05])
def test_gradients_against_finite_differences(z_loss):
    hidden, weight, targets = problem(7, 3, 5)
    factor = torch.rand(5, dtype=torch.float64, requires_grad=True)

    def loss(h, w, s):
        between = LearnedScale(5).double()
        # The parameter itself would be a leaf of its own; here the vector is what is differentiated.
        between.value = lambda: s
        return chunked_cross_entropy(h, w, targets, logit_transform=between, z_loss=z_loss, chunk=3).loss * 1.7

    assert torch.autograd.gradcheck(loss, (hidden, weight, factor))


def test_half_precision_is_as_good_as_the_plain_path():
    hidden, weight, targets = problem(256, 64, 199, torch.float32)
    exact = [g.float() for g in torch.autograd.grad(plain(hidden.double(), weight.double(), targets), (hidden, weight))]
    with torch.autocast("cpu", torch.bfloat16):
        ours = chunked_cross_entropy(hidden, weight, targets, chunk=50)
        theirs = plain(hidden, weight, targets)
    assert ours.loss.dtype == torch.float32
    errors = [
        [
            float((g - e).norm() / e.norm())
            for g, e in zip(torch.autograd.grad(loss, (hidden, weight)), exact, strict=True)
        ]
        for loss in (ours.loss, theirs)
    ]
    # Inputs rounded to 2^-9 move logits of size √64 by about 2^-9 · √2 · 8 and so the gradient by 3 % at most; slopes
    # and results add 2^-8. The plain path rounds as often, and 1/count besides.
    assert max(errors[0]) < 0.04
    assert max(errors[0]) < 1.1 * max(errors[1])
    assert float(ours.loss.detach()) == pytest.approx(float(plain(hidden, weight, targets).detach()), rel=2**-6)


def test_chunks_add_up_in_fp32():
    # 4,096 equal rows: their sum rounds at every step if it is kept in bf16, and stops growing at 256 of them.
    hidden = torch.ones(4096, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(2, 1, requires_grad=True)
    loss = chunked_cross_entropy(hidden, weight.to(torch.bfloat16), torch.zeros(4096, dtype=torch.int64), chunk=1).loss
    (grad,) = torch.autograd.grad(loss, weight)
    assert grad.flatten().tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("grad", [True, False])
def test_edges(grad):
    hidden, weight, _ = problem()
    with torch.set_grad_enabled(grad):
        nothing = chunked_cross_entropy(hidden, weight, torch.full((N,), -100), z_loss=0.1, chunk=4)
        empty = chunked_cross_entropy(hidden[:0], weight, torch.zeros(0, dtype=torch.int64))
        huge = chunked_cross_entropy(hidden * 1e300, weight, torch.zeros(N, dtype=torch.int64), chunk=4)
        broken = chunked_cross_entropy(hidden * torch.nan, weight, torch.zeros(N, dtype=torch.int64))
    assert (float(nothing.loss.detach()), float(nothing.count)) == (0.0, 0.0)
    assert (float(empty.loss.detach()), float(empty.count)) == (0.0, 0.0)
    assert torch.isfinite(huge.loss.detach())
    assert torch.isnan(broken.loss.detach())
    if grad:
        for loss in (nothing.loss, empty.loss):
            assert all(not g.any() for g in torch.autograd.grad(loss, (hidden, weight)))
        assert all(torch.isfinite(g).all() for g in torch.autograd.grad(huge.loss, (hidden, weight)))


def test_another_index_may_be_ignored():
    hidden, weight, targets = problem()
    targets[targets == -100] = 3
    ours = chunked_cross_entropy(hidden, weight, targets, ignore_index=3).loss
    theirs = F.cross_entropy(hidden @ weight.T, targets, ignore_index=3)
    for a, b in zip(
        torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(theirs, (hidden, weight)), strict=True
    ):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-14)


# -- what it costs -----------------------------------------------------------------------------------------------------


class Meter(TorchDispatchMode):
    """Counts matrix products and remembers the largest result of any operation."""

    def __init__(self):
        super().__init__()
        self.largest, self.products = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.products += func._schema.name in ("aten::mm", "aten::addmm", "normlab::add_product_")
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def test_all_logits_are_never_held_and_nothing_is_computed_twice():
    hidden, weight, targets = problem(512, 16, 300, torch.float32)
    kept = []
    with Meter() as meter, torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        loss = chunked_cross_entropy(hidden, weight, targets, chunk=32).loss
        loss.backward()
    # One chunk's logits, which are more than the hidden states or the matrix here.
    assert meter.largest == 32 * 300
    # Logits, and the gradients of hidden states and matrix, of sixteen chunks.
    assert meter.products == 3 * 16
    # What waits for the backward pass: both gradients and the count.
    assert sorted(kept) == sorted([512 * 16, 300 * 16, 1])


def test_without_gradients_there_is_one_product_a_chunk():
    hidden, weight, targets = problem(64, 16, 300, torch.float32)
    with Meter() as meter, torch.no_grad():
        chunked_cross_entropy(hidden, weight, targets, chunk=16)
    assert meter.products == 4
    with Meter() as meter:
        chunked_cross_entropy(hidden.detach(), weight.detach(), targets, chunk=16)
    assert meter.products == 4


def test_chunks_fill_the_budget():
    assert chunk_rows(50304, 2) == 4096
    assert CHUNK_BYTES / 2 < chunk_rows(50304, 2) * 50304 * 2 <= CHUNK_BYTES
    assert chunk_rows(10**12, 4) == 1


# -- in a model --------------------------------------------------------------------------------------------------------


class Loss(nn.Module):
    def __init__(self, scheme):
        super().__init__()
        self.model = Decoder(DecoderConfig(scheme=scheme, depth=1, dim=32, heads=4, vocab_size=300, max_length=64))

    def forward(self, tokens, targets):
        model = self.model
        hidden = model.features(tokens).flatten(0, 1)
        weight = model.embedding.weight if model.head.weight is None else model.head.weight
        transform = model.head.logit_scale
        return chunked_cross_entropy(hidden, weight, targets.flatten(), logit_transform=transform, chunk=32).loss


@pytest.mark.parametrize("scheme", ["pre", "ngpt"])
def test_a_models_loss_and_gradients(scheme):
    loss = Loss(scheme).double()
    tokens = torch.randint(0, 300, (4, 24))
    ours = torch.autograd.grad(loss(tokens, tokens), list(loss.parameters()))
    logits = loss.model(tokens).flatten(0, 1)
    theirs = torch.autograd.grad(F.cross_entropy(logits, tokens.flatten()), list(loss.parameters()))
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-13) for a, b in zip(ours, theirs, strict=True))


# torch's compiler makes an instance of every autograd.Function, which torch deprecates.
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("scheme", ["pre", "ngpt"])
def test_a_models_loss_compiles_in_one_graph(scheme, backend):
    loss = Loss(scheme)
    tokens = torch.randint(0, 300, (4, 24))
    check_compiled(loss, torch.compile(loss, fullgraph=True, backend=backend), list(loss.parameters()), tokens, tokens)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_code_has_the_same_gradients():
    hidden, weight, targets = problem(64, 16, 99, torch.float32)

    def loss(h, w, t):
        return chunked_cross_entropy(h.bfloat16(), w, t, chunk=32).loss

    compiled = torch.compile(loss, fullgraph=True)
    for parameter in (hidden, weight):
        check_compiled(loss, compiled, [parameter], hidden, weight, targets)


def check_compiled(eager, compiled, parameters, *args):
    grads = []
    for call in (eager, compiled):
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(*args)
        grads.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
    first, second = grads
    # Compiled code keeps fp32 where eager code rounds to bf16: 2^-8 a value at random, but not all the same way.
    assert float((first - second).norm() / first.norm()) < 4 * 2**-8
    assert float(first @ second / (first @ first)) == pytest.approx(1.0, abs=2**-10)


def test_a_second_derivative_is_refused():
    hidden, weight, targets = problem()
    loss = chunked_cross_entropy(hidden, weight, targets).loss
    with pytest.raises(NormLabError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, N, D)}, r"expected hidden \(N, D\)"),
        ({"weight": torch.zeros(V, D + 1)}, "expected hidden"),
        ({"targets": torch.zeros(N + 1, dtype=torch.int64)}, "expected hidden"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"z_loss": -1.0}, "z_loss must be"),
        ({"z_loss": float("nan")}, "z_loss must be"),
    ],
)
def test_bad_input_is_refused_in_one_line(change, message):
    hidden, weight, targets = problem()
    options = {"hidden": hidden, "weight": weight, "targets": targets} | change
    with pytest.raises(NormLabError, match=message) as error:
        chunked_cross_entropy(**options)
    assert "\n" not in str(error.value)
