"""Images as sequences: patches, each at a learned place, behind a class token if there is one.

Formula    state = [class; W patch/√P] + positions,  P numbers in a patch

Positions are learned: a table with a role, which the scheme decays and constrains like any embedding; fixed sinusoids
would be beyond its rules. W and positions start with unit entries, and 1/√P gives a patch of unit pixels unit size, so
that what is seen and where it is seen weigh the same; as they do under nGPT, whose constraint makes the columns of W
and every position unit vectors. Unit entries learn slowly, which steadies training (arXiv 2104.02057).
"""

from __future__ import annotations

import math

import torch
from torch import nn

from normlab.models.sublayer import product_dtype
from normlab.models.vision_config import VisionConfig
from normlab.roles import Part, Spec


class ImageEmbedding(nn.Module):
    """Images (B, C, H, W) in, states (B, T, D) out."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch = config.patch
        self.weight = nn.Parameter(torch.empty(config.dim, config.pixels))
        self.positions = nn.Parameter(torch.empty(config.sequence, config.dim))
        self.class_token = nn.Parameter(torch.empty(1, config.dim)) if config.pooling == "class" else None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.place(cut(images, self.patch))

    def place(self, patches: torch.Tensor) -> torch.Tensor:
        """The states of patches (B, N, P)."""
        dtype = product_dtype(patches, self.weight)
        states = (patches / math.sqrt(patches.shape[-1])).to(dtype) @ self.weight.to(dtype).T
        if self.class_token is not None:
            first = self.class_token.to(dtype).expand(len(states), 1, -1)
            states = torch.cat([first, states], dim=1)
        return states + self.positions

    def parameter_roles(self) -> dict[str, Spec]:
        place = Part("position", input_axis=-2)
        return {"weight": "patch", "positions": place, "class_token": place}


def cut(images: torch.Tensor, size: int) -> torch.Tensor:
    """Patches (B, N, C·size·size), row by row, of images (B, C, H, W)."""
    B, C, H, W = images.shape
    grid = images.reshape(B, C, H // size, size, W // size, size)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(B, (H // size) * (W // size), C * size * size)
