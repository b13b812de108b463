"""The fused geodesic step against its reference, forward and every gradient, in Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from normlab import NormLabError
from normlab.kernels.geodesic import ORDERS, SMOOTH, geodesic_pair, geodesic_step
from tests.matrix import parametrize

pytestmark = pytest.mark.filterwarnings(
    # Dynamo itself instantiates autograd functions.
    "ignore:.*should not be instantiated:DeprecationWarning",
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
EPS = 2.0**-24
# Half an ulp of one: the rounding of the result. The interpreter truncates to bf16, which costs a whole one.
ROUND = {F32: EPS, F16: 2.0**-11, BF16: 2.0**-7}
# Sums over a row cost log2(width)/2 roundings, five for a thousand terms; the row scalars made of them about ten more.
ARITHMETIC = 16 * EPS
USERS = {"state": (True, False), "input": (False, True), "both": (True, True)}
# a, b, factor, second clamp, size of the update: below the clamp, at it, learned maps, and angles beyond a full turn.
MAPS = {
    "plain": (None, None, 0.5, True, 0.3),
    "clamped": (None, None, 1.0, True, 3.0),
    "no second clamp": (None, None, 0.7, False, 2.0),
    "learned": (1.3, 0.2, 0.5, True, 0.3),
    "negative b": (1.3, -0.4, 0.5, True, 0.3),
    "second clamp": (3.0, 0.5, 1.0, True, 0.5),
    "a alone": (1.3, None, 0.5, True, 0.3),
    "b alone": (None, 0.2, 0.5, True, 0.3),
    "many turns": (20.0, 0.5, 1.0, False, 3.0),
}


@dataclass(frozen=True)
class Case:
    """A step and the gradients that reach its two outputs."""

    x: torch.Tensor
    g: torch.Tensor
    a: torch.Tensor | None
    b: torch.Tensor | None
    d_state: torch.Tensor | None
    d_input: torch.Tensor | None
    factor: float = 0.5
    second_clamp: bool = True
    max_angle: float = math.pi / 4
    order: str = "clamp-first"
    portion: float = 1.0

    def leaves(self) -> list[torch.Tensor]:
        return [t for t in (self.x, self.g, self.a, self.b) if t is not None]

    def pair(self, kernels: str) -> tuple[torch.Tensor, torch.Tensor]:
        factor = torch.tensor(self.factor, dtype=torch.float64)
        options = {"a": self.a, "b": self.b, "second_clamp": self.second_clamp, "order": self.order}
        return geodesic_pair(self.x, self.g, factor, self.max_angle, **options, portion=self.portion, kernels=kernels)

    def fused(self) -> tuple[torch.Tensor, ...]:
        state, seen = self.pair("triton")
        assert torch.equal(state, seen)
        used = [(y, d) for y, d in ((state, self.d_state), (seen, self.d_input)) if d is not None]
        return state, *torch.autograd.grad([y for y, _ in used], self.leaves(), [d for _, d in used])

    def exact(self) -> tuple[torch.Tensor, ...]:
        """The reference in float64, where it is exact beside fp32."""

        def twin(t):
            return None if t is None else t.detach().double().requires_grad_()

        case = replace(self, x=twin(self.x), g=twin(self.g), a=twin(self.a), b=twin(self.b))
        state, _ = case.pair("reference")
        return state, *torch.autograd.grad(state, case.leaves(), self.upstream())

    def upstream(self) -> torch.Tensor:
        return sum((d.double() for d in (self.d_state, self.d_input) if d is not None), torch.zeros((), dtype=F32))


def build(x, g, name: str = "plain", users: str = "both", **options) -> Case:
    a, b, factor, second, _ = MAPS[name]
    scalars = [None if s is None else torch.tensor([s], requires_grad=True) for s in (a, b)]
    ds = [torch.randn(x.shape).to(x.dtype) if used else None for used in USERS[users]]
    x, g = x.detach().requires_grad_(), g.detach().requires_grad_()
    return Case(x, g, *scalars, *ds, **{"factor": factor, "second_clamp": second, **options})


def random(dim: int, name: str, dtype=F32, update=None, rows=(2, 3), users: str = "both", **options) -> Case:
    x = torch.randn(*rows, dim)
    g = MAPS[name][4] * torch.randn(*rows, dim) + 0.3 * x
    return build(x.to(dtype), g.to(update or dtype), name, users, **options)


def length(t: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(t.double(), dim=-1)


def rates(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row: an upper bound of |ρ|, and 1/√(t² + τ²), which b is multiplied by."""
    x, g = case.x.detach().double(), case.g.detach().double()
    square = x.square().sum(-1, keepdim=True)
    v = g - (x * g).sum(-1, keepdim=True) / square.clamp_min(1e-24) * x
    t = length(v) / length(x).clamp_min(1e-12)
    offset = (t**2 + SMOOTH**2).rsqrt()
    a, b = (default if s is None else abs(s.item()) for s, default in ((case.a, 1.0), (case.b, 0.0)))
    inside, outside = (case.factor, 1.0) if case.order == "decay-first" else (1.0, case.factor)
    return outside * (a * (case.max_angle / t).clamp_max(inside) + b * offset), offset


