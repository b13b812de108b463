"""NormLab: choose, check, train and understand how the layers of a Transformer are normalised."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from normlab import geometry, norms, ops
    from normlab.errors import NormLabError
    from normlab.models import Decoder, DecoderConfig
    from normlab.schemes.base import Scheme
    from normlab.schemes.registry import names as schemes
    from normlab.schemes.registry import register, scheme
    from normlab.stack import Stack
    from normlab.train.config import TrainConfig
    from normlab.train.run import load_run

__all__ = [
    "Decoder",
    "DecoderConfig",
    "NormLabError",
    "Scheme",
    "Stack",
    "TrainConfig",
    "geometry",
    "load_run",
    "norms",
    "ops",
    "register",
    "scheme",
    "schemes",
]

# Loaded on first use: torch takes a second to import, and `normlab --help` must not wait for it.
_HOMES = {
    "Decoder": "normlab.models",
    "DecoderConfig": "normlab.models",
    "NormLabError": "normlab.errors",
    "Scheme": "normlab.schemes.base",
    "Stack": "normlab.stack",
    "TrainConfig": "normlab.train.config",
    "load_run": "normlab.train.run",
    "register": "normlab.schemes.registry",
    "scheme": "normlab.schemes.registry",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in ("geometry", "norms", "ops", "schemes"):
        return importlib.import_module(f"normlab.{name}")
    raise AttributeError(f"module 'normlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
