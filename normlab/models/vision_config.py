"""Configuration of a vision Transformer; importable without torch, like all configurations."""

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
    """Configuration of a vision Transformer: `VisionConfig(scheme="geonorm", image_size=224, patch=16, channels=3)`."""

    presets: ClassVar = {
        "digits": {"depth": 6, "dim": 64, "heads": 4, "image_size": 8, "patch": 2, "channels": 1, "classes": 10},
        "vit-s": {"depth": 12, "dim": 384, "heads": 6, **_PHOTOGRAPHS},
        "vit-b": {"depth": 12, "dim": 768, "heads": 12, **_PHOTOGRAPHS},
    }
    sizes = (*TransformerConfig.sizes, "image_size", "patch", "channels", "classes")

    image_size: int = 8
    """Height and width of an image in pixels."""
    patch: int = 2
    """Height and width of a patch in pixels, a divisor of image_size."""
    channels: int = 1
    """Colour channels: 1 for grey, 3 for RGB."""
    classes: int = 10
    """Number of classes."""
    pooling: Pooling = "class"
    """Input of the head: a class token, or the mean over all patches."""

    def check(self) -> None:
        if self.image_size % self.patch:
            raise NormLabError(
                f"patch {self.patch} does not divide image_size {self.image_size}; try patch {self._nearest_patch()}"
            )
        if self.pooling not in get_args(Pooling):
            raise unknown("pooling", self.pooling, get_args(Pooling))

    @property
    def patches(self) -> int:
        """Number of patches in an image."""
        return (self.image_size // self.patch) ** 2

    @property
    def pixels(self) -> int:
        """Numbers in a patch: channels times pixels."""
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