def check(case: Case) -> None:
    fused, exact = case.fused(), case.exact()
    x, g, d = length(case.x.detach()), length(case.g.detach()), length(case.upstream())
    turn = g / x.clamp_min(1e-12)
    rate, offset = rates(case)
    # v is known to eps · ‖g‖, and so is what it adds to the state, times ρ, or to a gradient, times ρ²/r. A gradient is
    # at least as inexact as ‖d‖ is, or as itself where the map makes it larger; dx holds ⟨x,g⟩/r² · dg.
    bent = d * (1 + rate**2 * turn)
    scales = [x + rate * g, bent * (1 + turn) + length(exact[1]), bent + length(exact[2])]
    for got, want, scale in zip(fused, exact, scales, strict=False):
        assert got.isfinite().all()
        error = length(got.double() - want)
        limit = ROUND[got.dtype] * length(want) + ARITHMETIC * scale
        # Below the smallest normal number of fp16 rounding is absolute.
        limit = limit + torch.finfo(got.dtype).tiny * math.sqrt(got.shape[-1])
        assert (error <= limit).all(), (error / limit).max()
    # A row adds r · ⟨d, w⟩ · (1 or 1/√(t² + τ²)), and w is known to eps · ‖g‖/r.
    weights = [weight for weight, s in ((1.0, case.a), (offset, case.b)) if s is not None]
    for got, want, weight in zip(fused[3:], exact[3:], weights, strict=True):
        limit = ARITHMETIC * (x * d * (1 + turn * weight)).sum() + 2 * EPS * want.abs()
        assert got.shape == (1,)
        assert ((got.double() - want).abs() <= limit).all(), (got, want, limit)


@pytest.mark.parametrize("users", USERS)
@pytest.mark.parametrize("name", MAPS)
def test_step_and_gradients(name, users):
    check(random(100, name, users=users))


@parametrize("portion", [1.0, 0.25], quick=[0.25])
@pytest.mark.parametrize("name", MAPS)
def test_decay_before_the_clamp(name, portion):
    check(random(100, name, order="decay-first", portion=portion))


@pytest.mark.parametrize("order", ORDERS)
def test_a_portion_of_the_step_is_that_part_of_the_angle(order):
    """In units of the whole angle, clamps and offset included: m portions of 1/m turn as far as one step."""
    case = random(64, "second clamp", order=order, factor=0.9)
    x = case.x.detach().double()
    for kernels in ("reference", "triton"):
        turned = []
        for portion in (1.0, 0.5):
            y = replace(case, portion=portion).pair(kernels)[0].detach().double()
            turned.append(2 * torch.atan2(length(x - y), length(x + y)))
        # A state is known to some roundings of its own length, and so is the angle.
        torch.testing.assert_close(turned[1], turned[0] / 2, rtol=0, atol=ARITHMETIC)


