"""Patch embedding of a vision Transformer, with learned positions and an optional class token.

Formula    state = [class; W patch/√P] + positions,  P numbers in a patch

Positions are learned, so that the scheme's weight decay and constraints apply to them as to any embedding. W and the
positions start with unit variance, and 1/√P gives a patch of unit pixels unit variance, so that content and position
have the same size. The same holds under nGPT, which makes the columns of W and every position unit vectors. Entries of
unit size change slowly, which stabilises training (arXiv 2104.02057).
"""

from __future__ import annotations

import math

import torch
from torch import nn

from normlab.models.sublayer import product_dtype
from normlab.models.vision_config import VisionConfig
from normlab.roles import Part, Spec


class ImageEmbedding(nn.Module):
    """Maps images (B, C, H, W) to states (B, T, D)."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch = config.patch
        self.weight = nn.Parameter(torch.empty(config.dim, config.pixels))
        self.positions = nn.Parameter(torch.empty(config.sequence, config.dim))
        self.class_token = nn.Parameter(torch.empty(1, config.dim)) if config.pooling == "class" else None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.place(cut(images, self.patch))

    def place(self, patches: torch.Tensor) -> torch.Tensor:
        """Embed patches (B, N, P) and add positions."""
        dtype = product_dtype(patches, self.weight)
        states = (patches / math.sqrt(patches.shape[-1])).to(dtype) @ self.weight.to(dtype).T
        if self.class_token is not None:
            first = self.class_token.to(dtype).expand(len(states), 1, -1)
            states = torch.cat([first, states], dim=1)
        return states + self.positions

    def parameter_roles(self) -> dict[str, Spec]:
        """Roles of the parameters (`normlab.roles`)."""
        place = Part("position", input_axis=-2)
        return {"weight": "patch", "positions": place, "class_token": place}


def cut(images: torch.Tensor, size: int) -> torch.Tensor:
    """Split images (B, C, H, W) into patches (B, N, C·size·size), row by row."""
    B, C, H, W = images.shape
    grid = images.reshape(B, C, H // size, size, W // size, size)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(B, (H // size) * (W // size), C * size * size)
