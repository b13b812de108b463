"""Names that are loaded on first use: torch takes a second to import, and `normlab --help` must not wait for it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def loader(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose public names live in the modules that `homes` names ("": the module)."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = importlib.import_module(f"{package}.{homes[name] or name}")
        return getattr(home, name) if homes[name] else home

    return find
