"""Rules on the forward and backward pass: finite values, correct gradients, dtypes, compilation."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.autograd import gradcheck

from normlab.schemes.contract.scheme import Scheme
from normlab.stack import Stack
from normlab.testing.rules import require, require_finite, rule
from normlab.testing.small import DIM, TOKENS, gradients, leave_neutral_values, make_input, make_stack

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = ("ordinary", "zero update", "parallel", "zero state", "huge", "tiny")


@rule("gradients")
def check_gradients(scheme: Scheme) -> None:
    """Every parameter receives a finite gradient, which is not zero at the start or after one step of training."""
    stack, x = make_stack(scheme), make_input()
    found = gradients(stack, x)
    require_finite({**found, "the input": x.grad})
    # One factor of a product may start at zero: the other has no gradient before it has moved.
    still = {name for name, grad in found.items() if not grad.abs().max() > 0}
    if still:
        _step(stack, found)
        found = gradients(stack, x)
        require_finite(found)
    for name in still:
        require(found[name].abs().max() > 0, f"the gradient of {name} is zero, and still is after a step")


@torch.no_grad()
def _step(stack: Stack, found: dict[str, torch.Tensor]) -> None:
    """One step against the gradients, of equal size for all parameters that have one."""
    for name, parameter in stack.named_parameters():
        parameter.sub_(0.1 * found[name] / found[name].abs().max().clamp(min=1e-30))


@rule("edges")
def check_edges(scheme: Scheme) -> None:
    """Values and gradients are finite at zero, parallel, huge and tiny states and updates, in fp32, bf16 and fp16."""
    for case in CASES:
        for dtype in DTYPES:
            check_edge(scheme, case, dtype)


def check_edge(scheme: Scheme, case: str, dtype: torch.dtype) -> None:
    """One case in one dtype."""
    bound, where = scheme.bind(depth=4, dim=DIM), f"{case} in {str(dtype).removeprefix('torch.')}"
    scale = {"huge": 1e4, "tiny": 1e-4, "zero state": 0.0}.get(case, 1.0)
    x = make_input(dtype=dtype, scale=scale)
    # Updates of ordinary size: eight of 1e4 would leave fp16's range in any scheme that just adds.
    drawn = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(dtype) * min(scale or 1, 1)
    g = {"zero update": torch.zeros_like(x), "parallel": 0.5 * x}.get(case, drawn).detach().requires_grad_()
    state = bound.entry()(x)
    for k in range(4):
        state = bound.block(k)(state, [lambda _: g, lambda _: g])
        require(state.dtype == dtype, f"{where}: a block returns {state.dtype}")
        require(bound.hidden(state).shape == x.shape, f"{where}: hidden has the shape {bound.hidden(state).shape}")
    y = bound.exit()(state)
    require(y.dtype == dtype, f"{where}: the exit returns {y.dtype}")
    require(y.isfinite().all(), f"{where}: the output is not finite")
    (y.float() / y.numel()).sum().backward()
    for name, tensor in (("state", x), ("update", g)):
        require(tensor.grad is not None and tensor.grad.isfinite().all(), f"{where}: no finite gradient of the {name}")


@rule("tokens")
@torch.no_grad()
def check_tokens(scheme: Scheme) -> None:
    """Entry, blocks, exit and hidden states treat every token alone: branches mix tokens, a scheme does not.

    A mean over tokens lets a causal model see the text that it is to predict; one over a batch lets it see other texts.
    """
    stack = make_stack(scheme).double()
    leave_neutral_values(stack)
    x = make_input(dtype=torch.float64).detach()
    changed, others = x.clone(), torch.ones(2, TOKENS, dtype=torch.bool)
    changed[0, 2], others[0, 2] = 1.0 - changed[0, 2], False
    # The same operations on the same numbers: equal bit for bit.
    for before, after in zip(_states(stack, x), _states(stack, changed), strict=True):
        require(torch.equal(before[others], after[others]), "a token changes the states of other tokens")


def _states(stack: Stack, x: torch.Tensor) -> list[torch.Tensor]:
    """All states, hidden states and the output, with branches that treat every token alone."""
    states = [stack.entry(x)]
    for layer in stack.layers:
        states.append(layer.block(states[-1], [torch.sin] * len(layer.branches)))  # type: ignore[operator, arg-type]
    return [*states, *map(stack.hidden, states), stack.exit(states[-1])]


@rule("derivatives")
def check_derivatives(scheme: Scheme) -> None:
    """Gradients of two blocks agree with finite differences in float64 (gradcheck)."""
    bound = scheme.bind(depth=2, dim=4)
    parts = [
        part.double().requires_grad_(False) for part in (bound.entry(), bound.block(0), bound.block(1), bound.exit())
    ]
    draw = torch.Generator().manual_seed(4)
    matrices = [torch.randn(4, 4, generator=draw, dtype=torch.float64) for _ in range(4)]

    def run(x: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
        branches = [lambda y, m=m: strength * torch.tanh(y @ m) for m in matrices]
        state = parts[2](parts[1](parts[0](x), branches[:2]), branches[2:])
        return parts[3](state)

    x = torch.randn(3, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    gradcheck(run, (x, torch.tensor(0.5, dtype=torch.float64, requires_grad=True)))


@rule("autocast")
def check_autocast(scheme: Scheme) -> None:
    """The residual stream keeps its dtype under autocast."""
    stack = make_stack(scheme)
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            y = stack(make_input(dtype=dtype))
            require(y.dtype == dtype, f"a stream of {dtype} becomes {y.dtype}")
            require(y.isfinite().all(), f"a stream of {dtype} is not finite")


@rule("compile")
def check_compile(scheme: Scheme, blocks: int = 12) -> None:
    """`torch.compile` gives the same results without graph breaks, and one graph for all blocks."""
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    # More blocks than the compiler's recompilation limit.
    stack, x = make_stack(scheme, blocks).double(), make_input(dtype=torch.float64)
    expected = stack(x)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # The compiler itself reads .grad of the states between layers, which are not leaves.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        for layer in stack.layers:
            layer.compile(fullgraph=True, backend=backend)
        found = stack(x)
    torch._dynamo.reset()
    # The same operations in another order: a few hundred rounding errors.
    require(torch.allclose(found, expected, rtol=1e-10, atol=1e-10), "compiled blocks compute another function")
    require(len(graphs) <= 3, "every block is compiled anew: keep depth constants in normlab.schemes.ConstantScale")
