"""What a vision Transformer is made of; free of torch until one is written down, like all configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from normlab.errors import NormLabError, unknown
from normlab.models.config import TransformerConfig

if TYPE_CHECKING:
    import torch

    from normlab.models.vision import VisionTransformer

Pooling = Literal["class", "mean"]

_PHOTOGRAPHS = {"image_size": 224, "patch": 16, "channels": 3, "classes": 1000}


@dataclass(frozen=True, kw_only=True)
class VisionConfig(TransformerConfig):
    """A vision Transformer: `VisionConfig(scheme="geonorm", image_size=224, patch=16, channels=3, classes=1000)`."""

    presets: ClassVar = {
        "digits": {"depth": 6, "dim": 64, "heads": 4, "image_size": 8, "patch": 2, "channels": 1, "classes": 10},
        "vit-s": {"depth": 12, "dim": 384, "heads": 6, **_PHOTOGRAPHS},
        "vit-b": {"depth": 12, "dim": 768, "heads": 12, **_PHOTOGRAPHS},
    }
    sizes = (*TransformerConfig.sizes, "image_size", "patch", "channels", "classes")

    image_size: int = 8
    """Pixels along each side of an image."""
    patch: int = 2
    """Pixels along each side of a patch, a divisor of image_size."""
    channels: int = 1
    """Numbers that a pixel has: 1 for grey, 3 for colour."""
    classes: int = 10
    """Kinds of images to tell apart."""
    pooling: Pooling = "class"
    """What the head reads: a class token that looks at all patches, or the mean over the patches."""

    def check(self) -> None:
        if self.image_size % self.patch:
            raise NormLabError(
                f"patch {self.patch} does not divide image_size {self.image_size}; try patch {self._nearest_patch()}"
            )
        if self.pooling not in get_args(Pooling):
            raise unknown("pooling", self.pooling, get_args(Pooling))

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch) ** 2

    @property
    def pixels(self) -> int:
        """Numbers in a patch."""
        return self.channels * self.patch**2

    @property
    def sequence(self) -> int:
        return self.patches + (self.pooling == "class")

    @property
    def answers(self) -> int:
        return self.classes

    def build(self, *, device: torch.device | str | None = None) -> VisionTransformer:
        from normlab.models.vision import VisionTransformer

        return VisionTransformer(self, device=device)

    def _nearest_patch(self) -> int:
        divisors = [size for size in range(1, self.image_size + 1) if self.image_size % size == 0]
        return min(divisors, key=lambda size: abs(size - self.patch))
