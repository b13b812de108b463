"""Parametrised tests of which `make test` runs a few representatives and `make test-full` the rest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

ALIKE = {"attnres": "mhc", "gated": "mhc", "hc": "mhc", "highway": "peri", "lambdas": "dual", "siamese": "dual"}
"""Schemes that take the same paths through models, training and checks as another. Outside of `tests/schemes` their
cases have the mark `alike`: `make test-alike` runs them, for who changes such a scheme and before a release."""


def parametrize(names: str | tuple[str, ...], values: Iterable[Any], *, quick: Collection[Any], **options: Any) -> Any:
    """Like `pytest.mark.parametrize`, with the mark `full` on every case that is not in `quick`.

    Choose cases for `quick` that take different paths through the code. Where a case has several values, `quick` may
    name it by the first of them. Stacked matrices multiply: a case of the product is quick if it is in all of them.
    """
    several = not isinstance(names, str)
    cases = [tuple(value) if several else (value,) for value in values]
    found = [_named(case, several, quick) for case in cases]
    unknown = [name for name in quick if name not in found]
    assert not unknown, f"{names}: no such case: {unknown}"
    marks = [() if name in quick else pytest.mark.full for name in found]
    params = [pytest.param(*case, marks=mark) for case, mark in zip(cases, marks, strict=True)]
    return pytest.mark.parametrize(names, params, **options)


def quick_if(chosen: Callable[..., bool]) -> Any:
    """Of stacked matrices, the mark `full` on every case for which `chosen` is false; it takes arguments of the test.

    For products of which each value is quick with one partner, not with all of them.
    """
    return pytest.mark.quick_if.with_args(chosen)


def is_left_out(item: pytest.Item) -> bool:
    """Whether a condition of `quick_if` leaves this case to `make test-full`."""
    params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    conditions = [mark.args[0] for mark in item.iter_markers("quick_if")]
    return not all(chosen(*(params[name] for name in inspect.signature(chosen).parameters)) for chosen in conditions)


def _named(case: tuple[Any, ...], several: bool, quick: Collection[Any]) -> Any:
    return case if several and case in quick else case[0]


def is_repetition(item: pytest.Item) -> bool:
    """Whether a test outside of `tests/schemes` runs over every scheme, and now over one that is like another."""
    callspec: Any = getattr(item, "callspec", None)
    values = [] if callspec is None else [value for value in callspec.params.values() if isinstance(value, str)]
    return "/tests/schemes/" not in str(item.path) and any(value in ALIKE for value in values)