@pytest.mark.parametrize("name", ["plain", "learned"])
@parametrize("types", [(BF16, BF16), (F16, F16), (F32, BF16), (BF16, F32)], quick=[(BF16, BF16), (F32, BF16)], ids=str)
def test_types(types, name):
    case = random(768, name, *types)
    state, dx, dg, *_ = case.fused()
    assert (state.dtype, dx.dtype, dg.dtype) == (types[0], *types)
    check(case)


@pytest.mark.parametrize(
    ("dim", "rows"), [(1, (3,)), (3, (70,)), (64, (200,)), (768, (1,)), (1000, (2, 1, 7)), (8193, (2,))]
)
def test_shapes(dim, rows):
    """Tiles that are not full, programs with uneven shares, widths between powers of two."""
    check(random(dim, "plain" if dim == 1 else "learned", rows=rows))


@parametrize("dim", [64, 100], quick=[100])
@parametrize("name", ["plain", "clamped", "learned", "negative b"], quick=["clamped", "learned"])
def test_edge_rows(name, dim):
    x = torch.randn(9, dim)
    g = torch.randn(9, dim)
    g[0] = 0.0  # no update
    g[1] = 1e-14 * g[1]  # next to none
    g[2] = 0.7 * x[2]  # no part across x
    x[3] = 0.0  # no sphere
    x[4] = 0.0
    g[4] = 0.0
    x[5] *= 1e-14  # less than a sphere
    x[6], g[6] = 1e15 * x[6], 1e15 * g[6]
    x[7], g[7] = 1e-12 * x[7], 1e-12 * g[7]  # just a sphere
    g[8] = 1e6 * g[8]  # far beyond the clamp
    for row in range(9):
        check(build(x[row], g[row], name))
    still = build(x[3:6], g[3:6], name)
    state, dx, dg, *_ = still.fused()
    assert torch.equal(state, x[3:6])
    assert torch.equal(dx, still.upstream().float())
    assert not dg.any()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("second_clamp", [True, False])
@pytest.mark.parametrize("learned", [True, False])
@parametrize("factor", [0.5, 1.0, 2.0], quick=[1.0])
@parametrize("tangent", [0.5, math.nextafter(0.5, 0), 0.5 + 2**-20, 0.5 - 2**-20, 0.25, 1.0], quick=[0.5, 0.25, 1.0])
def test_at_the_clamps(tangent, factor, learned, second_clamp, order):
    """Where numbers are exact, so are ties: a gradient at a clamp goes the way that autograd sends it."""
    x, g = torch.zeros(64), torch.zeros(64)
    x[0], g[0], g[1] = 4.0, 3.0, 4 * tangent
    case = build(x, g, "plain", factor=factor, second_clamp=second_clamp, max_angle=0.5, order=order)
    if learned:
        case = replace(case, a=torch.ones(1, requires_grad=True), b=torch.zeros(1, requires_grad=True))
    check(case)


@pytest.mark.parametrize("max_angle", [0.1, 1.0, 2.5, math.pi])
def test_wide_angles(max_angle):
    x = torch.randn(8, 64)
    check(replace(build(x, torch.linspace(0.1, 4, 8)[:, None] * torch.randn(8, 64), factor=1.0), max_angle=max_angle))


