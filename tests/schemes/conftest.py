"""Every scheme there is: ours, installed plug-ins, and the one from the example, which nobody registered."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

import normlab
from normlab.models import MLP, Attention

DIM, HEADS, HIDDEN, TOKENS = 16, 2, 24, 6


def example_scheme() -> type[normlab.Scheme]:
    path = Path(__file__).parents[2] / "examples" / "custom_scheme.py"
    spec = importlib.util.spec_from_file_location("custom_scheme", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pickle and inspect look classes up there
    spec.loader.exec_module(module)
    return module.Balanced


SCHEMES: list[normlab.Scheme] = [*(normlab.scheme(name) for name in normlab.schemes()), example_scheme()()]


def pytest_generate_tests(metafunc) -> None:
    if "scheme" in metafunc.fixturenames:
        metafunc.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)


def make_stack(scheme, blocks=4, dim=DIM, *, seed=0, std=None, init=True, **options) -> normlab.Stack:
    """Our sublayers under a scheme; every matrix is drawn in the same order whatever the scheme."""
    sublayers = [(Attention(dim, HEADS, kv_heads=1), MLP(dim, HIDDEN)) for _ in range(blocks)]
    stack = normlab.Stack(scheme, sublayers, dim, **options)
    return stack.init_(generator=torch.Generator().manual_seed(seed), std=std) if init else stack


def make_input(dim=DIM, dtype=torch.float32, scale=1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(2, TOKENS, dim, generator=generator) * scale).to(dtype).requires_grad_()


def weighted_sum(y: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient no norm can cancel: a sum of squares is constant on the sphere."""
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    return (y * weights).sum()
