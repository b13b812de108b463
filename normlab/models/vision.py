"""`VisionTransformer`: an image classifier (ViT) built from a scheme."""

from __future__ import annotations

import torch
from torch import nn

from normlab.errors import NormLabError
from normlab.models.head import Head
from normlab.models.patches import ImageEmbedding
from normlab.models.transformer import Transformer
from normlab.models.vision_config import VisionConfig


class VisionTransformer(Transformer):
    """An image classifier: `model(images)` returns logits (B, classes) for images (B, C, H, W)."""

    config: VisionConfig
    embedding: ImageEmbedding

    def __init__(self, config: VisionConfig, *, device: torch.device | str | None = None):
        super().__init__(config, device=device)

    def _new_embedding(self) -> nn.Module:
        return ImageEmbedding(self.config)

    def _new_head(self) -> Head:
        return Head(self.config.dim, self.config.classes, tied=False)

    def features(self, inputs: torch.Tensor) -> torch.Tensor:
        """The head's input (B, D): the class token or the mean over the patches."""
        self._check(inputs)
        hidden = self.stack(self._in_stream(self.embedding(inputs)), causal=False, **self._to_attention())
        return hidden[:, 0] if self.config.pooling == "class" else hidden.mean(dim=1)

    def example(self, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        if length != config.sequence:
            raise NormLabError(f"an image is a sequence of {config.sequence} tokens, not of {length}; leave length out")
        size = (config.channels, config.image_size, config.image_size)
        return torch.zeros(batch, *size, device="cpu"), torch.zeros(batch, dtype=torch.long, device="cpu")

    def products_outside(self) -> int:
        # The head is applied once per image; positions are added, and a class token is not multiplied.
        an_image = self.config.patches * self.embedding.weight.numel() + sum(p.numel() for p in self.head.parameters())
        return round(an_image / self.config.sequence)

    def _check(self, images: torch.Tensor) -> None:
        config = self.config
        expected = (config.channels, config.image_size, config.image_size)
        if images.ndim != 4 or tuple(images.shape[1:]) != expected or not images.is_floating_point():
            wanted = ", ".join(map(str, expected))
            raise NormLabError(f"expected images as floats (batch, {wanted}), got {images.dtype} {tuple(images.shape)}")
