"""Registry of the rules for schemes, and helpers to write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from normlab.errors import NormLabError
from normlab.schemes.contract.scheme import Scheme

Rule = Callable[[Scheme], None]
R = TypeVar("R", bound=Rule)
RULES: dict[str, Rule] = {}
"""All rules by name; a rule raises AssertionError if the scheme breaks it."""


def rule(name: str) -> Callable[[R], R]:
    """Decorator that adds a function to the rules."""

    def add(check: R) -> R:
        RULES[name] = check
        return check

    return add


def require(holds: Any, otherwise: str) -> None:
    """Raise AssertionError with the message `otherwise` unless `holds`."""
    # Not `assert`, which python -O removes.
    if not bool(holds):
        raise AssertionError(otherwise)


def require_refusal(call: Callable[[], Any], what: str) -> None:
    """Raise AssertionError unless a call raises NormLabError."""
    try:
        call()
    except NormLabError:
        return
    raise AssertionError(f"{what} should be refused with a NormLabError")


def require_finite(found: Mapping[str, Any]) -> None:
    """Raise AssertionError unless all gradients exist and are finite."""
    for name, grad in found.items():
        require(grad is not None, f"{name} gets no gradient")
        require(grad.isfinite().all(), f"the gradient of {name} is not finite")


def require_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], what: str) -> None:
    """Raise AssertionError unless all tensors are bitwise equal."""
    for name, value in one.items():
        require(torch.equal(value, other[name]), f"{name} {what}")
