"""Training: one run from its configuration to its weights.

from normlab.train import TrainConfig, train
result = train(TrainConfig(model=DecoderConfig(scheme="peri"), data=("book.txt",)), Path("runs/peri"))
run = normlab.load_run("runs/peri")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normlab.train.config import TrainConfig
    from normlab.train.run import Run, load_run
    from normlab.train.trainer import Result, train

__all__ = ["Result", "Run", "TrainConfig", "load_run", "train"]

# Loaded on first use: a configuration can be described without torch.
_HOMES = {"Result": "trainer", "Run": "run", "TrainConfig": "config", "load_run": "run", "train": "trainer"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"normlab.train.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'normlab.train' has no attribute {name!r}")
