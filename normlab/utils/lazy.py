"""Lazy, optional and deprecated imports.

Public names are loaded on first use, because `normlab --help` must not wait a second for torch.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from normlab.errors import NormLabError


def loader(package: str, homes: Mapping[str, str], renamed: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """A `__getattr__` for a package that imports its public names on first use.

    `homes` maps each public name to the module of the package that defines it, or to "" where the name is a module.
    `renamed` maps names of an earlier version to the full name of what replaced them; using one warns.
    """

    def find(name: str) -> Any:
        if name not in homes:
            return _renamed(package, name, renamed or {})
        home = importlib.import_module(f"{package}.{homes[name] or name}")
        return getattr(home, name) if homes[name] else home

    return find


def moved(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` that finds names of an earlier version at their new place, with a DeprecationWarning."""
    return lambda name: _renamed(module, name, homes)


def _renamed(module: str, name: str, homes: Mapping[str, str]) -> Any:
    if name not in homes:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    place, _, now = homes[name].rpartition(".")
    # The warning points at the code that uses the name: above this function and the `__getattr__` that calls it.
    warnings.warn(f"{module}.{name} is now {homes[name]}", DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(place), now)


def import_optional(package: str, extra: str, what: str) -> Any:
    """Import an optional dependency, or raise an error that names the extra to install.

    `what` is the feature that needs `package`, as the error message shows it.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise NormLabError(f'{what} needs {package}, which is missing; try: pip install "normlab[{extra}]"') from None
