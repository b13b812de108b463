"""The rules of the contract by name, and what they are written with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from normlab.errors import NormLabError
from normlab.schemes.contract.scheme import Scheme

Rule = Callable[[Scheme], None]
R = TypeVar("R", bound=Rule)
RULES: dict[str, Rule] = {}
"""What every scheme must do, by name; a rule raises AssertionError where the scheme does not."""


def rule(name: str) -> Callable[[R], R]:
    """Add a function to the rules."""

    def add(check: R) -> R:
        RULES[name] = check
        return check

    return add


def require(holds: Any, otherwise: str) -> None:
    """What must hold, and what is wrong where it does not."""
    # Not `assert`, which python -O leaves out.
    if not bool(holds):
        raise AssertionError(otherwise)


def require_refusal(call: Callable[[], Any], what: str) -> None:
    """A call that must raise a NormLabError."""
    try:
        call()
    except NormLabError:
        return
    raise AssertionError(f"{what} should be refused with a NormLabError")


def require_finite(found: Mapping[str, Any]) -> None:
    """Gradients by name that must be there and finite."""
    for name, grad in found.items():
        require(grad is not None, f"{name} gets no gradient")
        require(grad.isfinite().all(), f"the gradient of {name} is not finite")


def require_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], what: str) -> None:
    """Tensors by name that must be equal to the last bit."""
    for name, value in one.items():
        require(torch.equal(value, other[name]), f"{name} {what}")
