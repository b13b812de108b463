"""Transformer models built from a scheme: decoder, encoder, vision Transformer, and their sublayers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normlab.utils.lazy import loader

if TYPE_CHECKING:
    from normlab.models.attention import Attention
    from normlab.models.cache import KVCache
    from normlab.models.config import PRESETS, DecoderConfig, EncoderConfig
    from normlab.models.decoder import Decoder
    from normlab.models.encoder import Encoder
    from normlab.models.mlp import MLP
    from normlab.models.moe import MoE
    from normlab.models.vision import VisionTransformer
    from normlab.models.vision_config import VisionConfig

__all__ = [
    "MLP",
    "PRESETS",
    "Attention",
    "Decoder",
    "DecoderConfig",
    "Encoder",
    "EncoderConfig",
    "KVCache",
    "MoE",
    "VisionConfig",
    "VisionTransformer",
]

__getattr__ = loader(
    __name__,
    {
        "MLP": "mlp",
        "PRESETS": "config",
        "Attention": "attention",
        "Decoder": "decoder",
        "DecoderConfig": "config",
        "Encoder": "encoder",
        "EncoderConfig": "config",
        "KVCache": "cache",
        "MoE": "moe",
        "VisionConfig": "vision_config",
        "VisionTransformer": "vision",
    },
)