def test_strides_and_empty_batches():
    wide = torch.randn(2, 100, 5)
    check(build(wide.transpose(1, 2), torch.randn(2, 5, 200)[..., ::2], "learned"))
    case = build(torch.randn(2, 5, 64), torch.randn(2, 5, 64), "learned")
    total = torch.autograd.grad(case.pair("triton")[0].sum(), case.x)[0]  # an expanded gradient
    assert torch.allclose(total, torch.autograd.grad(case.pair("reference")[0].sum(), case.x)[0], atol=1e-5)
    empty = build(torch.randn(0, 3, 64), torch.randn(0, 3, 64), "learned")
    state, dx, dg, da, db = empty.fused()
    assert state.shape == dx.shape == dg.shape == (0, 3, 64)
    assert not da.any()
    assert not db.any()


def test_one_output():
    case = random(64, "learned")
    options = {"a": 1.3, "b": 0.2}
    one = geodesic_step(case.x, case.g, 0.5, math.pi / 4, kernels="triton", **options)
    other = geodesic_step(case.x, case.g, 0.5, math.pi / 4, kernels="reference", **options)
    assert torch.allclose(one, other, atol=1e-5)
    for got, want in zip(
        torch.autograd.grad(one.square().sum(), [case.x, case.g]),
        torch.autograd.grad(other.square().sum(), [case.x, case.g]),
        strict=True,
    ):
        assert torch.allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("kernels", ["triton", "reference"])
def test_an_input_of_its_own_dtype_is_the_cast_one(kernels):
    case = random(64, "learned", update=torch.float16, rows=(61,))
    found = []
    for dtype in (torch.float16, None):
        state, seen = geodesic_pair(
            case.x, case.g, 0.5, case.max_angle, a=case.a, b=case.b, input_dtype=dtype, kernels=kernels
        )
        assert seen.dtype == (dtype or F32)
        gradients = torch.autograd.grad([state, seen.half()], case.leaves(), [case.d_state, case.d_input.half()])
        found.append((state, seen.half(), *gradients))
    for narrow, cast in zip(*found, strict=True):
        assert torch.equal(narrow, cast)


def test_two_runs_give_the_same_bits():
    case = random(64, "learned", rows=(300,))
    for one, other in zip(case.fused(), case.fused(), strict=True):
        assert torch.equal(one, other)


def test_scalars_keep_their_type_and_shape():
    case = random(64, "learned")
    case = replace(case, a=torch.tensor(1.3, dtype=BF16, requires_grad=True))
    *_, da, db = case.fused()
    assert (da.dtype, da.shape, db.dtype, db.shape) == (BF16, (), F32, (1,))


@parametrize("decay_first", [False, True], quick=[True])
@parametrize("name", ["plain", "learned", "b alone"], quick=["learned"])
def test_operators_are_well_formed(name, decay_first):
    case = random(64, name, BF16)
    ops = torch.ops.normlab
    inputs = (case.x.detach(), case.g.detach(), torch.tensor(0.5, dtype=torch.float64))
    inputs = (*inputs, *(None if t is None else t.detach() for t in (case.a, case.b)), math.pi / 4, True)
    inputs = (*inputs, decay_first, 0.5)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for dtype in (BF16, torch.float16):
        torch.library.opcheck(ops.geodesic_forward.default, (*inputs, dtype), test_utils=tests)
    for ds in ((case.d_state, None), (None, case.d_input), (case.d_state, case.d_input)):
        torch.library.opcheck(ops.geodesic_backward.default, (*inputs, *ds), test_utils=tests)


def two_steps(x, g, a, b, kernels):
    """Two sublayers: the second reads the state that the first left, and steps from it."""
    factor = torch.tensor(0.5, dtype=torch.float64)
    state, seen = geodesic_pair(x, g, factor, math.pi / 4, a=a, b=b, kernels=kernels)
    return geodesic_pair(state, seen.sin(), factor, math.pi / 4, a=a, b=b, kernels=kernels)


