"""Models built from a scheme, and the sublayers they are made of."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normlab.models.attention import Attention
    from normlab.models.cache import KVCache
    from normlab.models.config import PRESETS, DecoderConfig
    from normlab.models.decoder import Decoder
    from normlab.models.mlp import MLP
    from normlab.models.moe import MoE

__all__ = ["MLP", "PRESETS", "Attention", "Decoder", "DecoderConfig", "KVCache", "MoE"]

# Loaded on first use: a configuration can be described without torch.
_HOMES = {
    "MLP": "mlp",
    "PRESETS": "config",
    "Attention": "attention",
    "Decoder": "decoder",
    "DecoderConfig": "config",
    "KVCache": "cache",
    "MoE": "moe",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"normlab.models.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'normlab.models' has no attribute {name!r}")
