"""Adapters for transformers' caches and attention backends.

NormLab's attention uses the layout (B, T, heads, head_dim), transformers (B, heads, T, head_dim).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from normlab.errors import NormLabError
from normlab.hf.exporting.configuration import NormLabConfig


class LayerCache:
    """One layer of a transformers cache, in NormLab's layout."""

    def __init__(self, cache: Cache, layer: int) -> None:
        self._cache, self._layer = cache, layer

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._cache.update(k.transpose(1, 2), v.transpose(1, 2), self._layer)
        return keys.transpose(1, 2), values.transpose(1, 2)


class AttentionBackend:
    """The attention function named by `attn_implementation`, for one layer; backends read the public attributes."""

    is_causal = True

    def __init__(self, config: NormLabConfig, layer: int, training: bool, keep: bool, options: dict[str, Any]) -> None:
        self.config, self.layer_idx, self.training = config, layer, training
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.weights: torch.Tensor | None = None
        """Attention weights, kept for `output_attentions`."""
        self._keep, self._options = keep, options

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        name = self.config._attn_implementation or "sdpa"
        function = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        heads = (part.transpose(1, 2) for part in (q, k, v))
        mixed, weights = function(self, *heads, mask, dropout=0.0, scaling=scale, **self._options)
        if self._keep:
            self.weights = weights
        return mixed

    def kept(self) -> torch.Tensor:
        if self.weights is None:
            name = self.config._attn_implementation
            raise NormLabError(
                f"attention {name!r} keeps no weights; for output_attentions load it with attn_implementation='eager'"
            )
        return self.weights
