"""Comparisons: grids of runs, the store of their results, and what the results show.

config = CompareConfig(base=TrainConfig.preset("tiny"), schemes=("pre", "peri"), lrs=(1e-3, 2e-3), seeds=3)
standings = compare(config, "runs/first")   # stop it at any time: the same call goes on
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normlab.compare.comparison import compare
    from normlab.compare.config import CompareConfig

__all__ = ["CompareConfig", "compare"]

# Loaded on first use: the command line reads the fields of a configuration without waiting for torch.
_HOMES = {"CompareConfig": "config", "compare": "comparison"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
