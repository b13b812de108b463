"""Every scheme there is: ours, installed plug-ins, and the one from the example, which nobody registered."""

from __future__ import annotations

from pathlib import Path

import pytest

import normlab

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_scheme.py"

SCHEMES: list[normlab.Scheme] = [
    *(normlab.scheme(name) for name in normlab.list_schemes()),
    normlab.scheme(f"{EXAMPLE}:Balanced"),
]
NAMES = [scheme.name for scheme in SCHEMES]


def pytest_generate_tests(metafunc) -> None:
    if "scheme" not in metafunc.fixturenames:
        return
    few = metafunc.definition.get_closest_marker("quick_schemes")
    quick = NAMES if few is None else few.args
    marks = ((scheme, () if scheme.name in quick else pytest.mark.full) for scheme in SCHEMES)
    metafunc.parametrize("scheme", [pytest.param(scheme, marks=mark, id=scheme.name) for scheme, mark in marks])
