"""Every scheme there is: ours, installed plug-ins, and the one from the example, which nobody registered."""

from __future__ import annotations

from pathlib import Path

import normlab

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_scheme.py"

SCHEMES: list[normlab.Scheme] = [
    *(normlab.scheme(name) for name in normlab.list_schemes()),
    normlab.scheme(f"{EXAMPLE}:Balanced"),
]


def pytest_generate_tests(metafunc) -> None:
    if "scheme" in metafunc.fixturenames:
        metafunc.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