def grads_of_two_steps(run, case: Case, kernels: str):
    outputs = run(case.x, case.g, case.a, case.b, kernels)
    return torch.autograd.grad(outputs, case.leaves(), [case.d_state, case.d_input])


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh")
def test_compiled():
    case = random(64, "learned")
    compiled = torch.compile(two_steps, fullgraph=True, backend="aot_eager")
    eager, traced = (grads_of_two_steps(run, case, "triton") for run in (two_steps, compiled))
    for one, other in zip(eager, traced, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(eager, grads_of_two_steps(two_steps, case, "reference"), strict=True):
        assert torch.allclose(one, other, atol=1e-3, rtol=1e-4)


@pytest.mark.usefixtures("fresh")
def test_two_gradients_meet_in_the_kernel():
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    case = random(64, "learned")
    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=keep)
    grads_of_two_steps(torch.compile(two_steps, fullgraph=True, backend=backend), case, "triton")
    (graph,) = graphs
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    kernels = [node for node in calls if node.target is torch.ops.normlab.geodesic_backward.default]
    adds = [node for node in calls if node.target is torch.ops.aten.add.Tensor]
    assert len(kernels) == 2
    assert all(d is not None for node in kernels for d in node.args[-2:])
    # The scalars are used twice and their gradients added; nothing of the stream's size is.
    assert all(node.meta["val"].numel() == 1 for node in adds)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    case = random(64, "learned")

    def run(*inputs):
        return checkpoint(two_steps, *inputs, use_reentrant=reentrant)

    def grads(function):
        outputs = function(case.x, case.g, case.a, case.b, "triton")
        for leaf in case.leaves():
            leaf.grad = None
        torch.autograd.backward(outputs, [case.d_state, case.d_input])
        return [leaf.grad for leaf in case.leaves()]

    for one, other in zip(grads(two_steps), grads(run), strict=True):
        assert torch.equal(one, other)


def test_a_second_derivative_is_refused():
    case = random(64, "learned")
    (dx,) = torch.autograd.grad(case.pair("triton")[0].square().sum(), case.x, create_graph=True)
    with pytest.raises(NormLabError, match="kernels='reference'"):
        torch.autograd.grad(dx.sum(), case.x)


def test_what_the_kernel_cannot_take():
    x, g = torch.randn(3, 64), torch.randn(3, 64)
    rate = torch.tensor(0.5, requires_grad=True)
    unfit = [(x, g[:1], 0.5, {}, "shape"), (x, g.double(), 0.5, {}, "float64"), (x, g, rate, {}, "factor needs"),
             (x, g, 0.5, {"a": torch.ones(64)}, "single numbers"), (x.double(), g, 0.5, {}, "float64")]  # fmt: skip
    for state, update, factor, options, message in unfit:
        with pytest.raises(NormLabError, match=message):
            geodesic_step(state, update, factor, math.pi / 4, kernels="triton", **options)
        assert geodesic_step(state, update, factor, math.pi / 4, **options).isfinite().all()
    with pytest.raises(NormLabError, match="unknown kernels"):
        geodesic_step(x, g, 0.5, math.pi / 4, kernels="trition")
    with pytest.raises(NormLabError, match="did you mean 'decay-first'"):
        geodesic_step(x, g, 0.5, math.pi / 4, order="decayfirst")  # type: ignore[arg-type]


def test_no_pair_of_the_reference_is_computed_twice():
    state, seen = geodesic_pair(torch.randn(3, 64), torch.randn(3, 64), 0.5, math.pi / 4, kernels="reference")
    assert state is seen


@pytest.mark.parametrize("size", [1e-10, 1e-14, 1e-18, 1e-25])
def test_reference_gradients_of_a_vanishing_update(size):
    """The slope of c/t overflows long before t does: 0 · ∞ must not reach the gradient."""
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(2, 64, dtype=dtype, requires_grad=True)
        g = (size * torch.randn(2, 64, dtype=dtype)).requires_grad_()
        y = geodesic_step(x, g, 0.5, math.pi / 4, a=1.3, b=0.2, kernels="reference")
        assert all(t.isfinite().all() for t in torch.autograd.grad(y.sum(), [x, g]))
