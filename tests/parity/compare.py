"""One comparison for all packages: their module against ours, built on the same sublayers and fed the same input.

Compared are the output and the gradients of the input and of every parameter. The sublayers are the very same modules
on both sides, so whatever differs is the step around them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from normlab import Stack
from normlab.norms import Norm
from normlab.schemes.contract.scales import LearnedScale

B, T = 2, 6

ROUNDINGS = 250
"""Two ways to compute one function differ by half an eps wherever they round differently. Here that is the norms
(x/‖x‖·√d against x·rsqrt(mean x²)), about 5 roundings each: a path of 17 norms, forward and back, makes 170 roundings
or 85 eps. A factor of 3 is left for branches that pass errors on with a gain above one. Measured: 22 eps at most.
Another scheme is no matter of rounding: it differs by 1e-3 at least, ten orders of magnitude away in float64."""

WRONG = 1e-3
"""What a comparison with another scheme has to exceed."""


def tolerance(dtype: torch.dtype = torch.float64) -> float:
    """Relative to the largest element of what is compared: 6e-14 in float64, 3e-5 in float32."""
    return ROUNDINGS * torch.finfo(dtype).eps


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Some packages still call `torch.jit.script` when they are imported."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit.script", category=DeprecationWarning)
        yield


def states(width: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> torch.Tensor:
    """Hidden states of RMS about one that ask for their gradient."""
    x = torch.randn(B, T, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return x.requires_grad_()


@torch.no_grad()
def scatter_(parameters: list[nn.Parameter], size: float = 0.3) -> None:
    """Move gains away from their initial value, where many mistakes are invisible."""
    generator = torch.Generator().manual_seed(2)
    for parameter in parameters:
        noise = torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.add_(size * (2.0 * noise - 1.0))


@torch.no_grad()
def copy_gains(stack: Stack, gains: list[nn.Parameter], offset: float = 0.0) -> dict[nn.Parameter, nn.Parameter]:
    """Give the norms and scales of our stack, in order of their place, the values of theirs (`offset` + parameter).

    Returns which parameter of ours stands for which of theirs.
    """
    own = [m for m in stack.modules() if isinstance(m, Norm | LearnedScale) and m.weight is not None]
    counterpart = {}
    for module, gain in zip(own, gains, strict=True):
        shift = offset - float(isinstance(module, Norm) and module.offset)
        module.weight.copy_(gain + shift)
        counterpart[gain] = module.weight
    return counterpart


def differences(
    theirs: Callable[[torch.Tensor], torch.Tensor],
    ours: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    leaves: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
) -> dict[str, float]:
    """Relative difference of the output and of the gradients of x and of all `leaves` (theirs, ours)."""
    their_leaves, our_leaves = zip((x, x), *leaves.values(), strict=True)
    their_output, their_gradients = _run(theirs, x, their_leaves)
    our_output, our_gradients = _run(ours, x, our_leaves)
    result = {"output": relative(our_output, their_output)}
    for name, a, b in zip(["input", *leaves], our_gradients, their_gradients, strict=True):
        result[f"gradient of {name}"] = relative(a, b)
    return result


def module_differences(
    theirs: nn.Module,
    stack: Stack,
    x: torch.Tensor,
    counterpart: Mapping[nn.Parameter, nn.Parameter],
    run_theirs: Callable[[torch.Tensor], torch.Tensor] | None = None,
    run_ours: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> dict[str, float]:
    """The same for two modules: every parameter of either must have its partner; sublayers' are their own."""
    leaves = {name: (p, counterpart.get(p, p)) for name, p in theirs.named_parameters()}
    assert {id(p) for _, p in leaves.values()} == {id(p) for p in stack.parameters()}, "parameters do not pair up"
    return differences(run_theirs or theirs, run_ours or stack, x, leaves)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference over the largest element of b."""
    size = b.detach().abs().max().item()
    assert size > 0.0, "nothing to compare: zero agrees with zero"
    return ((a - b).detach().abs().max() / size).item()


def check(found: Mapping[str, float], allowed: float) -> None:
    """Every difference within what rounding explains (NaN is not)."""
    bad = {name: value for name, value in found.items() if not value <= allowed}
    assert not bad, f"more than {allowed:.1e} apart: {bad}"


def _run(function, x, leaves) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    output = function(x)
    # Weighted: the plain sum of squares is constant after a norm, and its gradient nothing but rounding.
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=output.dtype)
    return output, torch.autograd.grad((weight * output.square()).sum(), leaves)
