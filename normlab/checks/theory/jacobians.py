"""Largest singular values of branch Jacobians: the most that a block can multiply a gradient.

With an identity skip the gradient goes through Π (I + J_k)ᵀ over all branches, step Δt included in J_k, so that

    Σ log χ_k ≤ Σ log(1 + ‖J_k‖),    χ_k = ‖g_k‖ / ‖g_{k+1}‖

and the difference says how far real gradients stay from the worst direction. Dot-product attention has no constant that
weights alone could give: ‖J_k‖ is found at the state that a real pass left, by power iteration. Where the skip is not
the identity (a norm behind the sum), J is the derivative of all that the block adds, and the inequality holds as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from normlab.checks.judge.verdict import plain
from normlab.checks.theory.records import JacobianRow
from normlab.probes.blocks import BlockStack
from normlab.probes.branches import detached, find_branches, vjp
from normlab.probes.replay import RecordedCall, capture
from normlab.probes.untouched import at_rest
from normlab.utils.spaced import evenly_spaced

Product = Callable[[Tensor], Tensor]

MOST_BLOCKS = 6
"""Largest number of measured blocks: evenly spaced, with the first and the last."""

WHOLE = "block"
"""Name of the row for everything a block adds."""

_ITERATIONS = 10
"""Enough for 1 % if singular values are close to each other; the result never exceeds the true value."""
_NOTHING = 1e-12
_ALIKE = 1e-2
"""Relative difference of two equal products by rounding, also in bf16."""
_SEED = 2510


def jacobian_rows(model: nn.Module, stack: BlockStack, run: Callable[[], object]) -> list[JacobianRow]:
    """‖J‖ of the branches of some blocks in the pass that `run` makes; the model is restored afterwards."""
    places = evenly_spaced(len(stack.blocks), MOST_BLOCKS)
    # Fused attention has no second derivative, and the transpose of a transpose takes one.
    with at_rest(model), sdpa_kernel(SDPBackend.MATH):
        calls = capture(stack, [stack.blocks[place] for place in places], run)
        return [row for place, call in zip(places, calls, strict=True) if call for row in _rows(place, call)]


def largest_singular_value(f: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """‖∂f/∂x‖ at x by power iteration, from below; 0 if f does not depend on x, NaN if it is not finite."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = f(x)
        w = torch.zeros_like(y, requires_grad=True)
        # Jᵀw as a function of w, which is linear: its derivative by w is the way back to J.
        pulled = torch.autograd.grad(y, x, w, create_graph=True, allow_unused=True)[0] if y.requires_grad else None
    if pulled is None:
        return 0.0

    def push(v: Tensor) -> Tensor:
        return torch.autograd.grad(pulled, w, v.to(x), retain_graph=True)[0]

    def pull(u: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, u.to(y), retain_graph=True)[0].double()

    _check_transposes(push, pull, x.shape, y.shape)
    return math.sqrt(max(_largest_eigenvalue(lambda v: pull(push(v)), x.shape), 0.0))


def _check_transposes(push: Product, pull: Product, inputs: torch.Size, outputs: torch.Size) -> None:
    """Raise if J and Jᵀ, both computed by autograd, do not match: a part of the block has no second derivative."""
    v, u = (_random(shape) for shape in (inputs, outputs))
    pushed, pulled = push(v).double(), pull(u)
    apart = float(((pushed * u).sum() - (v * pulled).sum()).abs())
    if apart > _ALIKE * float(torch.linalg.vector_norm(pulled) * torch.linalg.vector_norm(v)):
        raise RuntimeError("a part of the block has no second derivative")


def _largest_eigenvalue(product: Product, shape: torch.Size) -> float:
    """Largest eigenvalue of a symmetric matrix, given by its products with vectors (Lanczos)."""
    v = _random(shape)
    basis: list[Tensor] = []
    images: list[Tensor] = []
    for _ in range(min(_ITERATIONS, v.numel())):
        length = torch.linalg.vector_norm(v)
        if not length > _NOTHING:
            break
        basis.append(v / length)
        images.append(product(basis[-1]))
        v = _without(_without(images[-1], basis), basis)
    seen = torch.stack(basis).flatten(1)
    small = seen @ torch.stack(images).flatten(1).T
    return float(torch.linalg.eigvalsh((small + small.T) / 2)[-1]) if small.isfinite().all() else math.nan


def _without(v: Tensor, basis: Sequence[Tensor]) -> Tensor:
    """v with its components along an orthonormal basis removed (Gram-Schmidt); twice is enough for rounding."""
    for direction in basis:
        v = v - (direction * v).sum() * direction
    return v


def _rows(place: int, call: RecordedCall) -> Iterator[JacobianRow]:
    branches = find_branches(call)
    ends = [end for branch in branches for end in branch.ends.values()]
    if not _same_shape(call):
        return
    if not _skip_is_identity(call, ends):
        yield JacobianRow(block=place, branch=WHOLE, norm=plain(_norm(call, [])))
        return
    for branch in branches:
        others = [end for end in ends if end not in branch.ends.values()]
        yield JacobianRow(block=place, branch=branch.name, norm=plain(_norm(call, others)))


def _norm(call: RecordedCall, held: Sequence[nn.Module]) -> float:
    """‖J‖ of what the block adds to its input, with the outputs of some modules held constant."""
    with _holding(held):
        return largest_singular_value(lambda state: call.with_state(state).repeat() - state, call.state)


def _same_shape(call: RecordedCall) -> bool:
    with torch.no_grad():
        return call.repeat().shape == call.state.shape


def _skip_is_identity(call: RecordedCall, ends: Sequence[nn.Module]) -> bool:
    """Whether the block is the identity if the outputs of its branches are held constant."""
    state = call.state.detach().requires_grad_()
    with _holding(ends), torch.enable_grad():
        result = call.with_state(state).repeat()
    v = _random(result.shape).to(result)
    found = vjp([result], [state], [v])[0]
    return found is not None and torch.equal(found, v)


def _holding(modules: Sequence[nn.Module]) -> ExitStack:
    """Hooks that detach the outputs of these modules."""
    hooks = ExitStack()
    for module in modules:
        hooks.callback(module.register_forward_hook(lambda _module, _args, output: detached(output)).remove)
    return hooks


def _random(shape: torch.Size) -> Tensor:
    """A random tensor from a fixed seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64)
