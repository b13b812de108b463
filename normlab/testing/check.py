"""`check_scheme`: run all rules on one scheme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from normlab.errors import NormLabError, unknown
from normlab.schemes.catalog.reference import check_class, is_scheme
from normlab.schemes.catalog.registry import scheme as find_scheme
from normlab.schemes.contract.scheme import Scheme
from normlab.testing.rules import RULES, Rule
from normlab.testing.training import check_options


def check_scheme(
    scheme: Scheme | type[Scheme] | str,
    *,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    others: Mapping[str, Any] | None = None,
) -> list[str]:
    """Check a scheme against all rules; returns the names of the rules.

    `scheme` is a scheme, its class, or its text: "highway.py:Highway(gate=-2)". `only` and `skip` select from
    `normlab.testing.RULES`. `others` gives another valid value for options whose effect cannot be tested with a guess.
    Raises one AssertionError that names every broken rule and how it is broken. Takes a few seconds.
    """
    for name in (*only, *skip):
        if name not in RULES:
            raise unknown("rule", name, RULES)
    found = _instance(scheme)
    chosen = {name: RULES[name] for name in RULES if name not in skip and (not only or name in only)}
    if others and "options" in chosen:
        chosen["options"] = lambda scheme: check_options(scheme, others)
    faults = {name: fault for name, rule in chosen.items() if (fault := _fault(rule, found))}
    if faults:
        told = "".join(f"\n  {name}: {fault}" for name, fault in faults.items())
        raise AssertionError(f"{found.label} breaks {len(faults)} of {len(chosen)} rules:{told}")
    return list(chosen)


def _instance(scheme: Scheme | type[Scheme] | str) -> Scheme:
    if isinstance(scheme, type):
        check_class(scheme, scheme.__qualname__)
    return scheme() if is_scheme(scheme) else find_scheme(scheme)  # type: ignore[operator, arg-type]


def _fault(rule: Rule, scheme: Scheme) -> str | None:
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            rule(scheme)
    except (AssertionError, NormLabError) as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None
