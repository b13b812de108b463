"""Lazy imports: public names that are loaded on first use, since `normlab --help` must not wait a second for torch."""

from __future__ import annotations

import importlib
import warnings
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


def moved(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module that is no more: its public names, found at their new place with a warning."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        place, _, now = homes[name].rpartition(".")
        warnings.warn(f"{module}.{name} is now {homes[name]}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(place), now)

    return find
